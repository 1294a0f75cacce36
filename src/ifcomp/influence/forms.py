"""Factors and a batch in, influence out: the forms ``v^T M v`` and products ``v^T M w`` of logit cotangents, summed
over blocks.

``M(x) = J (G + delta)^-1 J^T`` is the logit kernel [K, K] of an example, in beta-free units. A cotangent is a vector
over the logits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from ifcomp.curvature.factors import Basis, Factors
from ifcomp.curvature.labels import Cotangents, independent_residuals, label_cotangents
from ifcomp.curvature.rotation import is_compiled, plan_rotation, put_rows, sum_equal_indices, turn_rows
from ifcomp.data.batches import Batch
from ifcomp.influence.choice import Kernel, choose_kernel
from ifcomp.influence.kernels import direct_forms, direct_products, pair_forms, pair_matrix, pair_products
from ifcomp.influence.weights import Weights
from ifcomp.layers.backward import Backward, Gradients
from ifcomp.layers.block import IndexedBlock, KroneckerBlock, NormBlock, RecordedBlock
from ifcomp.layers.capture import Recording
from ifcomp.layers.session import Session

#: From so many positions on it is quicker to sum gradients than to form one more.
_MANY_POSITIONS = 128


class FormEvaluator:
    """Evaluates forms for one recorded batch; keeps what does not depend on the cotangent."""

    def __init__(
        self,
        session: Session,
        factors: Factors,
        weights: Mapping[str, Weights],
        recording: Recording,
        batch: Batch,
        at_once: int,
    ) -> None:
        """Bind a recording to the inverse curvature.

        Args:
            session: The model and its blocks.
            factors: Its curvature.
            weights: Inverse curvature by block.
            recording: The forward pass.
            batch: What was recorded.
            at_once: How many cotangents to work on at once.
        """
        self._session, self._factors, self._weights = session, factors, weights
        self._recording, self._batch = recording, batch
        self._at_once = at_once
        self._pairs: dict[str, Tensor] = {}
        self._root_cache: dict[str, Tensor] = {}

    def forms(self, cotangents: Cotangents) -> Tensor:
        """``v^T M v`` for cotangents [C, B, K], as [B, C] in float64."""
        with self._session.computing():
            chunks = cotangents.chunks(self._at_once)
            return torch.cat([self._chunk_forms(chunk, cotangents.count) for chunk in chunks], 1)

    def label_forms(self, probability: Tensor) -> Tensor:
        """``v^T M v`` of the residual ``v = p - e_y`` of every label, as [B, K] in float64.

        Where all labels are worked on at once, one backward is saved: gradients are linear in v, and one residual is
        a sum of the others.

        Args:
            probability: p, [B, K].
        """
        if probability.shape[1] > self._at_once:
            return self.forms(label_cotangents(probability))
        residuals, coefficients, labels = independent_residuals(probability)
        with self._session.computing():
            found = self._chunk_forms(residuals, probability.shape[1], coefficients.to(self._session.dtype))
        return torch.zeros_like(found).scatter_(1, labels, found)

    def release(self) -> None:
        """Let go of the recording and all that was made from it; nothing can be evaluated any more."""
        del self._recording, self._pairs

    def products(self, cotangents: Tensor) -> Tensor:
        """``v_c^T M v_d`` for cotangents [C, B, K], as [B, C, C] in float64. All C are held at once."""
        with self._session.computing():
            return self._products(cotangents)

    def _products(self, cotangents: Tensor) -> Tensor:
        size = len(cotangents)
        total = self._zeros(self._batch.size, size, size)
        whitened = self._gather(cotangents, size, together=True)
        for block in self._used_kronecker():
            weights, basis, rows = self._weights[block.name], self._basis(block), self._rows(block, size)
            if self._choice(block, size) == "pairs":
                found = pair_products(self._pair_matrix(block, keep=False), rows)
            else:
                found = direct_products(self._recording, block, basis, weights.values, rows)
            total += found.double() * weights.scale
        for name, vectors in whitened.items():
            total += (vectors @ vectors.transpose(-1, -2)).double() * self._weights[name].scale
        return total

    def _chunk_forms(self, cotangents: Tensor, total_cotangents: int, last: Tensor | None = None) -> Tensor:
        """Forms of some cotangents, and of one more that is their sum with the coefficients ``last`` [B, C]."""
        count = len(cotangents) + (last is not None)
        total = self._zeros(self._batch.size, count)
        whitened = self._gather(cotangents, total_cotangents, last)
        for block in self._used_kronecker():
            weights, basis, rows = self._weights[block.name], self._basis(block), self._rows(block, count)
            if self._choice(block, total_cotangents) == "pairs":
                found = pair_forms(self._pair_matrix(block, keep=total_cotangents > count), rows)
            else:
                some, more = (
                    (rows[:, :, :-1], last) if last is not None and self._sums_gradients(block, count) else (rows, None)
                )
                found = direct_forms(self._recording, block, basis, weights.values, some, more)
            total += found.double() * weights.scale
        for name, vectors in whitened.items():
            total += vectors.square_().sum(2).double() * self._weights[name].scale
        return total

    def _gather(
        self, cotangents: Tensor, total_cotangents: int, last: Tensor | None = None, together: bool = False
    ) -> dict[str, Tensor]:
        """Run all backwards: output gradients of Kronecker blocks go into `_rows`; those of all other blocks come back
        whitened, [B, C, P]. ``together`` is what `plan_rotation` is told.
        """
        blocks, count = self._used_kronecker(), len(cotangents) + (last is not None)
        rows = {block.name: self._rows(block, count) for block in blocks}
        bases = {
            block.name: self._basis(block).outputs
            for block in blocks
            if self._rotates(block, count, total_cotangents, together)
        }
        late = {block.name for block in blocks if block.name in bases and self._recording.positions(block) == 1}
        found: dict[str, list[Tensor]] = defaultdict(list)

        def take(block: RecordedBlock, backward: Backward) -> None:
            if isinstance(block, KroneckerBlock):
                values = backward.each(partial(self._recording.rows, block))
                basis = None if block.name in late else bases.get(block.name)
                put_rows(rows[block.name][:, :, backward.which], values, basis)
            elif isinstance(block, NormBlock):
                found[block.name].append(backward.each(partial(self._recording.scale_and_shift, block)))
            elif isinstance(block, IndexedBlock):
                found[block.name].append(backward.each(partial(self._whitened_rows, block)))

        self._session.backwards(self._recording, cotangents, self._session.recorded, take)
        for name in late:
            turn_rows(rows[name][:, :, : len(cotangents)], bases[name])
        for name, own in self._session.other_gradients(self._batch, cotangents).items():
            found[name] = [own * self._roots(name)]
        whitened = {name: torch.cat(parts).transpose(0, 1) for name, parts in found.items()}
        for block in filter(self._recording.used, self._session.recorded):
            if isinstance(block, NormBlock):
                whitened[block.name] *= self._roots(block.name)
        if last is not None:
            for block in blocks:
                if not self._sums_gradients(block, total_cotangents):
                    own = rows[block.name]
                    own[:, :, -1] = (last[:, None, None] @ own[:, :, :-1].flatten(3)).view_as(own[:, :, -1])
            whitened = {name: torch.cat([own, last.unsqueeze(1) @ own], 1) for name, own in whitened.items()}
        return whitened

    def _sums_gradients(self, block: KroneckerBlock, cotangents: int) -> bool:
        """Whether the last of all cotangents is left to the kernel, as a sum of gradients: less work than another."""
        positions = self._recording.positions(block)
        if positions < _MANY_POSITIONS or self._choice(block, cotangents) == "pairs":
            return False
        if is_compiled(block, positions, cotangents, self._session):
            return False
        return plan_rotation(block, positions, cotangents, self._session).cotangents == cotangents

    def _rotates(self, block: KroneckerBlock, cotangents: int, total_cotangents: int, together: bool) -> bool:
        """Whether the block's kernel wants output gradients in the eigenbasis."""
        if self._choice(block, total_cotangents) == "pairs":
            return True
        positions = self._recording.positions(block)
        return plan_rotation(block, positions, cotangents, self._session, together=together).outputs_first

    def _rows(self, block: KroneckerBlock, cotangents: int) -> Tensor:
        return self._session.stacked_rows(block, self._recording, cotangents)

    def _used_kronecker(self) -> list[KroneckerBlock]:
        blocks = filter(self._recording.used, self._session.recorded)
        return [block for block in blocks if isinstance(block, KroneckerBlock)]

    def _whitened_rows(self, block: IndexedBlock, gradients: Gradients) -> Tensor:
        """Gradient of an embedding times the root of the inverse curvature, [B, P]: of the rows that were looked up."""
        indices = self._recording.indices(block)
        found = self._recording.looked_up(block, gradients) @ self._basis(block).outputs[0]
        return (sum_equal_indices(indices, found) * self._roots(block.name)[0].T[indices]).flatten(1)

    def _roots(self, name: str) -> Tensor:
        if name not in self._root_cache:
            self._root_cache[name] = self._weights[name].values.sqrt()
        return self._root_cache[name]

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=self._session.device)

    def _choice(self, block: KroneckerBlock, cotangents: int) -> Kernel:
        condition = self._weights[block.name].condition
        return choose_kernel(block, self._recording.positions(block), cotangents, condition)

    def _pair_matrix(self, block: KroneckerBlock, keep: bool) -> Tensor:
        found = self._pairs.get(block.name)
        if found is None:
            found = pair_matrix(self._recording, block, self._basis(block), self._weights[block.name].values)
        if keep:
            self._pairs[block.name] = found
        return found

    def _basis(self, block: RecordedBlock) -> Basis:
        basis = self._factors.blocks[block.name].basis
        assert basis is not None
        return basis
