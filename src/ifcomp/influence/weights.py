"""Inverse curvature of a block, ``W = 1 / (Lambda + delta)``, kept in a range that float32 can hold."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import Tensor

from ifcomp.curvature.factors import Damping, Factors, inverse_curvature
from ifcomp.layers.block import Block, KroneckerBlock

#: Largest entry of scaled weights: room above for squared gradients, room below for well-curved directions.
_LARGEST = 1e12


@dataclass(frozen=True)
class Weights:
    """The inverse curvature of one block.

    Attributes:
        values: ``W / scale``, in the shape of the second moments; columns in the order of `KroneckerBlock.by_offset`.
        scale: What sums over ``values`` are multiplied by, in float64.
        condition: Largest weight times the mean second moment: how much the flattest direction counts beside an
        average one.
    """

    values: Tensor
    scale: float
    condition: float


def invert(factors: Factors, damping: Damping, blocks: Iterable[Block]) -> dict[str, Weights]:
    """Weights of every block; without damping those of the pseudo-inverse.

    Args:
        factors: The curvature.
        damping: Added to it.
        blocks: Of the model, to know the order of their columns.
    """
    found = {
        name: _invert(own.second_moments, factors.damping_of(name, damping)) for name, own in factors.blocks.items()
    }
    for block in blocks:
        if isinstance(block, KroneckerBlock):
            found[block.name] = replace(found[block.name], values=block.by_offset(found[block.name].values))
    return found


def _invert(second_moments: Tensor, damping: float) -> Weights:
    weights = inverse_curvature(second_moments, damping)
    largest = float(weights.max()) if weights.numel() else 0.0
    scale = max(largest / _LARGEST, 1.0)
    condition = largest * float(second_moments.double().mean())
    return Weights((weights / scale).to(second_moments.dtype), scale, condition)
