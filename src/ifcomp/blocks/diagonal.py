"""Diagonal blocks: the per-example gradient is a vector, and its curvature is the mean of its squares.

Normalisation layers and parameters without a layer rule are diagonal. Their canonical output gradient is the
gradient of the parameters itself, [B, C, P]; they have no canonical inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ifcomp.blocks.block import Basis, Block, FactorShapes, VectorForm


@dataclass(frozen=True)
class DiagonalBlock(Block):
    """Curvature ``diag(Lambda)`` with Lambda [P]."""

    @property
    def treatment(self) -> str:
        return "diagonal"

    @property
    def factor_shapes(self) -> FactorShapes:
        return FactorShapes((self.size,), None, None)

    def add_second_moments(
        self, total: Tensor, inputs: None, output_grads: Tensor, basis: Basis | None, plan: None
    ) -> None:
        total += output_grads.square().sum((0, 1))

    def form(self, inputs: None, basis: Basis | None, weights: Tensor, plan: None) -> VectorForm:
        roots = weights.sqrt()
        return VectorForm(lambda output_grads: output_grads * roots)

    def gradients(self, inputs: None, output_grads: Tensor, basis: Basis | None = None) -> Tensor:
        return output_grads
