"""Memory for large intermediate results that is used again, layer after layer, piece after piece, call after call."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

#: Just below the largest block that glibc learns from.
_LARGEST_LEARNT = 32 * 2**20 - 2**13


@cache
def keep_freed_memory() -> None:
    """Make the C library keep what a backward frees for the next, rather than ask the system for it again.

    That of Linux returns all free memory above twice the largest block, up to 32 MB, that it has ever seen freed. Where
    activations are the largest blocks this is after nearly every operation, and page by page new memory then takes as
    long as the half of a backward. Here it sees one of 32 MB. Elsewhere this does nothing.
    """
    bytes(_LARGEST_LEARNT)  # never written to, so it is no memory yet


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
        """Give everything back if it is more than so many bytes."""
        if sum(place.nbytes for place in self._places.values()) > beyond:
            self._places.clear()
