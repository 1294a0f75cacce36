"""Squared norms of per-example gradients: the forms of `forms` with the identity in the place of the inverse curvature.

No eigenbasis is needed, since rotations keep norms. The gradient ``sum_t b_t a_t^T`` of a Kronecker block has the
squared norm

    ||sum_t b_t a_t^T||^2 = sum_{t,t'} (a_t . a_t') (b_t . b_t'),

which needs no gradient (*ghost*): cost T^2 J once and T^2 O for each of C cotangents, against C T O J for forming the
gradients, a slab at a time (*direct*). Both are exact; `choose_way` takes the one with fewer multiplications.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from torch import Tensor

from ifcomp.curvature.rotation import SLAB_ENTRIES, sum_equal_indices
from ifcomp.data.batches import Batch
from ifcomp.layers.backward import Backward, Gradients
from ifcomp.layers.block import IndexedBlock, KroneckerBlock, NormBlock, RecordedBlock
from ifcomp.layers.capture import Recording
from ifcomp.layers.session import COTANGENTS_AT_ONCE, Session

Way = Literal["direct", "ghost"]


def squared_gradient_norms(session: Session, recording: Recording, batch: Batch, cotangents: Tensor) -> Tensor:
    """``||J^T v||^2`` over all covered parameters for every example and cotangent v, [B, C] in float64.

    Cost: 2C forward passes.

    Args:
        session: The model and its blocks, inside ``attached``.
        recording: The forward pass over the batch.
        batch: What was recorded.
        cotangents: Vectors over the logits, [C, B, K]; ``p - e_y`` gives the gradient of the loss of label y.
    """
    with session.computing():
        chunks = cotangents.split(COTANGENTS_AT_ONCE)
        return torch.cat([_chunk_norms(session, recording, batch, chunk, len(cotangents)) for chunk in chunks], 1)


def choose_way(block: KroneckerBlock, positions: int, cotangents: int) -> Way:
    """How to get the norms of a block: whichever has fewer multiplications."""
    ghost = positions**2 * (block.columns + cotangents * block.rows)
    direct = cotangents * positions * block.rows * block.columns
    return "ghost" if ghost <= direct else "direct"


def _chunk_norms(session: Session, recording: Recording, batch: Batch, cotangents: Tensor, total: int) -> Tensor:
    norms = torch.zeros(batch.size, len(cotangents), dtype=torch.float64, device=session.device)
    rows: dict[KroneckerBlock, list[Tensor]] = {}

    def take(block: RecordedBlock, backward: Backward) -> None:
        if isinstance(block, KroneckerBlock):
            rows.setdefault(block, []).extend(backward.each(partial(recording.rows, block)))
        else:
            found = backward.each(partial(_explicit, recording, block))
            norms[:, backward.which] += found.square().flatten(2).sum(2).T

    session.backwards(recording, cotangents, session.recorded, take)
    for block, outputs in rows.items():
        way = choose_way(block, recording.positions(block), total)
        norms += (_ghost if way == "ghost" else _direct)(recording.columns(block), outputs)
    for gradient in session.other_gradients(batch, cotangents).values():  # [C, B, P]
        norms += gradient.square().sum(2).T
    return norms


def _explicit(recording: Recording, block: RecordedBlock, gradients: Gradients) -> Tensor:
    """Per-example gradient of an embedding or a normalisation, [B, ...]."""
    if isinstance(block, IndexedBlock):
        return sum_equal_indices(recording.indices(block), recording.looked_up(block, gradients))
    assert isinstance(block, NormBlock)
    return recording.scale_and_shift(block, gradients)


def _ghost(columns: Tensor, outputs: list[Tensor]) -> Tensor:
    """Squared norms [B, C] from inputs a [B, G, J, T] and the output gradients b [B, G, O, T] of every cotangent."""
    inner = columns.transpose(-1, -2) @ columns  # [B, G, T, T]
    return torch.stack([(inner * (rows.transpose(-1, -2) @ rows)).sum((1, 2, 3)) for rows in outputs], 1)


def _direct(columns: Tensor, outputs: list[Tensor]) -> Tensor:
    """The same as `_ghost`, from gradients that are formed for a few examples at a time."""
    transposed = columns.transpose(-1, -2)
    gradients = columns.shape[1] * columns.shape[2] * outputs[0].shape[2] * len(outputs)
    step = max(1, SLAB_ENTRIES // gradients)
    found = []
    for first in range(0, len(columns), step):
        some = slice(first, first + step)
        rows = torch.stack([own[some] for own in outputs], 2)  # [B', G, C, O, T]: one large product for all cotangents
        formed = rows.flatten(2, 3) @ transposed[some]
        found.append(formed.square_().sum(-1).unflatten(2, rows.shape[2:4]).sum((1, 3)))
    return torch.cat(found)
