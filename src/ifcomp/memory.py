"""How much memory there is, how much may be used, and how sizes are written."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ifcomp.errors import MemoryLimitError, SettingError

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def as_bytes(max_memory: int | str | None) -> int | None:
    """``8_000_000_000``, ``"8GB"`` or ``"512 MiB"`` as bytes; None stays None.

    Raises:
        SettingError: If it is none of these, or not positive.
    """
    if max_memory is None:
        return None
    if isinstance(max_memory, int) and not isinstance(max_memory, bool) and max_memory > 0:
        return max_memory
    found = re.fullmatch(r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*([A-Za-z]*)\s*", str(max_memory))
    if isinstance(max_memory, bool) or not isinstance(max_memory, int | str) or found is None:
        raise SettingError(f"max_memory must be a number of bytes, or such as '8GB' or '512MB', but is {max_memory!r}.")
    number, unit = found.groups()
    if unit.upper() not in _UNITS or not float(number):
        raise SettingError(f"max_memory must be positive, in {', '.join(filter(None, _UNITS))}, but is {max_memory!r}.")
    return int(float(number) * _UNITS[unit.upper()])


def as_text(size: float) -> str:
    """Bytes for people: ``1.5 GB``."""
    for unit, factor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{size / factor:,.1f} {unit}"
    return f"{size:,.0f} B"


def available(device: torch.device) -> int | None:
    """Bytes that could be had on a device now without harm to others, as far as the system says."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    known = [size for size in (_system(), _container()) if size is not None]
    return min(known, default=None)


def _system() -> int | None:
    listing = Path("/proc/meminfo")
    found = re.search(r"^MemAvailable:\s+(\d+) kB", listing.read_text(), re.M) if listing.is_file() else None
    if found:
        return int(found[1]) * 1024
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # not every system knows
        return None


def _container() -> int | None:
    """What the control group of a container has left."""
    try:
        limit, used = (Path(f"/sys/fs/cgroup/memory.{name}").read_text().strip() for name in ("max", "current"))
        return max(0, int(limit) - int(used))
    except (OSError, ValueError):  # no such group, or "max": no limit
        return None


@dataclass(frozen=True)
class Budget:
    """What a step may hold.

    Attributes:
        limit: Bytes in all, or None for no limit but a sensible size.
        held: Bytes that it holds whatever the size of a piece: factors and accumulators.
    """

    limit: int | None = None
    held: int = 0

    def room(self, sensible: int) -> int:
        """Bytes for a piece: a sensible size without a limit."""
        return sensible if self.limit is None else self.limit - self.held

    def plan(
        self, holds: Callable[[int, int], int], examples: int, cotangents: int, sensible: int, together: bool
    ) -> tuple[int, int]:
        """The most examples, and then cotangents, that can be worked on at once.

        Args:
            holds: Bytes for so many examples and cotangents.
            examples: More are not there.
            cotangents: More are not wanted.
            sensible: Bytes to aim at without a limit; a single example may take more.
            together: Whether all cotangents are needed at once.

        Raises:
            MemoryLimitError: If one example, with one cotangent if that will do, does not fit; says what would.
        """
        room = self.room(sensible)
        if holds(1, cotangents) > room and self.limit is not None:
            fewest = cotangents if together else 1
            cotangents = most(lambda count: holds(1, count) <= room, fewest, cotangents)
            if holds(1, cotangents) > room:
                least = self.held + holds(1, fewest)
                raise MemoryLimitError(
                    f"max_memory is {as_text(self.limit)} ({self.limit:,} bytes), but at least {least:,} bytes "
                    f"({as_text(least)}) are needed: {as_text(self.held)} for the factors and "
                    f"{as_text(least - self.held)} for one example. Allow more, or cover fewer layers with layers=."
                )
        return most(lambda count: holds(count, cotangents) <= room, 1, max(1, examples)), cotangents


NO_LIMIT = Budget()


def most(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The largest number from low to high that fits; low if none does."""
    if fits(high):  # as a rule
        return high
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def even_size(total: int, largest: int) -> int:
    """The size of as few and as equal parts of a total as can be, with none larger than ``largest`` (or 1)."""
    parts = -(-total // max(1, largest))
    return -(-total // max(1, parts))
