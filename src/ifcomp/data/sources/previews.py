"""Previews of examples for reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

if TYPE_CHECKING:
    from ifcomp.report import Preview

#: Largest number of values of a row in a preview.
MAX_VALUES = 24


def preview_input(index: int, x: NDArray[Any], columns: Sequence[str] = ()) -> Preview:
    """Return a preview of one input.

    Args:
        index: Position of the example in the data.
        x: The input. Floating-point images [C, H, W], [H, W, C] or [H, W] are shown as images, other
            floating-point arrays as their first values by column, and integers as text.
        columns: Names of the values; by default their indices.
    """
    from ifcomp.report import Preview  # slow to import, and needed for reports only

    name = f"row {index}"
    if x.dtype.kind == "f" and _is_image(x.shape):
        return Preview("image", x, name)
    values = x.reshape(-1)[:MAX_VALUES].tolist()
    if x.dtype.kind != "f":
        return Preview("text", " ".join(map(str, values)) + (" ..." if x.size > MAX_VALUES else ""), name)
    return Preview("row", dict(zip(columns or map(str, range(x.size)), values, strict=False)), name)


def _is_image(shape: Sequence[int]) -> bool:
    if len(shape) == 3 and {shape[0], shape[-1]} & {1, 3}:
        return min(sorted(shape)[1:]) > 1
    return len(shape) == 2 and min(shape) > 3


def printable(text: str) -> str:
    """Escape characters that UTF-8 cannot encode, as in file names of other encodings."""
    return str(text).encode("utf-8", "backslashreplace").decode()
