"""Run targets in turn and store the results: ``python -m fuzz [TARGET ...] [--inputs N] [--seed S]``."""

import argparse
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fuzz.targets import TARGETS

PACKAGES = ("atheris", "torch", "numpy", "safetensors", "pandas", "pyarrow", "pillow")

#: Memory limit of a process in megabytes, and wall-clock limit of an input in seconds.
MEMORY_LIMIT, INPUT_TIMEOUT = 3000, 300


def run(name: str, inputs: int, seed: int, failures: Path) -> dict[str, Any]:
    """Fuzz one target. Failing inputs and their tracebacks are stored in the folder ``failures``."""
    options = [f"-runs={inputs}", f"-seed={seed}", f"-rss_limit_mb={MEMORY_LIMIT}", f"-timeout={INPUT_TIMEOUT}"]
    failures.mkdir(parents=True, exist_ok=True)
    options += [f"-artifact_prefix={failures / name}-", "-print_final_stats=1", "-verbosity=0"]
    start = time.perf_counter()
    process = subprocess.run(
        [sys.executable, "-m", "fuzz.child", name, *options], capture_output=True, text=True, errors="replace"
    )
    seconds = time.perf_counter() - start
    executed = re.search(r"number_of_executed_units:\s*(\d+)", process.stderr)
    memory = re.search(r"peak_rss_mb:\s*(\d+)", process.stderr)
    if process.returncode:
        (failures / f"{name}.txt").write_text(process.stdout + process.stderr)
    return {
        "inputs": int(executed[1]) if executed else 0,
        "failed": bool(process.returncode),
        "seconds": round(seconds, 1),
        "peak_megabytes": int(memory[1]) if memory else None,
        "seed": seed,
    }


def environment() -> dict[str, Any]:
    """Return date, versions and processor."""
    listing = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*:\s*(.+)", listing.read_text()) if listing.exists() else []
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "processor": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "versions": {name: version(name) for name in PACKAGES} | {"python": platform.python_version()},
    }


def main() -> int:
    """Run the targets of the command line; the exit code is 1 if an input failed."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument(
        "targets", nargs="*", metavar="TARGET", help=f"targets to run, of {', '.join(TARGETS)}; default: all"
    )
    parser.add_argument("--inputs", type=int, help="number of inputs per target; default: that of the target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--failures", type=Path, default=Path("fuzz-failures"), help="folder for failing inputs")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.targets) - TARGETS.keys())
    if unknown:
        parser.error(f"no such target: {', '.join(unknown)}")
    if importlib.util.find_spec("atheris") is None:
        parser.error("atheris is not installed; pip install atheris==3.0.0")
    results: dict[str, Any] = {}
    for name in arguments.targets or TARGETS:
        results[name] = run(name, arguments.inputs or TARGETS[name].inputs, arguments.seed, arguments.failures)
        sys.stderr.write(f"{name}: {json.dumps(results[name])}\n")
        if arguments.out:
            arguments.out.write_text(json.dumps({**environment(), "targets": results}, indent=1) + "\n")
    return int(any(target["failed"] for target in results.values()))


if __name__ == "__main__":
    sys.exit(main())
