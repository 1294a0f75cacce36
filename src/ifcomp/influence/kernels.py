"""Quadratic and bilinear forms of a block's per-example gradients in the inverse curvature, by two exact algorithms.

*Direct* forms every rotated gradient G and sums ``G^2 W``: cost C T O J for C cotangents. *Pairs* never forms a
gradient: with the rotated inputs a and output gradients b,

    sum_ij G_ij^2 W_ij = sum_{t,t'} sum_i b_ti b_t'i V_tt'i,     V_tt'i = sum_j W_ij a_tj a_t'j,

where V does not depend on the cotangent: cost T(T+1)/2 O J once and C T(T+1)/2 O after. For T = 1 it is a closed form.

All results are in units of the scaled weights; see `Weights`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ifcomp.curvature.factors import Basis
from ifcomp.curvature.rotation import SLAB_ENTRIES, apply_basis, rotated_columns, rotated_slabs
from ifcomp.layers.block import KroneckerBlock
from ifcomp.layers.capture import Recording


def direct_forms(
    recording: Recording, block: KroneckerBlock, basis: Basis, weights: Tensor, rows: Sequence[Tensor]
) -> Tensor:
    """``sum_ij G_ij^2 W_ij`` for every example and cotangent, [B, C].

    Args:
        recording: The forward pass, for the inputs a.
        block: The block.
        basis: Its eigenbasis.
        weights: W [G, O, J].
        rows: Output gradients b, one [B, G, O, T] for each cotangent.
    """
    forms = weights.new_zeros(recording.batch, len(rows))
    for slab in rotated_slabs(recording, block, basis, rows):
        squares = slab.gradients.square_().flatten(3)  # [B', G, C, O'J]
        flat = weights[:, slab.rows].flatten(1).unsqueeze(-1)
        forms[slab.examples] += (squares @ flat).squeeze(-1).sum(1)
    return forms


def direct_products(
    recording: Recording, block: KroneckerBlock, basis: Basis, weights: Tensor, rows: Sequence[Tensor]
) -> Tensor:
    """``sum_ij G_ij W_ij H_ij`` for every example and pair of cotangents, [B, C, C]; arguments as `direct_forms`."""
    products = weights.new_zeros(recording.batch, len(rows), len(rows))
    roots = weights.sqrt()
    for slab in rotated_slabs(recording, block, basis, rows):
        whitened = slab.gradients.mul_(roots[:, slab.rows].unsqueeze(1)).flatten(3)
        products[slab.examples] += (whitened @ whitened.transpose(-1, -2)).sum(1)
    return products


def pair_matrix(recording: Recording, block: KroneckerBlock, basis: Basis, weights: Tensor) -> Tensor:
    """V for every example and pair of positions t <= t', [B, G, T(T+1)/2, O]."""
    columns = rotated_columns(recording, block, basis).transpose(-1, -2).contiguous()  # [B, G, T, J]
    positions = columns.shape[2]
    pairs = positions * (positions + 1) // 2
    transposed = weights.transpose(-1, -2)  # [G, J, O]
    step = max(1, 4 * SLAB_ENTRIES // (block.groups * pairs * block.columns))
    products = columns.new_empty(min(step, recording.batch), block.groups, pairs, block.columns)
    parts = []
    for first in range(0, recording.batch, step):
        some = columns[first : first + step]
        start = 0
        for t in range(positions):
            stop = start + positions - t
            torch.mul(some[:, :, t : t + 1], some[:, :, t:], out=products[: len(some), :, start:stop])
            start = stop
        parts.append(products[: len(some)] @ transposed)
    return torch.cat(parts)


def pair_forms(basis: Basis, pairs: Tensor, rows: Sequence[Tensor]) -> Tensor:
    """The same as `direct_forms`, from `pair_matrix`."""
    left, right = _pairs(rows[0].shape[3], pairs.device)
    counted = pairs * torch.where(left == right, 1.0, 2.0).to(pairs.dtype).unsqueeze(-1)
    turned = _by_position(basis, rows)
    return torch.stack([(row[:, :, left] * row[:, :, right] * counted).sum((1, 2, 3)) for row in turned], 1)


def pair_products(block: KroneckerBlock, basis: Basis, pairs: Tensor, rows: Sequence[Tensor]) -> Tensor:
    """The same as `direct_products`, from `pair_matrix`."""
    stacked = torch.stack(list(_by_position(basis, rows)), 2)  # [B, G, C, T, O]
    positions = stacked.shape[3]
    left, right = _pairs(positions, pairs.device)
    square = pairs.new_empty(len(pairs), block.groups, positions, positions, block.rows)
    square[:, :, left, right] = pairs
    square[:, :, right, left] = pairs
    return torch.einsum("bgcti,bgdsi,bgtsi->bcd", stacked, stacked, square)


def _by_position(basis: Basis, rows: Sequence[Tensor]) -> Iterator[Tensor]:
    """Rotated output gradients of each cotangent, [B, G, T, O]."""
    return (apply_basis(basis.outputs, row).transpose(-1, -2) for row in rows)


def _pairs(positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    left, right = torch.triu_indices(positions, positions, device=device)
    return left, right
