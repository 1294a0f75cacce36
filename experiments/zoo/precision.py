"""Float64 throughout a model: casts of float64 values to a lower precision are ignored.

Transformers often compute norms, rotations or the softmax in float32. Their gradients have errors near 1e-7, so errors
of the library below that could not be measured.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_LOWER = (torch.float32, torch.float16, torch.bfloat16)
_CASTS = (Tensor.float, Tensor.half, Tensor.bfloat16)
_WITH_DTYPE = (Tensor.to, Tensor.type, torch.softmax, Tensor.softmax, torch.nn.functional.softmax)


class KeepDouble(TorchFunctionMode):
    """Ignores casts of float64 values to a lower precision."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not args or not isinstance(args[0], Tensor) or args[0].dtype != torch.float64:
            return func(*args, **kwargs)
        if func in _CASTS:
            return args[0]
        if func in _WITH_DTYPE:
            args = tuple(torch.float64 if _is_lower(value) else value for value in args)
            kwargs = {name: torch.float64 if _is_lower(value) else value for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _is_lower(value: Any) -> bool:
    return isinstance(value, torch.dtype) and value in _LOWER
