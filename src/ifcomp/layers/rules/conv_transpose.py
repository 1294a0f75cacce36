"""``nn.ConvTranspose1d``, ``2d``, ``3d``: stride, padding, output padding, dilation and groups.

A transposed convolution is a convolution by the reversed kernel of the input with zeros between its pixels. Kernel
offsets always share one input basis. Their inputs are nearly the same pixels, and exactly the same if the stride equals
the kernel size: a basis over offsets would have equal eigenvalues, and rounding would determine its vectors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from ifcomp.blocks.kronecker_inputs import Patches
from ifcomp.layers.layer import Emit, KroneckerLayer, TrackedModule, pool_rows
from ifcomp.layers.registry import Selection, register, trainable_names
from ifcomp.layers.rules.conv import ConvTranspose, conv_block, windows


@dataclass(frozen=True)
class ConvTransposeLayer(KroneckerLayer):
    """Every output position is one position; its input is a patch [C, *kernel] that contains zeros."""

    module: ConvTranspose

    def input_axes(self, value: Tensor) -> int:
        return len(self.module.kernel_size) + 1

    def features(self, value: Tensor, kept: Tensor | None) -> Tensor | None:
        return pool_rows(value, kept) if self.has_weight else None

    def patches(self, value: Tensor) -> Patches:
        channels = value.unflatten(2, (self.block.shape.groups, -1))  # [B, R, G, C, *S]
        return Patches(channels, partial(unfold_transposed, module=self.module))

    def outputs(self, rows: Tensor) -> Tensor:
        return rows.reshape(len(rows), self.block.shape.groups, self.block.shape.out_features, -1)

    def gradient(self, parameter_grads: Mapping[str, Tensor]) -> Tensor:
        """The weight is [G * C, O, *kernel], the block is [G, O, C * kernel]."""
        return super().gradient({name: self._outputs_first(parameter_grads[name]) for name in self.block.parameters})

    def _outputs_first(self, grad: Tensor) -> Tensor:
        if grad.dim() == 1:
            return grad
        return grad.reshape(self.block.shape.groups, -1, *grad.shape[1:]).transpose(1, 2).flatten(0, 1)


def unfold_transposed(channels: Tensor, module: ConvTranspose) -> Tensor:
    """Extract the patches of a transposed convolution, [N, G, C, *S] to [N, G, C*kernel, T].

    Offset k of the patch at output position q is pixel p with ``q = p * stride + k * dilation - padding``, or zero.
    """
    axes = range(len(module.kernel_size))
    spread = _spread(channels.flatten(1, 2), module.stride)
    widths: list[int] = []
    for axis in reversed(axes):  # F.pad expects the last axis first; negative widths crop
        assert not isinstance(module.padding, str)
        before = module.dilation[axis] * (module.kernel_size[axis] - 1) - module.padding[axis]
        widths += [before, before + module.output_padding[axis]]
    patches = windows(F.pad(spread, widths), module.kernel_size, (1,) * len(axes), module.dilation)
    patches = patches.flip([axis + 2 for axis in axes])
    features = channels.shape[2] * math.prod(module.kernel_size)
    return patches.reshape(len(patches), module.groups, features, -1)


def _spread(values: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Insert ``stride - 1`` zeros between the pixels of values [N, C, *S]."""
    sizes = [(size - 1) * step + 1 for size, step in zip(values.shape[2:], stride, strict=True)]
    spread = values.new_zeros(*values.shape[:2], *sizes)
    pixels = tuple(slice(None, None, step) for step in stride)
    spread[(slice(None), slice(None), *pixels)] = values
    return spread


@register(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
def conv_transpose(name: str, module: nn.Module, selection: Selection) -> TrackedModule | None:
    """One Kronecker block. Calls with ``output_size`` are not recorded."""
    assert isinstance(module, ConvTranspose)
    names = trainable_names(module, "weight", "bias")
    if not names:
        return None
    block = conv_block(name, f"convtranspose{len(module.kernel_size)}d", module, names, sua=True)

    def forward(emit: Emit, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        output: Tensor = type(module).forward(module, input, output_size)  # type: ignore[arg-type]
        return output if output_size is not None else emit({name: None}, input, output)

    return TrackedModule(module, (ConvTransposeLayer(block, "weight" in names, module),), forward)
