"""Normalisation layers: a diagonal block over scale and shift.

The gradient of the scale is ``sum_t b_t * z_t`` with the normalised input z, that of the shift ``sum_t b_t``. BatchNorm
must use its running statistics (eval mode): with batch statistics examples are not independent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ifcomp.blocks.diagonal import DiagonalBlock
from ifcomp.layers.batch_norm import affine_batch_norm
from ifcomp.layers.layer import Emit, Layer, TrackedModule
from ifcomp.layers.registry import Selection, argument_names, qualified_name, register

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


@dataclass(frozen=True)
class NormLayer(Layer):
    """Scale and shift after a normalisation.

    Attributes:
        has_bias: Whether the shift is trainable.
        normalise: Maps an input [N, ...] to the same input before scale and shift.
        feature_axes: Number of trailing axes with one parameter per entry (LayerNorm, RMSNorm). None: one parameter per
            channel of [N, C, ...].
        torch_function: The function of the normalisation, if its calls can be recorded.
    """

    has_bias: bool
    normalise: Callable[[Tensor], Tensor]
    feature_axes: int | None
    torch_function: Callable[..., Tensor] | None

    @property
    def function(self) -> Callable[..., Tensor] | None:
        return self.torch_function

    def by_function(self) -> Layer:
        return replace(self, normalise=_unchanged)

    def input_axes(self, value: Tensor) -> int:
        return value.dim() - 1 if self.feature_axes is None else self.feature_axes

    def inputs(self, values: Sequence[Tensor], output_sizes: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        """Return the normalised inputs [B, R, features...] of every call; empty without a scale."""
        if not self.has_weight:
            return []
        return [self.normalise(value.flatten(0, 1)).view_as(value).to(dtype) for value in values]

    def output_grads(self, grads: Sequence[Tensor], inputs: list[Tensor]) -> Tensor:
        """Return the gradients of scale and shift, [B, P]."""
        scales = [self._sum(grad * value) for grad, value in zip(grads, inputs, strict=False)]
        shifts = [self._sum(grad) for grad in grads] if self.has_bias else []
        return torch.cat([torch.stack(parts).sum(0) for parts in (scales, shifts) if parts], 1)

    def _sum(self, values: Tensor) -> Tensor:
        """Sum [B, R, features...] over everything that shares a parameter, [B, P]."""
        return (
            values.flatten(3).sum((1, 3))
            if self.feature_axes is None and values.dim() > 3
            else values.flatten(2).sum(1)
        )


def _unchanged(values: Tensor) -> Tensor:
    return values


def _norm_layer(
    name: str,
    module: nn.Module,
    normalise: Callable[[Tensor], Tensor],
    torch_function: Callable[..., Tensor] | None,
    feature_axes: int | None = None,
) -> tuple[NormLayer, ...]:
    """Build the layer of a normalisation; empty if scale and shift are frozen."""
    names = argument_names(module)
    if not names:
        return ()
    parameters = tuple(qualified_name(name, parameter) for parameter in names)
    size = sum(getattr(module, parameter).numel() for parameter in names)
    block = DiagonalBlock(name, type(module).__name__.lower(), parameters, size)
    return (NormLayer(block, "weight" in names, "bias" in names, normalise, feature_axes, torch_function),)


def _tracked(module: nn.Module, layers: tuple[NormLayer, ...]) -> TrackedModule | None:
    return TrackedModule(module, layers) if layers else None


@register(*_BATCH_NORMS)
def batch_norm(name: str, module: nn.Module, selection: Selection) -> TrackedModule | None:
    """Normalise with the running statistics."""
    assert isinstance(module, _BATCH_NORMS)
    layers = _norm_layer(
        name, module, lambda x: F.batch_norm(x, module.running_mean, module.running_var, eps=module.eps), F.batch_norm
    )

    def forward(emit: Emit, input: Tensor) -> Tensor:
        running, training = (module.running_mean, module.running_var), module.running_mean is None
        output = affine_batch_norm(input, *running, module.weight, module.bias, training, eps=module.eps)
        return emit({name: None}, input, output)

    return TrackedModule(module, layers, forward, always_replaced=True)


@register(*_INSTANCE_NORMS)
def instance_norm(name: str, module: nn.Module, selection: Selection) -> TrackedModule | None:
    """Normalise over the positions of each example, or with running statistics where they are tracked."""
    assert isinstance(module, _INSTANCE_NORMS)

    def normalise(x: Tensor) -> Tensor:
        statistics = (module.running_mean, module.running_var)
        return F.instance_norm(x, *statistics, use_input_stats=not module.track_running_stats, eps=module.eps)

    return _tracked(module, _norm_layer(name, module, normalise, None))


@register(nn.GroupNorm)
def group_norm(name: str, module: nn.Module, selection: Selection) -> TrackedModule | None:
    """Normalise over groups of channels."""
    assert isinstance(module, nn.GroupNorm)
    return _tracked(
        module, _norm_layer(name, module, lambda x: F.group_norm(x, module.num_groups, eps=module.eps), F.group_norm)
    )


@register(nn.LayerNorm)
def layer_norm(name: str, module: nn.Module, selection: Selection) -> TrackedModule | None:
    """Normalise over the trailing axes."""
    assert isinstance(module, nn.LayerNorm)
    shape = list(module.normalized_shape)
    return _tracked(
        module, _norm_layer(name, module, lambda x: F.layer_norm(x, shape, eps=module.eps), F.layer_norm, len(shape))
    )


@register(nn.RMSNorm)
def rms_norm(name: str, module: nn.Module, selection: Selection) -> TrackedModule | None:
    """Divide by the root mean square over the trailing axes."""
    assert isinstance(module, nn.RMSNorm)
    shape = list(module.normalized_shape)
    return _tracked(
        module, _norm_layer(name, module, lambda x: F.rms_norm(x, shape, eps=module.eps), F.rms_norm, len(shape))
    )
