"""Timing by turns, so that ratios hold while the machine's load changes, and a record of where it was done."""

import platform
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from time import gmtime, perf_counter, strftime

import torch


def interleaved(functions: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Times functions in turn: each once to warm up, then each once a round.

    Args:
        functions: Name to a function without arguments that returns when its work is done.
        rounds: Number of timed rounds, at least 1.

    Returns:
        Name to the seconds of its fastest round.
    """
    for function in functions.values():
        function()
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            start = perf_counter()
            function()
            seconds[name].append(perf_counter() - start)
    return {name: min(times) for name, times in seconds.items()}


def environment() -> dict[str, str | int | None]:
    """Versions, processor, threads, date and commit (None outside a repository), as they belong in a result file."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu": _cpu_model(),
        "threads": torch.get_num_threads(),
        "date": strftime("%Y-%m-%d", gmtime()),
        "commit": _commit(),
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str | None:
    command = ["git", "rev-parse", "--verify", "--quiet", "HEAD"]
    try:
        result = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return result.stdout.strip() or None
