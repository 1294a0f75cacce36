"""A small C library beside PyTorch: sums of squares of per-example gradients that never come to memory, and gradients
of convolutions from inputs that are never unfolded.

It is made when ifcomp is installed where there is a C compiler (`hatch_build.py`), and has a variant for processors
with AVX2 and one for those with AVX-512. Without it, on other processors, for other precisions and on a GPU all is
done by PyTorch's operations, with the same results up to rounding.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

#: What `hatch_build.py` makes.
FILE = Path(__file__).with_name("squares.so")

#: Of the functions and structures below; that of the C file must be the same.
_VERSION = 4


def _fields(pointers: str, sizes: str) -> tuple[tuple[str, Any], ...]:
    kinds = {ctypes.c_void_p: pointers.split(), ctypes.c_int64: sizes.split()}
    return tuple((name, kind) for kind, names in kinds.items() for name in names)


class _Squares(ctypes.Structure):
    """``Squares`` of the C file."""

    _fields_ = _fields(
        "rows inputs weights forms totals scratch",
        "examples cotangents outputs positions columns scratch_size width threads",
    )


class _Gradients(ctypes.Structure):
    """``Gradients`` of the C file."""

    _fields_ = _fields(
        "rows images places runs gradients scratch",
        "examples outputs positions columns example_stride output_stride size run_count length bias scratch_size width "
        "threads",
    )


@cache
def _library() -> ctypes.CDLL | None:
    """The library; None where there is none, or one that was made from another version of the C file."""
    if not FILE.exists():
        return None
    try:
        found = ctypes.CDLL(str(FILE))
        found.ifcomp_scratch.argtypes, found.ifcomp_scratch.restype = [ctypes.c_int64] * 5, ctypes.c_int64
        found.ifcomp_window_scratch.argtypes = [ctypes.c_int64] * 3
        found.ifcomp_window_scratch.restype = ctypes.c_int64
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


class Windows(NamedTuple):
    """What every position of a convolution sees of its input, without copies: some runs of numbers of an image.

    Attributes:
        images: Padded inputs, [B, size].
        places: Where in an image what a position sees begins, [T] in int32.
        runs: Where each run begins, from there, in int32.
        length: Numbers of a run.
    """

    images: Tensor
    places: Tensor
    runs: Tensor
    length: int


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
    work = _Squares(
        **{name: own.data_ptr() for name, own in arrays.items()},
        examples=examples,
        cotangents=cotangents,
        outputs=outputs,
        positions=positions,
        columns=columns,
        scratch_size=size,
        width=panel_width(),
        threads=threads,
    )
    library.ifcomp_squares(ctypes.byref(work))


def add_gradients(gradients: Tensor, rows: Tensor, windows: Windows, bias: bool) -> None:
    """Add ``sum_t b_ot a_tj`` to gradients.

    Args:
        gradients: What to add to, [B, O, J], or with more columns, whose inputs are zero.
        rows: b, [B, O, T].
        windows: a, without the bias.
        bias: Whether an input that is always 1 follows.
    """
    library, threads = _library(), torch.get_num_threads()
    assert library is not None
    images, places, runs = windows.images, windows.places, windows.runs
    rows = rows if rows.stride(2) == 1 else rows.contiguous()
    examples, outputs, positions = rows.shape
    columns = gradients.shape[2]
    assert min(rows.shape) > 0
    assert gradients.shape[:2] == (examples, outputs)
    assert (len(images), len(places)) == (examples, positions)
    assert columns >= len(runs) * windows.length + bias
    assert all(own.is_contiguous() for own in (gradients, images, places, runs))
    assert (places.dtype, places.device.type) == (runs.dtype, runs.device.type) == (torch.int32, "cpu")
    assert images.shape[1] < 1 << 31
    size = window_scratch_entries(positions, columns)
    scratch = rows.new_empty(threads * size)
    assert all(serves(own) for own in (gradients, rows, images, scratch))
    work = _Gradients(
        rows=rows.data_ptr(),
        images=images.data_ptr(),
        places=places.data_ptr(),
        runs=runs.data_ptr(),
        gradients=gradients.data_ptr(),
        scratch=scratch.data_ptr(),
        examples=examples,
        outputs=outputs,
        positions=positions,
        columns=columns,
        example_stride=rows.stride(0),
        output_stride=rows.stride(1),
        size=images.shape[1],
        run_count=len(runs),
        length=windows.length,
        bias=bias,
        scratch_size=size,
        width=panel_width(),
        threads=threads,
    )
    library.ifcomp_gradients(ctypes.byref(work))


def window_scratch_entries(positions: int, columns: int) -> int:
    """Numbers that a thread holds of what positions see while gradients are formed."""
    library = _library()
    assert library is not None
    return int(library.ifcomp_window_scratch(positions, columns, panel_width()))
