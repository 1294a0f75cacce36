"""A small C library beside PyTorch: sums of squares of per-example gradients that never come to memory.

It is made when ifcomp is installed where there is a C compiler (`hatch_build.py`), and has a variant for processors
with AVX2 and one for those with AVX-512. Without it, on other processors, for other precisions and on a GPU all is
done by PyTorch's operations, with the same results up to rounding.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

#: What `hatch_build.py` makes.
FILE = Path(__file__).with_name("squares.so")

#: Of the functions and structures below; that of the C file must be the same.
_VERSION = 3


_POINTERS = ("rows", "inputs", "weights", "forms", "totals", "scratch")
_SIZES = ("examples", "cotangents", "outputs", "positions", "columns", "scratch_size", "width", "threads")


class _Squares(ctypes.Structure):
    """``Squares`` of the C file."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in _POINTERS) + tuple((name, ctypes.c_int64) for name in _SIZES)


@cache
def _library() -> ctypes.CDLL | None:
    """The library; None where there is none, or one that was made from another version of the C file."""
    if not FILE.exists():
        return None
    try:
        found = ctypes.CDLL(str(FILE))
        found.ifcomp_scratch.argtypes, found.ifcomp_scratch.restype = [ctypes.c_int64] * 5, ctypes.c_int64
        return found if found.ifcomp_version() == _VERSION else None
    except (OSError, AttributeError):  # made for another system, or PyTorch has no OpenMP
        return None


@cache
def panel_width() -> int:
    """Columns that are worked on at once on this processor; 0 without a library, or a variant for it."""
    library = _library()
    return 0 if library is None else int(library.ifcomp_width())


class Numbers(Protocol):
    """Whatever has numbers of some type on some device: a tensor, a recording, a session."""

    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...


def serves(numbers: Numbers) -> bool:
    """Whether what is made from such numbers can be left to the library."""
    return numbers.device.type == "cpu" and numbers.dtype == torch.float32 and panel_width() > 0


def panels_shape(outputs: int, columns: int) -> tuple[int, int, int]:
    """Of a matrix [O, J] in panels of columns, [P, O, width]."""
    return -(-columns // panel_width()), outputs, panel_width()


def in_panels(matrix: Tensor) -> Tensor:
    """A matrix [O, J] in panels of columns, the last with zeros after its columns."""
    panels, outputs, width = panels_shape(*matrix.shape)
    found = matrix.new_zeros(outputs, panels * width)
    found[:, : matrix.shape[1]] = matrix
    return found.view(outputs, panels, width).transpose(0, 1).contiguous()


def from_panels(panels: Tensor, columns: int) -> Tensor:
    """The way back from `in_panels` to so many columns."""
    return panels.transpose(0, 1).flatten(1)[:, :columns]


def weighted_squares(rows: Tensor, inputs: Tensor, weights: Tensor) -> Tensor:
    """``sum_oj (sum_t b_ot a_tj)^2 W_oj`` of every example and cotangent, [B, C] in float64.

    Args:
        rows: b, [B, C, O, T].
        inputs: a, [B, T, J].
        weights: W as `in_panels` has it.
    """
    parts = torch.zeros(torch.get_num_threads(), *rows.shape[:2], dtype=torch.float64, device=rows.device)
    _run(rows, inputs, weights=weights, forms=parts)
    return parts.sum(0)


def add_squares(totals: Tensor, rows: Tensor, inputs: Tensor) -> None:
    """Add ``sum_bc (sum_t b_ot a_tj)^2`` to totals, which are as `in_panels` has them.

    Args:
        totals: What to add to.
        rows: b, [B, C, O, T].
        inputs: a, [B, T, J].
    """
    _run(rows, inputs, totals=totals)


def scratch_entries(examples: int, cotangents: int, outputs: int, positions: int) -> int:
    """Numbers that a thread holds while it is at work."""
    library = _library()
    assert library is not None
    return int(library.ifcomp_scratch(examples, cotangents, outputs, positions, panel_width()))


def _run(rows: Tensor, inputs: Tensor, **others: Tensor) -> None:
    library, threads = _library(), torch.get_num_threads()
    assert library is not None
    examples, cotangents, outputs, positions = rows.shape
    columns = inputs.shape[2]
    assert min(rows.shape) > 0
    assert inputs.shape[:2] == (examples, positions)
    assert all(own.shape == panels_shape(outputs, columns) for name, own in others.items() if name != "forms")
    assert all(own.is_contiguous() for own in others.values())
    size = scratch_entries(*rows.shape)
    scratch = rows.new_empty(threads * size)
    arrays = {"rows": rows.contiguous(), "inputs": inputs.contiguous(), "scratch": scratch} | others
    assert all(serves(own) for name, own in arrays.items() if name != "forms")
    pointers = {name: own.data_ptr() for name, own in arrays.items()}
    sizes = (examples, cotangents, outputs, positions, columns, size, panel_width(), threads)
    library.ifcomp_squares(ctypes.byref(_Squares(**pointers, **dict(zip(_SIZES, sizes, strict=True)))))
