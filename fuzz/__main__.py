"""Run targets one after another, and keep what was done: ``python -m fuzz [TARGET ...] [--inputs N] [--seed S]``."""

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

#: Of a process in megabytes, and wall-clock seconds until an input counts as one that never ends.
MOST_MEMORY, MOST_SECONDS = 3000, 300


def run(name: str, inputs: int, seed: int, failures: Path) -> dict[str, Any]:
    """Fuzz one target; an input that fails is kept in a folder, with the traceback beside it."""
    options = [f"-runs={inputs}", f"-seed={seed}", f"-rss_limit_mb={MOST_MEMORY}", f"-timeout={MOST_SECONDS}"]
    failures.mkdir(parents=True, exist_ok=True)
    options += [f"-artifact_prefix={failures / name}-", "-print_final_stats=1", "-verbosity=0"]
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "fuzz.child", name, *options], capture_output=True, text=True, errors="replace"
    )
    seconds = time.perf_counter() - began
    made = re.search(r"number_of_executed_units:\s*(\d+)", done.stderr)
    memory = re.search(r"peak_rss_mb:\s*(\d+)", done.stderr)
    if done.returncode:
        (failures / f"{name}.txt").write_text(done.stdout + done.stderr)
    return {
        "inputs": int(made[1]) if made else 0,
        "failed": bool(done.returncode),
        "seconds": round(seconds, 1),
        "peak_megabytes": int(memory[1]) if memory else None,
        "seed": seed,
    }


def circumstances() -> dict[str, Any]:
    """Date, versions and machine."""
    listing = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*:\s*(.+)", listing.read_text()) if listing.exists() else []
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "processor": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "versions": {name: version(name) for name in PACKAGES} | {"python": platform.python_version()},
    }


def main() -> int:
    """Exit code 1 if an input failed."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; all by default")
    parser.add_argument("--inputs", type=int, help="for each target; by default as many as it is worth")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--failures", type=Path, default=Path("fuzz-failures"), help="folder for inputs that fail")
    parser.add_argument("--out", type=Path, help="JSON file to write results to")
    given = parser.parse_args()
    unknown = sorted(set(given.targets) - TARGETS.keys())
    if unknown:
        parser.error(f"no such target: {', '.join(unknown)}")
    if importlib.util.find_spec("atheris") is None:
        parser.error("atheris is not installed; pip install atheris==3.0.0")
    found: dict[str, Any] = {}
    for name in given.targets or TARGETS:
        found[name] = run(name, given.inputs or TARGETS[name].inputs, given.seed, given.failures)
        sys.stderr.write(f"{name}: {json.dumps(found[name])}\n")
        if given.out:
            given.out.write_text(json.dumps({**circumstances(), "targets": found}, indent=1) + "\n")
    return int(any(target["failed"] for target in found.values()))


if __name__ == "__main__":
    sys.exit(main())
