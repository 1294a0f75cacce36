"""Timing by turns, so that ratios hold while the machine's load changes, and a record of where it was done."""

import os
import platform
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import gmtime, perf_counter, strftime
from typing import Any

import torch

from ifcomp import compiled

#: What the C library of ifcomp is made for, by the columns that it works on at once.
_LIBRARIES = {0: "none", 16: "AVX2", 32: "AVX-512"}


@dataclass(frozen=True)
class Timed:
    """What a function took and gave.

    Attributes:
        seconds: Of a call, for every turn.
        value: What the last call returned.
    """

    seconds: list[float]
    value: Any


def timed(function: Callable[[], Any], rounds: int = 1, turn: float = 0.0) -> Timed:
    """Time a function some times, without warming up; see `interleaved`."""
    return interleaved({"": function}, rounds, warm_up=False, turn=turn)[""]


def interleaved(
    functions: Mapping[str, Callable[[], Any]], rounds: int, *, warm_up: bool = True, turn: float = 0.0
) -> dict[str, Timed]:
    """Times functions in turn, each once a round.

    Args:
        functions: Name to a function without arguments that returns when its work is done.
        rounds: Number of timed rounds, at least 1.
        warm_up: Call each once before; what takes many seconds does not need it.
        turn: Seconds that a turn lasts at least: what is quicker is called several times, and the mean counts. Else the
            best of several turns would be one in a quiet moment for what is short, which what is long cannot have.
    """
    if warm_up:
        for function in functions.values():
            function()
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    values: dict[str, Any] = {}
    for _ in range(rounds):
        for name, function in functions.items():
            start, calls, took = perf_counter(), 0, 0.0
            while not calls or took < turn:
                values[name] = function()
                calls, took = calls + 1, perf_counter() - start
            seconds[name].append(took / calls)
    return {name: Timed(seconds[name], values[name]) for name in functions}


def environment() -> dict[str, Any]:
    """Versions, processor, threads, load, the variant of ifcomp's C library, date and commit (None outside a
    repository), as result files have them.
    """
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "library": _LIBRARIES[compiled.panel_width()],
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
