"""``nn.Linear`` on any leading axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ifcomp.blocks.kronecker import KroneckerBlock
from ifcomp.blocks.kronecker_inputs import KroneckerShape, Patches
from ifcomp.layers.layer import KroneckerLayer, Layer, TrackedModule
from ifcomp.layers.registry import Selection, argument_names, qualified_name, register


@dataclass(frozen=True)
class LinearLayer(KroneckerLayer):
    """Every row [J] of the input is one position.

    Attributes:
        first_row: First row of the block in parameters that several blocks share.
    """

    first_row: int = 0

    @property
    def function(self) -> Callable[..., Tensor]:
        return F.linear

    def by_function(self) -> Layer:
        return self

    def without_bias(self) -> Layer:
        shape = self.block.shape
        if not (shape.has_bias and self.has_weight):
            return self
        block = linear_block(self.name, [self.block.parameters[0]], shape.basis_size - 1, shape.out_features)
        shape = replace(block.shape, rotates_outputs=shape.rotates_outputs)
        return replace(self, block=replace(block, shape=shape))

    def input_axes(self, value: Tensor) -> int:
        return 1

    def patches(self, value: Tensor) -> Patches:
        return Patches(value[:, :, None, :, None], lambda channels: channels)

    def outputs(self, rows: Tensor) -> Tensor:
        return rows[:, None, :, None]

    def gradient(self, parameter_grads: Mapping[str, Tensor]) -> Tensor:
        count = self.block.shape.out_features
        packed = slice(self.first_row, self.first_row + count)
        grads = [parameter_grads[name] for name in self.block.parameters]
        grads = [grad if len(grad) == count else grad[packed] for grad in grads]
        return torch.cat([grad.reshape(count, -1) for grad in grads], 1).flatten()


def linear_block(name: str, parameters: list[str], in_features: int, out_features: int) -> KroneckerBlock:
    """Build the block of an affine map.

    Args:
        name: Name of the block.
        parameters: Full names, the weight before the bias.
        in_features: Inputs of the map.
        out_features: Outputs of the map.
    """
    has_bias = any(parameter.endswith("bias") for parameter in parameters)
    inputs = in_features * has_weight(parameters) + has_bias
    shape = KroneckerShape(groups=1, out_features=out_features, basis_size=inputs, offsets=1, has_bias=has_bias)
    return KroneckerBlock(name, "linear", tuple(parameters), out_features * inputs, shape)


def has_weight(parameters: list[str]) -> bool:
    """Whether a weight is among full names of parameters."""
    return any(parameter.endswith("weight") for parameter in parameters)


@register(nn.Linear)
def linear(name: str, module: nn.Module, selection: Selection) -> TrackedModule | None:
    """One Kronecker block."""
    assert isinstance(module, nn.Linear)
    parameters = [qualified_name(name, parameter) for parameter in argument_names(module)]
    if not parameters:
        return None
    block = linear_block(name, parameters, module.in_features, module.out_features)
    return TrackedModule(module, (LinearLayer(block, has_weight(parameters)),))
