"""Memory for large intermediate results that is used again, layer after layer, piece after piece, call after call."""

from __future__ import annotations

import ctypes
import math
from contextlib import suppress
from functools import cache

import torch
from torch import Tensor

#: Parameters of glibc's ``mallopt``: how much free memory it keeps, and from what size on memory is the system's.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

#: What it is to keep, in bytes, and the largest size that it takes.
_FREE_BYTES, _OWN_BYTES = 256 * 2**20, 32 * 2**20


@cache
def keep_freed_memory() -> None:
    """Make the C library of Linux keep what one piece frees for the next, rather than ask the system for it again.

    By itself it returns all free memory above twice the largest block that it has seen freed. Where activations are the
    largest blocks this is after nearly every operation, and memory that is new again, page by page, takes as long as
    half of a backward. Elsewhere this does nothing.
    """
    with suppress(AttributeError, OSError, TypeError):  # no such function, or no such library
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, _OWN_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, _FREE_BYTES)


class Room:
    """Named places, each as large as was ever asked for.

    Memory that is asked for anew has to be found and cleared by the operating system, page by page, whenever it is
    first touched: on a CPU that takes longer than many a computation on it.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        """Without any place yet; all numbers are of one type."""
        self._dtype = dtype
        self._places: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """The place of this name in some shape. What it holds is left over from its last use."""
        size = math.prod(shape)
        if name not in self._places or len(self._places[name]) < size:
            self._places.pop(name, None)  # before there are two
            with torch.inference_mode(False):
                self._places[name] = torch.empty(size, dtype=self._dtype, device=device)
        return self._places[name][:size].view(shape)

    def clear(self, beyond: int = 0) -> None:
        """Give back places, the largest first, until they are no more than so many bytes."""
        for name in sorted(self._places, key=lambda name: self._places[name].nbytes, reverse=True):
            if sum(place.nbytes for place in self._places.values()) <= beyond:
                break
            del self._places[name]
