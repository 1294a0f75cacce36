"""Factors and a batch in, influence out: the forms ``v^T M v`` and products ``v^T M w`` of logit cotangents, summed
over blocks.

``M(x) = J (G + delta)^-1 J^T`` is the logit kernel [K, K] of an example, in beta-free units. A cotangent is a vector
over the logits.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ifcomp.batches import Batch
from ifcomp.curvature.factors import Basis, Factors
from ifcomp.influence.choice import Kernel, choose_kernel
from ifcomp.influence.kernels import (
    direct_forms,
    direct_products,
    indexed_whitened,
    pair_forms,
    pair_matrix,
    pair_products,
)
from ifcomp.influence.weights import Weights
from ifcomp.layers.block import IndexedBlock, KroneckerBlock, NormBlock, RecordedBlock
from ifcomp.layers.capture import Gradients, Recording
from ifcomp.layers.session import Session

#: Cotangents whose output gradients are held at once.
COTANGENTS_AT_ONCE = 16


class FormEvaluator:
    """Evaluates forms for one recorded batch; keeps what does not depend on the cotangent."""

    def __init__(
        self,
        session: Session,
        factors: Factors,
        weights: Mapping[str, Weights],
        recording: Recording,
        batch: Batch,
    ) -> None:
        """Bind a recording to the inverse curvature.

        Args:
            session: The model and its blocks.
            factors: Its curvature.
            weights: Inverse curvature by block.
            recording: The forward pass.
            batch: What was recorded.
        """
        self._session, self._factors, self._weights = session, factors, weights
        self._recording, self._batch = recording, batch
        self._pairs: dict[str, Tensor] = {}

    def forms(self, cotangents: Tensor) -> Tensor:
        """``v^T M v`` for cotangents [C, B, K], as [B, C] in float64."""
        chunks = cotangents.split(COTANGENTS_AT_ONCE)
        return torch.cat([self._chunk_forms(chunk, len(cotangents)) for chunk in chunks], 1)

    def products(self, cotangents: Tensor) -> Tensor:
        """``v_c^T M v_d`` for cotangents [C, B, K], as [B, C, C] in float64. All C are held at once."""
        gradients = [self._recording.backward(cotangent) for cotangent in cotangents]
        size = len(cotangents)
        total = torch.zeros(self._batch.size, size, size, dtype=torch.float64, device=self._session.device)
        for block in self._session.recorded:
            if self._recording.used(block):
                weights = self._weights[block.name]
                total += self._block_products(block, weights.values, gradients).double() * weights.scale
        for name, found in self._session.other_gradients(self._batch, cotangents).items():
            weights = self._weights[name]
            whitened = (found * weights.values.sqrt()).transpose(0, 1)
            total += (whitened @ whitened.transpose(-1, -2)).double() * weights.scale
        return total

    def _chunk_forms(self, cotangents: Tensor, total_cotangents: int) -> Tensor:
        gradients = [self._recording.backward(cotangent) for cotangent in cotangents]
        size = self._batch.size
        total = torch.zeros(size, len(cotangents), dtype=torch.float64, device=self._session.device)
        for block in self._session.recorded:
            if self._recording.used(block):
                weights = self._weights[block.name]
                total += self._block_forms(block, weights, gradients, total_cotangents).double() * weights.scale
        for name, found in self._session.other_gradients(self._batch, cotangents).items():
            weights = self._weights[name]
            total += (found.square_() @ weights.values).T.double() * weights.scale
        return total

    def _block_forms(
        self, block: RecordedBlock, weights: Weights, gradients: list[Gradients], total_cotangents: int
    ) -> Tensor:
        recording, values = self._recording, weights.values
        if isinstance(block, NormBlock):
            rows = [recording.scale_and_shift(block, gradient).square_() @ values for gradient in gradients]
            return torch.stack(rows, 1)
        basis = self._basis(block)
        if isinstance(block, IndexedBlock):
            whitened = indexed_whitened(recording, block, basis, values, gradients)
            return torch.stack([part.square_().sum((1, 2)) for part in whitened], 1)
        assert isinstance(block, KroneckerBlock)
        if self._choice(block, weights.condition, total_cotangents) == "pairs":
            return pair_forms(recording, block, basis, self._pair_matrix(block, values), gradients)
        return direct_forms(recording, block, basis, values, gradients)

    def _block_products(self, block: RecordedBlock, values: Tensor, gradients: list[Gradients]) -> Tensor:
        recording = self._recording
        if isinstance(block, KroneckerBlock):
            basis = self._basis(block)
            if self._choice(block, self._weights[block.name].condition, len(gradients)) == "pairs":
                return pair_products(recording, block, basis, self._pair_matrix(block, values), gradients)
            return direct_products(recording, block, basis, values, gradients)
        if isinstance(block, IndexedBlock):
            parts = list(indexed_whitened(recording, block, self._basis(block), values, gradients))
        else:
            assert isinstance(block, NormBlock)
            parts = [recording.scale_and_shift(block, gradient) * values.sqrt() for gradient in gradients]
        whitened = torch.stack(parts, 1).flatten(2)
        return whitened @ whitened.transpose(-1, -2)

    def _choice(self, block: KroneckerBlock, condition: float, cotangents: int) -> Kernel:
        return choose_kernel(block, self._recording.positions(block), cotangents, condition)

    def _pair_matrix(self, block: KroneckerBlock, values: Tensor) -> Tensor:
        if block.name not in self._pairs:
            self._pairs[block.name] = pair_matrix(self._recording, block, self._basis(block), values)
        return self._pairs[block.name]

    def _basis(self, block: RecordedBlock) -> Basis:
        basis = self._factors.blocks[block.name].basis
        assert basis is not None
        return basis
