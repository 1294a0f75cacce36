"""BatchNorm in eval mode as one multiplication and one addition."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_HALF = (torch.float16, torch.bfloat16)
_MIXED = [(dtype, torch.float32) for dtype in _HALF]


def affine_batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Compute ``F.batch_norm`` with running statistics.

    The backward of PyTorch's function on CPUs gives wrong input gradients for a single example whose output gradient is
    not contiguous. It also sums the gradients of scale and shift over the batch, which is not needed.
    """
    if training or running_mean is None or running_var is None:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    if input.dtype != running_var.dtype and (input.dtype, running_var.dtype) not in _MIXED:
        raise RuntimeError(
            f"BatchNorm has statistics of type {running_var.dtype} but an input of type {input.dtype}. Convert one of "
            "them."
        )
    dtype = torch.float32 if input.dtype in _HALF else input.dtype  # half precision in float32, as in PyTorch
    slope = torch.rsqrt(running_var.to(dtype) + eps)
    slope = slope if weight is None else slope * weight.to(dtype)
    shift = -running_mean.to(dtype) * slope
    shift = shift if bias is None else shift + bias.to(dtype)
    features = (-1, *(1,) * (input.dim() - 2))
    return (input.to(dtype) * slope.view(features)).add_(shift.view(features)).to(input.dtype)


class AffineBatchNorm(TorchFunctionMode):
    """Replaces ``F.batch_norm`` by `affine_batch_norm` in the calling thread."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return (affine_batch_norm if func is F.batch_norm else func)(*args, **(kwargs or {}))
