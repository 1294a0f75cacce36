"""Which kernel computes a block: the cost model, and the accuracy that it must not trade away."""

from __future__ import annotations

from typing import Literal

from ifcomp.curvature.rotation import SLAB_ENTRIES
from ifcomp.layers.block import KroneckerBlock

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
