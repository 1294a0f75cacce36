"""Per-example gradients in whitened coordinates, formed in full: what influence *between* examples needs.

With ``w = (G + delta)^-1/2 g`` the influence of one labelled example on another is the plain dot product of their w.
Self-influence never needs w; here it is held for a few examples at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ifcomp.curvature.factors import Basis, Factors
from ifcomp.curvature.rotation import apply_basis, plan_rotation, rotated_slabs, sum_equal_indices
from ifcomp.data.batches import Batch
from ifcomp.influence.weights import Weights
from ifcomp.layers.backward import Gradients
from ifcomp.layers.block import IndexedBlock, KroneckerBlock, NormBlock, RecordedBlock
from ifcomp.layers.capture import Recording
from ifcomp.layers.session import Session


def whitened_gradients(
    session: Session,
    factors: Factors,
    weights: Mapping[str, Weights],
    recording: Recording,
    batch: Batch,
    cotangent: Tensor,
) -> Iterator[tuple[str, Tensor]]:
    """Block by block, the gradient of ``sum_k cotangent[b, k] logits[b, k]`` of every example, whitened, [B, P].

    Dot products are in units of the block's `Weights.scale`, and columns in the order of its `Weights.values`.

    Args:
        session: The model and its blocks.
        factors: Its curvature.
        weights: Inverse curvature by block.
        recording: The forward pass.
        batch: What was recorded.
        cotangent: [B, K].
    """
    gradients = recording.backward(cotangent)
    for block in filter(recording.used, session.recorded):
        basis = factors.blocks[block.name].basis
        formed = _gradient(recording, block, gradients, basis)
        yield block.name, formed * weights[block.name].values.sqrt().flatten()
    for name, found in session.other_gradients(batch, cotangent.unsqueeze(0)).items():
        yield name, found[0] * weights[name].values.sqrt()


def _gradient(recording: Recording, block: RecordedBlock, gradients: Gradients, basis: Basis | None) -> Tensor:
    """Gradients of a block in its eigenbasis, [B, P]."""
    if isinstance(block, NormBlock):
        return recording.scale_and_shift(block, gradients)
    assert basis is not None
    if isinstance(block, IndexedBlock):
        indices = recording.indices(block)
        sums = sum_equal_indices(indices, recording.looked_up(block, gradients) @ basis.outputs[0])
        table = sums.new_zeros(recording.batch, block.entries, block.width)
        table.scatter_add_(1, indices.unsqueeze(2).expand_as(sums), sums)
        return table.transpose(1, 2).flatten(1)
    assert isinstance(block, KroneckerBlock)
    rows = recording.rows(block, gradients)
    plan = plan_rotation(block, rows.shape[3], 1, rows)
    rows = (apply_basis(basis.outputs, rows) if plan.outputs_first else rows).unsqueeze(2)
    formed = torch.empty(recording.batch, block.groups, block.rows, block.columns, dtype=rows.dtype, device=rows.device)
    for slab in rotated_slabs(recording, block, basis, rows, plan):
        part = formed[slab.examples, ..., slab.columns]
        part.copy_(slab.gradients[:, :, 0, :, : part.shape[-1]])
    return formed.flatten(1)
