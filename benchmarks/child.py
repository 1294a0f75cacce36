"""Functions in a separate process, for peak memory and for torchrun."""

import gc
import importlib
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]
_MARK = "result of the benchmark: "


def in_child(function: Callable[..., Any], *arguments: Any, processes: int = 1) -> Any:
    """Call a function in a new process, or in several processes of torchrun; return the result of the first.

    Args:
        function: Function at module level. Its result must be JSON-serialisable.
        arguments: JSON-serialisable arguments.
        processes: Number of processes.
    """
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    launch = [sys.executable, *(torchrun if processes > 1 else []), "-m", __spec__.name]
    command = [*launch, f"{function.__module__}:{function.__name__}", json.dumps(arguments)]
    paths = os.pathsep.join([str(_ROOT), *filter(None, sys.path)])
    process = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    results = re.findall(f"^{_MARK}(.*)$", process.stdout, re.MULTILINE)
    if process.returncode or len(results) != 1:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{process.stdout}\n{process.stderr}")
    return json.loads(results[0])


def peak_memory(work: Callable[[], Any]) -> int:
    """Return the peak memory of this process during a call, in bytes above the memory at its start.

    Linux can reset the peak of a process. Elsewhere the result is the growth above the largest size so far.
    """
    status, clear_refs = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not clear_refs.exists():
        return _growth(lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, work)
    gc.collect()  # memory freed during the call would reduce the result
    clear_refs.write_text("5")  # resets VmHWM
    return _growth(lambda: 1024 * int(re.findall(r"VmHWM:\s*(\d+) kB", status.read_text())[0]), work)


def _growth(peak: Callable[[], int], work: Callable[[], Any]) -> int:
    before = peak()
    work()
    return peak() - before


def main(arguments: Sequence[str]) -> None:
    """Call the function ``module:name`` of the first argument with the JSON arguments of the second."""
    module, _, name = arguments[0].partition(":")
    result = getattr(importlib.import_module(module), name)(*json.loads(arguments[1]))
    if os.environ.get("RANK", "0") == "0":
        sys.stdout.write(f"{_MARK}{json.dumps(result)}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
