"""The inverse curvature of a block, ``W = 1 / (Lambda + delta)``, scaled to the range of float32."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ifcomp.curvature.factors import Damping, Factors, inverse_curvature
from ifcomp.precision import as_double, as_type_of

#: Largest entry of scaled weights. It leaves a margin for squared gradients above and well-curved directions below.
_LARGEST = 1e12


@dataclass(frozen=True)
class Weights:
    """The inverse curvature of one block.

    Attributes:
        values: ``W / scale``, in the shape of the second moments.
        scale: Factor of forms that are evaluated with ``values``.
        condition: Largest weight times the mean second moment.
    """

    values: Tensor
    scale: float
    condition: float


def invert(factors: Factors, damping: Damping) -> dict[str, Weights]:
    """Inverse curvature of every block; without damping the pseudo-inverse.

    Args:
        factors: The curvature.
        damping: Added to the curvature.
    """
    return {
        name: _invert(block.second_moments, factors.damping_of(name, damping)) for name, block in factors.blocks.items()
    }


def _invert(second_moments: Tensor, damping: float) -> Weights:
    weights = inverse_curvature(second_moments, damping)
    largest = float(weights.max()) if weights.numel() else 0.0
    scale = max(largest / _LARGEST, 1.0)
    condition = largest * float(as_double(second_moments).mean())
    return Weights(as_type_of(weights / scale, second_moments), scale, condition)
