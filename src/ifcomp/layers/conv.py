"""``nn.Conv1d``, ``nn.Conv2d``, ``nn.Conv3d``: stride, dilation, groups, every padding and padding mode."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ifcomp.compiled import Windows
from ifcomp.layers.block import KroneckerBlock, Site
from ifcomp.layers.registry import Selection, qualified, register, trainable
from ifcomp.layers.winograd import quick_backward

#: With ``sua="auto"`` offsets are shared where the input covariance would have more rows than this: its
#: eigendecomposition then costs more than minutes, and rotating by it more than the gradients themselves.
SUA_FROM_COLUMNS = 1024

#: Up to so many channels a group, and where what a position sees lies side by side, gradients are formed from images
#: that are not unfolded; with more, matrix products are as quick.
_FEW_CHANNELS = 8

_Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d


@dataclass(frozen=True)
class ConvBlock(KroneckerBlock):
    """Inputs are the unfolded patches [G, C*kernel], channels slowest, as in the weight."""

    module: _Conv

    def input_axes(self, value: Tensor) -> int:
        return len(self.module.kernel_size) + 1

    def positions(self, rows: Tensor) -> Tensor:
        return unfold(rows, self.module)

    @property
    def has_windows(self) -> bool:
        module = self.module
        few = module.in_channels <= _FEW_CHANNELS * self.groups
        return self.has_weight and few and module.kernel_size[-1] > 1 and module.dilation[-1] == 1

    def windows(self, values: Tensor) -> Windows:
        module, (count, rows) = self.module, values.shape[:2]
        padded = pad(values.flatten(0, 1), module)  # [B R, G C, *S]
        channels, sizes = padded.shape[1] // self.groups, padded.shape[2:]
        size = channels * sizes.numel()
        where = torch.arange(size, dtype=torch.int32, device=values.device).view(1, channels, *sizes)
        seen = _windows(where, module, 2)[0]  # [C, *positions, *kernel], a view
        places, runs = seen[0], seen
        for _ in sizes:
            places, runs = places[..., 0], runs[:, 0]
        starts = torch.arange(0, rows * size, size, dtype=torch.int32, device=values.device)
        images = padded.reshape(count, rows, self.groups, size).transpose(1, 2).reshape(-1, rows * size)
        return Windows(
            images.resolve_neg(),  # with no sign left to whoever reads them
            (starts[:, None] + places.flatten()).flatten(),
            runs[..., 0].flatten().contiguous(),
            module.kernel_size[-1],
        )

    def outputs(self, rows: Tensor) -> Tensor:
        return rows.reshape(len(rows), self.groups, self.rows, -1)

    def rotated_windows(self, rows: Tensor, basis: Tensor) -> Tensor:
        axes, zeros = len(self.module.kernel_size), self.module.padding_mode == "zeros"
        rows = rows if zeros else pad(rows, self.module)  # zeros can be added after rotating, which is less work
        turned = self.channel_rows(rows).transpose(-1, -2) @ basis
        windows = turned.reshape(-1, *rows.shape[2:], self.channels)  # [N G, *S, C]
        if zeros and any(widths := padding_widths(self.module)):
            windows = F.pad(windows, [0, 0, *widths])
        windows = _windows(windows, self.module, 1).movedim(axes + 1, -1)
        return windows.view(-1, self.groups, *windows.shape[1:])

    def inside(self, sizes: torch.Size) -> Tensor:
        return _windows(pad(torch.ones(1, 1, *sizes), self.module), self.module, 2).reshape(-1, self.offsets).bool()


def padding_widths(module: _Conv) -> list[int]:
    """The convolution's own padding as `F.pad` wants it: before and after, the last axis first."""
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


def pad(rows: Tensor, module: _Conv) -> Tensor:
    """The input with the convolution's own padding made explicit."""
    widths = padding_widths(module)
    if not any(widths):
        return rows
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return F.pad(rows, widths, mode=mode)


def unfold(rows: Tensor, module: _Conv) -> Tensor:
    """Patches of a convolution, [N, G*C, *S] to a strided view [N, G, C, *kernel, *positions]."""
    axes = len(module.kernel_size)
    windows = _windows(pad(rows, module), module, 2)
    order = (0, 1, *range(axes + 2, 2 * axes + 2), *range(2, axes + 2))  # [N, C, *kernel, *out]
    view: Tensor = windows.permute(order).unflatten(1, (module.groups, -1))
    return view


def _windows(values: Tensor, module: _Conv, first: int) -> Tensor:
    """A view with the positions of a convolution in place of the axes from ``first`` on, and its kernel's axes last."""
    for axis, (kernel, stride, dilation) in enumerate(
        zip(module.kernel_size, module.stride, module.dilation, strict=True), first
    ):
        values = values.unfold(axis, dilation * (kernel - 1) + 1, stride)[..., ::dilation]
    return values


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
    return Site(module, (block,), quick=quick_backward(module))
