"""Functions in a process of their own: for peak memory, and under torchrun."""

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
    """What a function returns in a new process, or in the first of several that torchrun starts.

    Args:
        function: Of a module, not nested; what it returns must be JSON.
        arguments: JSON too.
        processes: How many.
    """
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    launch = [sys.executable, *(torchrun if processes > 1 else []), "-m", __spec__.name]
    command = [*launch, f"{function.__module__}:{function.__name__}", json.dumps(arguments)]
    paths = os.pathsep.join([str(_ROOT), *filter(None, sys.path)])
    ended = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    results = re.findall(f"^{_MARK}(.*)$", ended.stdout, re.MULTILINE)
    if ended.returncode or len(results) != 1:
        raise RuntimeError(f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stdout}\n{ended.stderr}")
    return json.loads(results[0])


def peak_memory(work: Callable[[], Any]) -> int:
    """Bytes by which the memory of this process grows at most while something is done.

    Above what it holds at the start, not above its largest size so far: Linux forgets that one when asked to.
    """
    status, forget = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not forget.exists():
        return _grown(lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, work)
    gc.collect()  # what goes while the work is done would hide as much of it
    forget.write_text("5")
    return _grown(lambda: 1024 * int(re.findall(r"VmHWM:\s*(\d+) kB", status.read_text())[0]), work)


def _grown(largest: Callable[[], int], work: Callable[[], Any]) -> int:
    before = largest()
    work()
    return largest() - before


def main(arguments: Sequence[str]) -> None:
    """Call the function that the first argument names with those in the second; the first process prints."""
    module, _, name = arguments[0].partition(":")
    found = getattr(importlib.import_module(module), name)(*json.loads(arguments[1]))
    if os.environ.get("RANK", "0") == "0":
        sys.stdout.write(f"{_MARK}{json.dumps(found)}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
