"""Which kernel computes a block: the cost model, the accuracy that it must not trade away, and what it holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from ifcomp.curvature.holdings import block_bytes, factor_bytes, slab_bytes
from ifcomp.curvature.rotation import SLAB_ENTRIES
from ifcomp.influence.kernels import pair_step
from ifcomp.influence.weights import Weights
from ifcomp.layers.block import KroneckerBlock
from ifcomp.layers.session import Footprint, Session

Kernel = Literal["direct", "pairs"]

#: Multiplications that take as long as moving one number to or from memory outside the cache.
_PER_MOVE = 24.0
#: The same inside the cache.
_PER_CACHED_MOVE = 4.0

#: Up to this condition *pairs* may be used for T > 1. Its sum over pairs cancels in directions where an example's
#: gradient is small, so its error grows like rounding times the condition, while that of *direct* grows like rounding
#: squared times the condition.
MAX_CONDITION = 1e3


def choose_kernel(block: KroneckerBlock, positions: int, cotangents: int, condition: float) -> Kernel:
    """*Pairs* for T = 1; else the cheaper of the two by `direct_cost` and `pairs_cost`, *pairs* only if well
    conditioned.
    """
    if positions == 1:
        return "pairs"
    if condition > MAX_CONDITION:
        return "direct"
    cheaper = pairs_cost(block, positions, cotangents) < direct_cost(block, positions, cotangents)
    return "pairs" if cheaper else "direct"


def direct_cost(block: KroneckerBlock, positions: int, cotangents: int) -> float:
    """Multiplications of *direct* per example, with memory traffic in the same unit."""
    entries = block.rows * block.columns
    move = _PER_CACHED_MOVE if entries <= SLAB_ENTRIES else _PER_MOVE / 2
    return block.groups * cotangents * entries * (positions + 2 * move)


def pairs_cost(block: KroneckerBlock, positions: int, cotangents: int) -> float:
    """Multiplications of *pairs* per example, with memory traffic in the same unit."""
    pairs = positions * (positions + 1) / 2
    per_pair = block.rows * block.columns + _PER_MOVE * block.columns + cotangents * block.rows * _PER_MOVE
    return block.groups * pairs * per_pair


def weight_bytes(session: Session) -> int:
    """What scoring holds whatever the data is: a fit, the inverse curvature, and the roots of diagonal blocks."""
    moments = {block.name: block_bytes(block, session.item_bytes)[0] for block in session.blocks}
    roots = sum(size for name, size in moments.items() if name not in _kronecker_names(session))
    return factor_bytes(session.blocks, session.item_bytes) + sum(moments.values()) + roots


def form_bytes(
    session: Session,
    weights: Mapping[str, Weights],
    total_cotangents: int,
    footprint: Footprint,
    examples: int,
    cotangents: int,
) -> int:
    """What scoring holds for a piece: as the second pass of a fit, and the matrices of *pairs*.

    These are kept where more cotangents follow than are worked on at once.

    Args:
        session: The model and its blocks.
        weights: Inverse curvature by block.
        total_cotangents: For each example.
        footprint: Of an example.
        examples: In the piece.
        cotangents: At once.
    """
    matrices, passing = [0], [0]
    for block in session.kronecker:
        positions = footprint.positions.get(block.name, 0)
        if not isinstance(block, KroneckerBlock) or not positions:
            continue
        if choose_kernel(block, positions, total_cotangents, weights[block.name].condition) == "pairs":
            step, square = pair_step(block, positions, examples), block.groups * positions**2
            pairs = block.groups * positions * (positions + 1) // 2
            sums = step * pairs * block.rows
            matrices.append(examples * square * block.rows)
            by_output = 2 * examples * cotangents * block.groups * block.rows * positions
            passing.append(max(2 * step * pairs * block.columns + sums, 2 * sums, by_output))
    kept = sum(matrices) if total_cotangents > cotangents else max(matrices)
    left = total_cotangents % cotangents or cotangents
    return slab_bytes(session, footprint, examples, cotangents, left) + (kept + max(passing)) * session.item_bytes


def _kronecker_names(session: Session) -> set[str]:
    return {block.name for block in session.recorded if isinstance(block, KroneckerBlock)}
