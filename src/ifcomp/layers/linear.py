"""``nn.Linear`` on any leading dimensions."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from ifcomp.layers.block import KroneckerBlock, Site
from ifcomp.layers.registry import Selection, qualified, register, trainable


@dataclass(frozen=True)
class LinearBlock(KroneckerBlock):
    """Inputs [..., J] are the positions themselves."""

    def input_axes(self, value: Tensor) -> int:
        return 1

    def positions(self, rows: Tensor) -> Tensor:
        return rows[:, None, :, None]

    def outputs(self, rows: Tensor) -> Tensor:
        return rows[:, None, :, None]


def linear_block(name: str, parameters: list[str], inputs: int, outputs: int, first_row: int = 0) -> LinearBlock:
    """The block of one affine map; ``parameters`` are full names, the weight's before the bias's."""
    has_weight = any(parameter.endswith("weight") for parameter in parameters)
    has_bias = any(parameter.endswith("bias") for parameter in parameters)
    columns = inputs * has_weight + has_bias
    return LinearBlock(
        name=name,
        kind="linear",
        parameters=tuple(parameters),
        size=outputs * columns,
        groups=1,
        rows=outputs,
        channels=columns,
        offsets=1,
        has_weight=has_weight,
        has_bias=has_bias,
        first_row=first_row,
    )


@register(nn.Linear)
def linear(name: str, module: nn.Module, selection: Selection) -> Site | None:
    """One Kronecker block."""
    assert isinstance(module, nn.Linear)
    names = trainable(module, "weight", "bias")
    if not names:
        return None
    parameters = [qualified(name, parameter) for parameter in names]
    return Site(module, (linear_block(name, parameters, module.in_features, module.out_features),))
