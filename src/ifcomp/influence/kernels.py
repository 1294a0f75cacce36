"""Quadratic and bilinear forms of a block's per-example gradients in the inverse curvature, by two exact algorithms.

*Direct* forms every rotated gradient G and sums ``G^2 W``: cost C T O J for C cotangents. *Pairs* never forms a
gradient: with the rotated inputs a and output gradients b,

    sum_ij G_ij^2 W_ij = sum_{t,t'} sum_i b_ti b_t'i V_tt'i,     V_tt'i = sum_j W_ij a_tj a_t'j,

where V does not depend on the cotangent: cost T(T+1)/2 O J once and C T(T+1)/2 O after. For T = 1 it is a closed form.

All results are in units of the scaled weights; see `Weights`.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ifcomp import compiled
from ifcomp.curvature.factors import Basis
from ifcomp.curvature.rotation import (
    is_compiled,
    plan_rotation,
    rotated_columns,
    rotated_inputs,
    rotated_slabs,
    widened,
)
from ifcomp.layers.block import KroneckerBlock
from ifcomp.layers.capture import Recording

#: Entries of the products of inputs that *pairs* holds at once: enough examples for a large matrix product.
_PAIR_ENTRIES = 1 << 23

#: Sums are made in so many parts, where they can be: threads share them.
_PARTS = 8


def direct_forms(
    recording: Recording, block: KroneckerBlock, basis: Basis, weights: Tensor, rows: Tensor, last: Tensor | None = None
) -> Tensor:
    """``sum_ij G_ij^2 W_ij`` for every example and cotangent, [B, C].

    Args:
        recording: The forward pass, for the inputs a.
        block: The block.
        basis: Its eigenbasis.
        weights: W [G, O, J].
        rows: Output gradients b of all cotangents [B, G, C, O, T], rotated if `plan_rotation` says so.
        last: Coefficients [B, C] of one more gradient, a sum of the others: it comes last.
    """
    count = rows.shape[2] + (last is not None)
    forms = weights.new_zeros(recording.batch, count)
    if last is None and is_compiled(block, rows.shape[4], count, rows):
        panels = compiled.in_panels(weights[0])
        for some, inputs in rotated_inputs(recording, block, basis):
            forms[some] = compiled.weighted_squares(rows[some, 0], inputs, panels)
            del inputs  # before the next are made
        return forms
    plan = plan_rotation(block, rows.shape[4], count, rows)
    wide = widened(weights, plan.width)
    by_columns = {part.start: wide[..., part].flatten(1) for part in plan.parts}
    for slab in rotated_slabs(recording, block, basis, rows, plan, last):
        found = _weighted_sums(slab.gradients.square_().flatten(3), by_columns[slab.columns.start])
        forms[slab.examples, slab.cotangents] += found
        del slab  # before the next is made
    return forms


def _weighted_sums(squares: Tensor, weights: Tensor) -> Tensor:
    """Sums over groups and entries of squares [B, G, C, N] times weights [G, N], as [B, C].

    A matrix by a vector would be left to one thread; parts are shared by threads. The other way round, squares by
    weights, it takes ten times as long.
    """
    if len(weights) > 1:
        return (squares @ weights.unsqueeze(-1)).squeeze(-1).sum(1)
    parts = math.gcd(squares.shape[3], _PARTS)
    each = squares.flatten(0, 2).unflatten(1, (parts, -1)).permute(1, 2, 0)  # [parts, N / parts, B C]
    return torch.bmm(weights.view(parts, 1, -1), each).sum((0, 1)).view(len(squares), -1)


def direct_products(recording: Recording, block: KroneckerBlock, basis: Basis, weights: Tensor, rows: Tensor) -> Tensor:
    """``sum_ij G_ij W_ij H_ij`` for every example and pair of cotangents, [B, C, C]; arguments as `direct_forms`."""
    products = weights.new_zeros(recording.batch, rows.shape[2], rows.shape[2])
    plan = plan_rotation(block, rows.shape[4], rows.shape[2], rows, together=True)
    roots = widened(weights.sqrt(), plan.width)
    slabs = rotated_slabs(recording, block, basis, rows, plan)
    for _, same in itertools.groupby(slabs, key=lambda slab: (slab.examples.start, slab.columns.start)):
        parts = [(slab, slab.gradients * roots[..., slab.columns].unsqueeze(1)) for slab in same]  # all cotangents
        whitened = torch.cat([part for _, part in parts], 2).transpose(1, 2).flatten(2)  # [B', C, G O J']
        products[parts[0][0].examples] += whitened @ whitened.transpose(-1, -2)
    return products


def pair_step(block: KroneckerBlock, positions: int, examples: int) -> int:
    """Of how many examples *pairs* holds the products of inputs at once."""
    products = block.groups * (positions * (positions + 1) // 2) * block.columns
    return max(1, min(examples, _PAIR_ENTRIES // products))


def pair_matrix(recording: Recording, block: KroneckerBlock, basis: Basis, weights: Tensor) -> Tensor:
    """V for every example, output and pair of positions, [B, G, O, T, T]; symmetric, so half of it is computed.

    Where a position sees the padding of a convolution its inputs are zero, and so are those of all its pairs: half of
    all products of a 3 x 3 kernel on 4 x 4 positions. These are left out.
    """
    positions = recording.positions(block)
    sums = _PairSums(recording.inside(block), block) if positions > 1 else _sums_of_squares
    step = pair_step(block, positions, recording.batch)
    matrix = weights.new_empty(recording.batch, block.groups, block.rows, positions**2)
    for first in range(0, recording.batch, step):
        some = slice(first, first + step)
        inputs = rotated_columns(recording, block, basis, some).transpose(0, 1)  # [G, B', T, J]
        sums(inputs, weights, matrix[some])
        del inputs  # before the next are made
    return matrix.view(*matrix.shape[:3], positions, positions)


def _sums_of_squares(inputs: Tensor, weights: Tensor, out: Tensor) -> None:
    """``sum_j W_ij a_j^2`` of inputs [G, B, 1, J], into [B, G, O, 1]."""
    out.squeeze(-1).copy_((inputs.squeeze(2).square() @ weights.transpose(-1, -2)).transpose(0, 1))


class _PairSums:
    """``sum_j W_ij a_tj a_t'j`` for all pairs of positions, without what is zero."""

    def __init__(self, inside: Tensor, block: KroneckerBlock) -> None:
        """Find what pairs see together, and where their sums are.

        Args:
            inside: Whether a position sees its inputs at an offset, [T, offsets].
            block: The block.
        """
        self._groups = _pair_groups(inside, block)
        left = torch.cat([group.left for group in self._groups])
        right = torch.cat([group.right for group in self._groups])
        self._place = left.new_empty(len(inside), len(inside))
        self._place[left, right] = self._place[right, left] = torch.arange(len(left), device=left.device)

    def __call__(self, inputs: Tensor, weights: Tensor, out: Tensor) -> None:
        """Of inputs [G, B, T, J], into [B, G, O, T^2]."""
        found = torch.cat([_pair_sums(inputs, weights, group) for group in self._groups], 2)  # [G, B, pairs, O]
        by_output = found.permute(1, 0, 3, 2).contiguous()
        torch.gather(by_output, 3, self._place.flatten().expand(out.shape), out=out)


@dataclass(frozen=True)
class _PairGroup:
    """Pairs of positions whose inputs are zero in the same columns.

    Attributes:
        left: One position of each.
        right: The other.
        columns: Runs of columns that are not zero.
    """

    left: Tensor
    right: Tensor
    columns: list[slice]


def _pair_groups(inside: Tensor, block: KroneckerBlock) -> list[_PairGroup]:
    """All pairs of positions, by what they see together.

    Args:
        inside: Whether a position sees its inputs at an offset, [T, offsets].
        block: The block.
    """
    left, right = torch.triu_indices(len(inside), len(inside), device=inside.device)
    kinds, kind = inside.unique(dim=0, return_inverse=True)  # far fewer than positions
    patterns, which = (kinds[:, None] & kinds).flatten(0, 1).unique(dim=0, return_inverse=True)
    which = which[kind[left] * len(kinds) + kind[right]]
    groups = []
    for index, pattern in enumerate(patterns.tolist()):
        edges = [offset for offset, (a, b) in enumerate(itertools.pairwise([False, *pattern, False])) if a != b]
        runs = [slice(*(block.channels * edge for edge in run)) for run in zip(edges[::2], edges[1::2], strict=True)]
        if block.shared_offsets and block.has_bias:
            runs.append(slice(block.columns - 1, block.columns))
        groups.append(_PairGroup(left[which == index], right[which == index], runs))
    return groups


def _pair_sums(inputs: Tensor, weights: Tensor, group: _PairGroup) -> Tensor:
    """``sum_j W_ij a_tj a_t'j`` of some pairs of inputs [G, B, T, J], as [G, B, pairs, O]: one product for all."""
    sums = weights.new_zeros(len(inputs), inputs.shape[1] * len(group.left), weights.shape[1])
    for run in group.columns:
        own = inputs[..., run]
        products = own.index_select(2, group.left).mul_(own.index_select(2, group.right))
        sums.baddbmm_(products.flatten(1, 2), weights[..., run].transpose(-1, -2))
    return sums.view(*inputs.shape[:2], len(group.left), -1)


def pair_forms(pairs: Tensor, rows: Tensor) -> Tensor:
    """The same as `direct_forms`, from `pair_matrix` and rotated output gradients [B, G, C, O, T]."""
    if rows.shape[4] == 1:
        return (rows.squeeze(4).square() @ pairs.squeeze(4)).sum(1).squeeze(2)
    by_output = rows.transpose(2, 3)
    return (by_output @ pairs).mul_(by_output).sum((1, 2, 4))


def pair_products(pairs: Tensor, rows: Tensor) -> Tensor:
    """The same as `direct_products`, from `pair_matrix` and rotated output gradients [B, G, C, O, T]."""
    by_output = rows.transpose(2, 3)
    return (by_output @ pairs @ by_output.transpose(-1, -2)).sum((1, 2))
