"""``nn.Conv1d``, ``nn.Conv2d``, ``nn.Conv3d``: stride, dilation, groups, every padding and padding mode."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from ifcomp.blocks.kronecker import KroneckerBlock
from ifcomp.blocks.kronecker_inputs import KroneckerShape, Patches
from ifcomp.layers.layer import KroneckerLayer, Layer, TrackedModule, pool_rows
from ifcomp.layers.registry import Selection, Sua, argument_names, qualified_name, register

#: With ``sua="auto"`` offsets share one basis if the input covariance would have more rows than this: its
#: eigendecomposition then takes minutes, and the rotation longer than forming the gradients.
SUA_FROM_INPUTS = 1024

_Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d
ConvTranspose = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d


@dataclass(frozen=True)
class ConvLayer(KroneckerLayer):
    """Every output position is one position; its input is a patch [C, *kernel], channels first as in the weight.

    Attributes:
        module: The convolution.
        is_padded: Whether inputs contain the padding.
    """

    module: _Conv
    is_padded: bool = False

    @property
    def function(self) -> Callable[..., Tensor]:
        return (F.conv1d, F.conv2d, F.conv3d)[len(self.module.kernel_size) - 1]

    def by_function(self) -> Layer:
        return replace(self, is_padded=True)

    def input_axes(self, value: Tensor) -> int:
        return len(self.module.kernel_size) + 1

    def features(self, value: Tensor, kept: Tensor | None) -> Tensor | None:
        return pool_rows(value, kept) if self.has_weight else None

    def patches(self, value: Tensor) -> Patches:
        channels = value.unflatten(2, (self.block.shape.groups, -1))  # [B, R, G, C, *S]
        return Patches(channels, partial(unfold, module=self.module, is_padded=self.is_padded))

    def outputs(self, rows: Tensor) -> Tensor:
        return rows.reshape(len(rows), self.block.shape.groups, self.block.shape.out_features, -1)


def unfold(channels: Tensor, module: _Conv, is_padded: bool = False) -> Tensor:
    """Extract the patches of a convolution, [N, G, C, *S] to [N, G, C*kernel, T]."""
    values = channels.flatten(1, 2)
    padded = values if is_padded else _pad(values, module)
    patches = windows(padded, module.kernel_size, module.stride, module.dilation)
    features = channels.shape[2] * math.prod(module.kernel_size)
    return patches.reshape(len(patches), module.groups, features, -1)


def windows(values: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]) -> Tensor:
    """All windows of values [N, C, *S], [N, C, *kernel, *positions]."""
    axes = len(kernel)
    for axis in range(axes):
        span = dilation[axis] * (kernel[axis] - 1) + 1
        values = values.unfold(axis + 2, span, stride[axis])[..., :: dilation[axis]]
    return values.permute(0, 1, *range(axes + 2, 2 * axes + 2), *range(2, axes + 2))


def _pad(values: Tensor, module: _Conv) -> Tensor:
    """Apply the padding of the convolution to its input [N, G*C, *S]."""
    widths = _padding_widths(module)
    if not any(widths):
        return values
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return F.pad(values, widths, mode=mode)


def _padding_widths(module: _Conv) -> list[int]:
    """The padding as `F.pad` expects it: before and after each axis, the last axis first."""
    if module.padding == "valid":
        return [0, 0] * len(module.kernel_size)
    widths: list[int] = []
    for axis in reversed(range(len(module.kernel_size))):
        if isinstance(module.padding, str):
            total = module.dilation[axis] * (module.kernel_size[axis] - 1)
            widths += [total // 2, total - total // 2]
        else:
            widths += [module.padding[axis]] * 2
    return widths


def conv_block(name: str, kind: str, module: _Conv | ConvTranspose, names: list[str], sua: Sua) -> KroneckerBlock:
    """Build the block of a convolution; the groups of the convolution are the groups of the block.

    Args:
        name: Name of the module.
        kind: Kind of the module.
        module: The module.
        names: Its trainable parameters, the weight before the bias.
        sua: Whether kernel offsets share one input basis.
    """
    has_weight, has_bias = "weight" in names, "bias" in names
    channels, offsets = module.in_channels // module.groups, math.prod(module.kernel_size)
    inputs = channels * offsets * has_weight + has_bias
    shares = sua if isinstance(sua, bool) else inputs > SUA_FROM_INPUTS
    shares = shares and offsets > 1 and has_weight
    shape = KroneckerShape(
        groups=module.groups,
        out_features=module.out_channels // module.groups,
        basis_size=channels if shares else inputs,
        offsets=offsets if shares else 1,
        has_bias=has_bias,
    )
    parameters = tuple(qualified_name(name, parameter) for parameter in names)
    return KroneckerBlock(name, kind, parameters, module.out_channels * inputs, shape)


@register(nn.Conv1d, nn.Conv2d, nn.Conv3d)
def conv(name: str, module: nn.Module, selection: Selection) -> TrackedModule | None:
    """One Kronecker block."""
    assert isinstance(module, _Conv)
    names = argument_names(module)
    if not names:
        return None
    block = conv_block(name, f"conv{len(module.kernel_size)}d", module, names, selection.sua)
    return TrackedModule(module, (ConvLayer(block, "weight" in names, module),))
