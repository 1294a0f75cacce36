"""Resumable results as JSON, with settings, command and environment."""

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


def begin(description: str | None, default: Path) -> Path:
    """Parse ``--folder``, create the result folder and set PyTorch to one thread, as in all committed results."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=default, help="folder of the results")
    folder: Path = parser.parse_args().folder
    folder.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    return folder


def continue_run(path: Path, settings: dict[str, Any], units: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """Run the units that are missing in the file, and write the file after each unit.

    Args:
        path: JSON file.
        settings: Settings of all units. A file with other settings is refused.
        units: Functions to run, by name.
    """
    results: dict[str, Any] = {}
    if path.exists():
        saved = json.loads(path.read_text())
        if saved["settings"] != json.loads(json.dumps(settings)):
            raise SystemExit(f"{path} was written with other settings. Move it, or use its settings.")
        results = saved["results"]
    for name, unit in units.items():
        if name not in results:
            started = time.perf_counter()
            results[name] = {**unit(), "seconds": round(time.perf_counter() - started, 1)}
            with atomic_write(path) as scratch:
                made = {"command": command(), **environment()}
                record = {"made": made, "settings": settings, "results": results}
                scratch.write_text(json.dumps(record, indent=1) + "\n")
    return results


def command() -> str:
    """Return the command line of this process."""
    spec = sys.modules["__main__"].__spec__
    return f"python -m {spec.name}" if spec else Path(sys.argv[0]).name
