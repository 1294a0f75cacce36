"""``nn.Conv1d``, ``nn.Conv2d``, ``nn.Conv3d``: stride, dilation, groups, every padding and padding mode."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from ifcomp.layers.block import KroneckerBlock, Site
from ifcomp.layers.registry import Selection, qualified, register, trainable

#: With ``sua="auto"`` offsets are shared where the input covariance would have more rows than this: its
#: eigendecomposition then costs more than minutes, and rotating by it more than the gradients themselves.
SUA_FROM_COLUMNS = 1024

_Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d


@dataclass(frozen=True)
class ConvBlock(KroneckerBlock):
    """Inputs are the unfolded patches [G, C*kernel], channels slowest, as in the weight."""

    module: _Conv

    def input_axes(self, value: Tensor) -> int:
        return len(self.module.kernel_size) + 1

    def positions(self, rows: Tensor) -> Tensor:
        return unfold(rows, self.module)

    def outputs(self, rows: Tensor) -> Tensor:
        return rows.reshape(len(rows), self.groups, self.rows, -1)


def pad(rows: Tensor, module: _Conv) -> Tensor:
    """The input with the convolution's own padding made explicit."""
    if module.padding == "valid":
        return rows
    widths: list[int] = []  # F.pad counts axes from the last
    for axis in reversed(range(len(module.kernel_size))):
        if isinstance(module.padding, str):
            total = module.dilation[axis] * (module.kernel_size[axis] - 1)
            widths += [total // 2, total - total // 2]
        else:
            widths += [module.padding[axis]] * 2
    if not any(widths):
        return rows
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return F.pad(rows, widths, mode=mode)


def unfold(rows: Tensor, module: _Conv) -> Tensor:
    """Patches of a convolution, [N, G*C, *S] to [N, G, C*kernel, T]: one copy of a strided view."""
    axes = len(module.kernel_size)
    windows = pad(rows, module)
    for axis, (kernel, stride, dilation) in enumerate(
        zip(module.kernel_size, module.stride, module.dilation, strict=True)
    ):
        windows = windows.unfold(axis + 2, dilation * (kernel - 1) + 1, stride)[..., ::dilation]
    order = (0, 1, *range(axes + 2, 2 * axes + 2), *range(2, axes + 2))  # [N, C, *kernel, *out]
    positions = math.prod(windows.shape[2 : axes + 2])
    return windows.permute(order).reshape(len(rows), module.groups, -1, positions)


@register(nn.Conv1d, nn.Conv2d, nn.Conv3d)
def conv(name: str, module: nn.Module, selection: Selection) -> Site | None:
    """One Kronecker block with the convolution's groups as its groups."""
    assert isinstance(module, _Conv)
    names = trainable(module, "weight", "bias")
    if not names:
        return None
    has_weight, has_bias = "weight" in names, "bias" in names
    channels, offsets = module.in_channels // module.groups, math.prod(module.kernel_size)
    columns = channels * offsets * has_weight + has_bias
    share = selection.sua if isinstance(selection.sua, bool) else columns > SUA_FROM_COLUMNS
    shared = share and offsets > 1 and has_weight
    block = ConvBlock(
        name=name,
        kind=f"conv{len(module.kernel_size)}d",
        parameters=tuple(qualified(name, parameter) for parameter in names),
        size=module.out_channels * columns,
        groups=module.groups,
        rows=module.out_channels // module.groups,
        channels=channels if shared else columns,
        offsets=offsets if shared else 1,
        has_weight=has_weight,
        has_bias=has_bias,
        first_row=0,
        module=module,
    )
    return Site(module, (block,))
