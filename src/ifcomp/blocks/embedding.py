"""Embedding blocks: Kronecker blocks with one-hot inputs, which are never materialised.

Canonical inputs are indices [B, T]. Output gradients are [B, C, T, D], zero at padding. The input covariance of
one-hot vectors is diagonal, so the input basis is the identity and only outputs are rotated.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ifcomp.blocks.block import Basis, Block, FactorShapes, VectorForm


@dataclass(frozen=True)
class EmbeddingBlock(Block):
    """Per-example gradient [1, D, V] of a table of V embeddings.

    Attributes:
        entries: V, rows of the table.
        width: D, the size of an embedding.
    """

    entries: int
    width: int

    @property
    def treatment(self) -> str:
        return "EKFAC (one-hot)"

    @property
    def factor_shapes(self) -> FactorShapes:
        return FactorShapes((1, self.width, self.entries), None, (1, self.width, self.width))

    def output_covariance(self, output_grads: Tensor) -> Tensor:
        vectors = output_grads.flatten(0, 2)
        return (vectors.T @ vectors).unsqueeze(0)

    def add_second_moments(
        self, total: Tensor, inputs: Tensor, output_grads: Tensor, basis: Basis | None, plan: None
    ) -> None:
        squares = _row_gradients(inputs, output_grads, basis).square_().sum(1)  # [B, T, D]
        total[0].index_add_(1, inputs.flatten(), squares.flatten(0, 1).T)

    def form(self, inputs: Tensor, basis: Basis | None, weights: Tensor, plan: None) -> VectorForm:
        roots = weights[0].sqrt().T[inputs].unsqueeze(1)  # [B, 1, T, D]
        return VectorForm(lambda output_grads: (_row_gradients(inputs, output_grads, basis) * roots).flatten(2))

    def gradients(self, inputs: Tensor, output_grads: Tensor, basis: Basis | None = None) -> Tensor:
        rows = _row_gradients(inputs, output_grads, basis)
        table = rows.new_zeros(*rows.shape[:2], self.entries, self.width)
        table.scatter_add_(2, inputs[:, None, :, None].expand_as(rows), rows)
        return table.transpose(2, 3).flatten(2)


def _row_gradients(indices: Tensor, output_grads: Tensor, basis: Basis | None) -> Tensor:
    """Gradients of the rows that an example looked up, in the output basis, [B, C, T, D].

    Each is at the first position of its index; the other positions are zero.
    """
    rotated = output_grads if basis is None or basis.outputs is None else output_grads @ basis.outputs[0]
    same = indices.unsqueeze(2) == indices.unsqueeze(1)  # [B, T, T]
    first = same.to(rotated.dtype).argmax(2)  # [B, T]
    sums = rotated.new_zeros(rotated.shape)
    return sums.scatter_add_(2, first[:, None, :, None].expand_as(rotated), rotated)
