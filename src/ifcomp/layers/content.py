"""Functions by which the content of tensors determines the rows of other tensors.

Layouts are verified on a few examples. They hold for all batches of the same shapes unless such a function is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

#: Functions whose rows along the first axis depend on the content of a tensor.
_REARRANGING = frozenset(
    [
        "masked_select",
        "repeat_interleave",
        "unique",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
        "_pack_padded_sequence",
    ]
)

#: Functions that do so along a given axis: the second argument, or ``dim``.
_ALONG_AXIS = frozenset(
    f"{name}{suffix}"
    for name in ("index_select", "gather", "take_along_dim", "sort", "topk", "scatter", "index_add", "index_copy")
    for suffix in ("", "_")
)

#: Functions whose result is a value on the CPU, or has a size that depends on the content of a tensor.
_CONTENT = _REARRANGING | {
    *("nonzero", "argwhere", "bincount", "item", "tolist", "numpy"),
    *("__array__", "__bool__", "__int__", "__float__", "__index__"),
}


def rearranges(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function may move rows of its first argument.

    Args:
        name: Name of the function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    if name in ("__getitem__", "__setitem__"):
        return _moves_rows(args[1][0] if isinstance(args[1], tuple) and args[1] else args[1])
    axis = kwargs.get("dim", args[1] if len(args) > 1 else -1)
    return name in _REARRANGING or (name in _ALONG_AXIS and axis in (0, -args[0].dim()))


def reads_content(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a function reads the content of a tensor: a boolean index, a bound of a slice, a listed function."""
    if name == "where":
        return len(args) == 1
    if name != "__getitem__":
        return name in _CONTENT
    index = args[1] if isinstance(args[1], tuple | list) else (args[1],)
    bounds = [bound for part in index if isinstance(part, slice) for bound in (part.start, part.stop, part.step)]
    is_mask = any(isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) for part in index)
    return is_mask or any(isinstance(bound, Tensor) for bound in bounds)


def _moves_rows(index: Any) -> bool:
    """Whether an index of the first axis may change the order or the number of rows. ``arange`` does not."""
    if isinstance(index, list):
        return True
    if not isinstance(index, Tensor) or not index.dim():
        return False
    return index.dtype == torch.bool or not torch.equal(index, torch.arange(len(index), device=index.device))
