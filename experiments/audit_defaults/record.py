"""Results as JSON that a stopped run continues, with what made them."""

import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import sklearn
import torch

import ifcomp
from ifcomp.files import written_atomically


def continue_run(path: Path, settings: dict[str, Any], units: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """Run the units that the file does not have yet, and write it after each.

    Args:
        path: JSON file.
        settings: What all units share; a file with other settings is not continued.
        units: What to run, by name.
    """
    versions = {
        "ifcomp": ifcomp.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "scikit-learn": sklearn.__version__,
        "python": platform.python_version(),
    }
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
            with written_atomically(path) as scratch:
                text = json.dumps({"settings": settings, "versions": versions, "results": results}, indent=1)
                scratch.write_text(text + "\n")
    return results
