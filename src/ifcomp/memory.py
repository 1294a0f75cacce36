"""Memory: sizes as text, available memory and measured peaks."""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ifcomp.errors import SettingError

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
        raise SettingError(
            f"max_memory must be a number of bytes or a size such as '8GB' or '512MB', but is {max_memory!r}."
        )
    number, unit = found.groups()
    if unit.upper() not in _UNITS or not float(number):
        raise SettingError(f"max_memory must be positive, in {', '.join(filter(None, _UNITS))}, but is {max_memory!r}.")
    return int(float(number) * _UNITS[unit.upper()])


def as_text(size: float) -> str:
    """Format bytes: ``1.5 GB``."""
    for unit, factor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{size / factor:,.1f} {unit}"
    return f"{size:,.0f} B"


def available(device: torch.device) -> int | None:
    """Bytes of free memory on a device, if the system reports them."""
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
    except (AttributeError, OSError, ValueError):
        return None


def _container() -> int | None:
    """Free memory of the control group of a container."""
    try:
        limit, used = (Path(f"/sys/fs/cgroup/memory.{name}").read_text().strip() for name in ("max", "current"))
        return max(0, int(limit) - int(used))
    except (OSError, ValueError):  # no such group, or "max": no limit
        return None


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that operations allocate inside the context, until they are freed.

    Attributes:
        current: Live bytes.
        peak: Largest number of live bytes so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current = self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_address(value) for value in tree_leaves((args, kwargs)) if _is_strided(value)}
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if _is_strided(value) and _address(value) not in given:  # not a view
                self._add(value.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known and self._known[key]() is not None:
            return
        self._known[key] = weakref.ref(storage, lambda _: self._remove(key, size))
        self.current += size
        self.peak = max(self.peak, self.current)

    def _remove(self, key: int, size: int) -> None:
        self.current -= size
        self._known.pop(key, None)


def _is_strided(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided


def _address(value: torch.Tensor) -> int:
    """The address of a tensor's storage.

    ``untyped_storage`` would attach a Python object to the storage. Threads of a process group could then free it only
    while the interpreter runs.
    """
    return int(value.data_ptr() - value.storage_offset() * value.element_size())


class Peak:
    """Peak bytes of a measured context; `size` is set when it ends."""

    size: int = 0


@contextmanager
def measured_peak(device: torch.device) -> Iterator[Peak]:
    """Measure the peak of tensor memory inside the context, beyond what was allocated before."""
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak
        peak.size = torch.cuda.max_memory_allocated(device) - before
        return
    tracker = LiveBytes()
    with tracker:
        yield peak
    peak.size = tracker.peak


def even_size(total: int, maximum: int) -> int:
    """Split a total into the fewest equal parts of at most ``maximum``; return the size of a part."""
    parts = -(-total // max(1, maximum))
    return -(-total // max(1, parts))
