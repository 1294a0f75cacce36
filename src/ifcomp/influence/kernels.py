"""Quadratic and bilinear forms of a block's per-example gradients in the inverse curvature, by two exact algorithms.

*Direct* forms every rotated gradient G and sums ``G^2 W``: cost C T O J for C cotangents. *Pairs* never forms a
gradient: with the rotated inputs a and output gradients b,

    sum_ij G_ij^2 W_ij = sum_{t,t'} sum_i b_ti b_t'i V_tt'i,     V_tt'i = sum_j W_ij a_tj a_t'j,

where V does not depend on the cotangent: cost T(T+1)/2 O J once and C T(T+1)/2 O after. For T = 1 it is a closed form.

All results are in units of the scaled weights; see `Weights`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ifcomp.curvature.factors import Basis
from ifcomp.curvature.passes import gather_indexed
from ifcomp.curvature.rotation import SLAB_ENTRIES, rotated_columns, rotated_slabs, stacked_rows
from ifcomp.layers.block import IndexedBlock, KroneckerBlock
from ifcomp.layers.capture import Gradients, Recording


def direct_forms(
    recording: Recording, block: KroneckerBlock, basis: Basis, weights: Tensor, gradients: list[Gradients]
) -> Tensor:
    """``sum_ij G_ij^2 W_ij`` for every example and cotangent, [B, C]."""
    forms = weights.new_zeros(recording.batch, len(gradients))
    for slab in rotated_slabs(recording, block, basis, gradients):
        squares = slab.gradients.square_().flatten(3)  # [B', G, C, O'J]
        flat = weights[:, slab.rows].flatten(1).unsqueeze(-1)
        forms[slab.examples] += (squares @ flat).squeeze(-1).sum(1)
    return forms


def direct_products(
    recording: Recording, block: KroneckerBlock, basis: Basis, weights: Tensor, gradients: list[Gradients]
) -> Tensor:
    """``sum_ij G_ij W_ij H_ij`` for every example and pair of cotangents, [B, C, C]."""
    products = weights.new_zeros(recording.batch, len(gradients), len(gradients))
    roots = weights.sqrt()
    for slab in rotated_slabs(recording, block, basis, gradients):
        whitened = slab.gradients.mul_(roots[:, slab.rows].unsqueeze(1)).flatten(3)
        products[slab.examples] += (whitened @ whitened.transpose(-1, -2)).sum(1)
    return products


def pair_matrix(recording: Recording, block: KroneckerBlock, basis: Basis, weights: Tensor) -> Tensor:
    """V for every example and pair of positions t <= t', [B, G, T(T+1)/2, O]."""
    columns = rotated_columns(recording, block, basis).transpose(-1, -2)  # [B, G, T, J]
    left, right = _pairs(columns.shape[2], columns.device)
    transposed = weights.transpose(-1, -2)  # [G, J, O]
    step = max(1, 4 * SLAB_ENTRIES // (block.groups * len(left) * block.columns))
    parts = [
        (columns[first : first + step, :, left] * columns[first : first + step, :, right]) @ transposed
        for first in range(0, recording.batch, step)
    ]
    return torch.cat(parts)


def pair_forms(
    recording: Recording, block: KroneckerBlock, basis: Basis, pairs: Tensor, gradients: list[Gradients]
) -> Tensor:
    """The same as `direct_forms`, from `pair_matrix`."""
    forms = []
    for rows in _rows_by_position(recording, block, basis, gradients):
        left, right = _pairs(rows.shape[2], rows.device)
        counted = pairs * torch.where(left == right, 1.0, 2.0).to(pairs.dtype).unsqueeze(-1)
        forms.append((rows[:, :, left] * rows[:, :, right] * counted).sum((1, 2, 3)))
    return torch.stack(forms, 1)


def pair_products(
    recording: Recording, block: KroneckerBlock, basis: Basis, pairs: Tensor, gradients: list[Gradients]
) -> Tensor:
    """The same as `direct_products`, from `pair_matrix`."""
    rows = torch.stack(list(_rows_by_position(recording, block, basis, gradients)), 2)  # [B, G, C, T, O]
    positions = rows.shape[3]
    left, right = _pairs(positions, rows.device)
    square = rows.new_empty(len(rows), block.groups, positions, positions, block.rows)
    square[:, :, left, right] = pairs
    square[:, :, right, left] = pairs
    return torch.einsum("bgcti,bgdsi,bgtsi->bcd", rows, rows, square)


def indexed_whitened(
    recording: Recording, block: IndexedBlock, basis: Basis, weights: Tensor, gradients: list[Gradients]
) -> Iterator[Tensor]:
    """Whitened gradients of an embedding, one [B, T, D] a cotangent: only looked-up rows have any."""
    indices = recording.indices(block)
    roots = weights[0].T[indices].sqrt()  # [B, T, D]
    for gradient in gradients:
        sums, _ = gather_indexed(indices, recording.looked_up(block, gradient) @ basis.outputs[0])
        yield sums * roots


def _rows_by_position(
    recording: Recording, block: KroneckerBlock, basis: Basis, gradients: list[Gradients]
) -> Iterator[Tensor]:
    """Rotated output gradients of each cotangent, [B, G, T, O]."""
    for gradient in gradients:
        yield stacked_rows(recording, block, [gradient], basis.outputs)[:, :, 0].transpose(-1, -2)


def _pairs(positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    left, right = torch.triu_indices(positions, positions, device=device)
    return left, right
