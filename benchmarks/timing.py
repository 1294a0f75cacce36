"""Interleaved timing, which makes ratios robust to a changing load, and a description of the environment."""

import os
import platform
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import gmtime, perf_counter, strftime
from typing import Any

import torch


@dataclass(frozen=True)
class Timed:
    """Timings and result of a function.

    Attributes:
        seconds: Seconds per call, for each round.
        value: Result of the last call.
    """

    seconds: list[float]
    value: Any


def timed(function: Callable[[], Any], rounds: int = 1, turn: float = 0.0) -> Timed:
    """Time one function without warm-up; see `interleaved`."""
    return interleaved({"": function}, rounds, warm_up=False, turn=turn)[""]


def interleaved(
    functions: Mapping[str, Callable[[], Any]], rounds: int, *, warm_up: bool = True, turn: float = 0.0
) -> dict[str, Timed]:
    """Time functions in turns, each once per round.

    Args:
        functions: Synchronous functions without arguments, by name.
        rounds: Number of timed rounds, at least 1.
        warm_up: Call each function once before timing.
        turn: Minimum duration of a measurement in seconds. Short functions are called repeatedly and averaged, so that
            the best round of short and long functions is comparable.
    """
    if warm_up:
        for function in functions.values():
            function()
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    values: dict[str, Any] = {}
    for _ in range(rounds):
        for name, function in functions.items():
            start, calls, elapsed = perf_counter(), 0, 0.0
            while not calls or elapsed < turn:
                values[name] = function()
                calls, elapsed = calls + 1, perf_counter() - start
            seconds[name].append(elapsed / calls)
    return {name: Timed(seconds[name], values[name]) for name in functions}


def environment() -> dict[str, Any]:
    """Return versions, processor, threads, load, date and commit (None outside a repository)."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
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
