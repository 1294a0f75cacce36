"""Memory for large intermediate results that is used again, piece after piece and layer after layer."""

from __future__ import annotations

import math

import torch
from torch import Tensor


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

    def clear(self) -> None:
        """Give everything back."""
        self._places.clear()
