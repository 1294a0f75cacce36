"""Normalisation layers: a diagonal block over scale and shift.

BatchNorm must use its running statistics (eval mode): with batch statistics examples are not independent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ifcomp.layers.block import Emit, NormBlock, Site
from ifcomp.layers.registry import Selection, qualified, register, trainable

_BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


@dataclass(frozen=True)
class ChannelNormBlock(NormBlock):
    """One parameter a channel, [N, C, ...]: BatchNorm, GroupNorm, InstanceNorm."""

    normalise: Callable[[Tensor], Tensor]

    def input_axes(self, value: Tensor) -> int:
        return value.dim() - 1

    def normalised(self, value: Tensor) -> Tensor:
        return self.normalise(value)

    def reduce(self, rows: Tensor, factor: Tensor, fused: bool) -> tuple[Tensor, Tensor]:
        if rows.dim() == 3:
            return (rows * factor).sum(1), rows.sum(1)
        if not fused:
            return torch.linalg.vecdot(rows.flatten(3), factor.flatten(3)).sum(1), rows.flatten(3).sum((1, 3))
        shape = rows.shape[:3]
        size = shape.numel()
        zero_and_one = rows.new_zeros(2, size)
        zero_and_one[1] = 1
        # The backward of a BatchNorm whose channels are all examples' channels: both sums in one go over the numbers.
        _, scale, shift = torch.ops.aten.native_batch_norm_backward(
            *(rows.reshape(1, size, -1), factor.reshape(1, size, -1), None, *zero_and_one, None, None),
            *(False, 0.0, [False, True, True]),
        )
        return _by_example(scale, shape), _by_example(shift, shape)


def _by_example(sums: Tensor, shape: torch.Size) -> Tensor:
    """Sums of all rows [B R C] as those of examples [B, C]."""
    return sums.view(shape[0], shape[2]) if shape[1] == 1 else sums.view(shape).sum(1)


@dataclass(frozen=True)
class FeatureNormBlock(NormBlock):
    """One parameter a feature of the trailing axes: LayerNorm, RMSNorm."""

    axes: int
    normalise: Callable[[Tensor], Tensor]

    def input_axes(self, value: Tensor) -> int:
        return self.axes

    def normalised(self, value: Tensor) -> Tensor:
        return self.normalise(value)

    def reduce(self, rows: Tensor, factor: Tensor, fused: bool) -> tuple[Tensor, Tensor]:
        return (rows * factor).flatten(2).sum(1), rows.flatten(2).sum(1)


def _norm_fields(name: str, module: nn.Module) -> dict[str, Any] | None:
    names = trainable(module, "weight", "bias")
    if not names:
        return None
    return {
        "name": name,
        "kind": type(module).__name__.lower(),
        "parameters": tuple(qualified(name, parameter) for parameter in names),
        "size": sum(module.get_parameter(parameter).numel() for parameter in names),
        "has_weight": "weight" in names,
        "has_bias": "bias" in names,
    }


def _channel_norm(name: str, module: nn.Module, normalise: Callable[[Tensor], Tensor]) -> Site | None:
    fields = _norm_fields(name, module)
    return Site(module, (ChannelNormBlock(**fields, normalise=normalise),)) if fields else None


def _feature_norm(name: str, module: nn.Module, axes: int, normalise: Callable[[Tensor], Tensor]) -> Site | None:
    fields = _norm_fields(name, module)
    return Site(module, (FeatureNormBlock(**fields, axes=axes, normalise=normalise),)) if fields else None


@register(*_BATCH_NORMS)
def batch_norm(name: str, module: nn.Module, selection: Selection) -> Site | None:
    """Normalised with the running statistics."""
    assert isinstance(module, _BATCH_NORMS)
    site = _channel_norm(
        name, module, lambda x: F.batch_norm(x, module.running_mean, module.running_var, eps=module.eps)
    )

    def forward(emit: Emit, input: Tensor) -> Tensor:
        return emit({name: None}, input, _affine(module, input))

    patched = "forward" in vars(module)  # then what it computes is known to it alone
    return site if site is None or patched else replace(site, forward=forward)


def _affine(module: _BatchNorm, value: Tensor) -> Tensor:
    """BatchNorm in eval mode as one multiplication and one addition.

    The backward of PyTorch's own function also sums over the batch for the gradients of scale and shift, whether they
    are wanted or not, and takes twice the time.
    """
    if module.running_mean is None or module.running_var is None:
        return F.batch_norm(value, None, None, module.weight, module.bias, training=True, eps=module.eps)
    if value.dtype != module.running_var.dtype:  # allowed or refused as PyTorch does
        statistics = (module.running_mean, module.running_var)
        return F.batch_norm(value, *statistics, module.weight, module.bias, eps=module.eps)
    slope = torch.rsqrt(module.running_var + module.eps)
    slope = slope if module.weight is None else slope * module.weight
    shift = -module.running_mean * slope
    shift = shift if module.bias is None else shift + module.bias
    features = (-1, *(1,) * (value.dim() - 2))
    return (value * slope.view(features)).add_(shift.view(features))


@register(*_INSTANCE_NORMS)
def instance_norm(name: str, module: nn.Module, selection: Selection) -> Site | None:
    """Normalised over each example's positions, or with running statistics where they are tracked."""
    assert isinstance(module, _INSTANCE_NORMS)
    return _channel_norm(
        name,
        module,
        lambda x: F.instance_norm(
            x, module.running_mean, module.running_var, use_input_stats=not module.track_running_stats, eps=module.eps
        ),
    )


@register(nn.GroupNorm)
def group_norm(name: str, module: nn.Module, selection: Selection) -> Site | None:
    """Normalised over groups of channels."""
    assert isinstance(module, nn.GroupNorm)
    return _channel_norm(name, module, lambda x: F.group_norm(x, module.num_groups, eps=module.eps))


@register(nn.LayerNorm)
def layer_norm(name: str, module: nn.Module, selection: Selection) -> Site | None:
    """Normalised over the trailing axes."""
    assert isinstance(module, nn.LayerNorm)
    shape = list(module.normalized_shape)
    return _feature_norm(name, module, len(shape), lambda x: F.layer_norm(x, shape, eps=module.eps))


@register(nn.RMSNorm)
def rms_norm(name: str, module: nn.Module, selection: Selection) -> Site | None:
    """Scaled by the root mean square over the trailing axes."""
    assert isinstance(module, nn.RMSNorm)
    shape = list(module.normalized_shape)
    return _feature_norm(name, module, len(shape), lambda x: F.rms_norm(x, shape, eps=module.eps))
