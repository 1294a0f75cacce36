"""Results as JSON that a stopped run continues, with what made them."""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import environment
from ifcomp.io.files import atomic_write


def begin(description: str | None, usual: Path) -> Path:
    """The folder for results that the command line names, or the usual one; sets one thread, as all runs have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=usual, help="where results are")
    folder: Path = parser.parse_args().folder
    folder.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    return folder


def continue_run(path: Path, settings: dict[str, Any], units: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """Run the units that the file does not have yet, and write it after each.

    Args:
        path: JSON file.
        settings: What all units share; a file with other settings is not continued.
        units: What to run, by name.
    """
    results: dict[str, Any] = {}
    if path.exists():
        before = json.loads(path.read_text())
        if before["settings"] != json.loads(json.dumps(settings)):
            raise SystemExit(f"{path} was made with other settings. Move it away, or run with those.")
        results = before["results"]
    for name, unit in units.items():
        if name not in results:
            started = time.perf_counter()
            results[name] = {**unit(), "seconds": round(time.perf_counter() - started, 1)}
            with atomic_write(path) as scratch:
                everything = {"made": {"command": command(), **environment()}, "settings": settings, "results": results}
                text = json.dumps(everything, indent=1)
                scratch.write_text(text + "\n")
    return results


def command() -> str:
    """How this process was started."""
    spec = sys.modules["__main__"].__spec__
    return f"python -m {spec.name}" if spec else Path(sys.argv[0]).name
