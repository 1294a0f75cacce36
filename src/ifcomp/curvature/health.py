"""Health of layers: which results depend on the damping, and which layers have no gradient.

The mean expected influence of a layer over the training data is ``f(delta) = sum Lambda / (Lambda + delta)``, its
number of effective parameters. If all curvature is far below the damping, f is proportional to ``1 / delta``: ten times
the damping divides it by ten, and the layer's part of every score depends mainly on the damping. If the curvature
dominates, ten times the damping changes little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from torch import Tensor

from ifcomp.curvature.factors import Damping, Factors, Relative, inverse_curvature
from ifcomp.layers.coverage import Coverage
from ifcomp.precision import as_double

#: A layer depends on the damping if ten times the damping divides its influence by more than this; 10 is the maximum.
FACTOR = 5.0

#: A layer is faint if its mean squared gradient is below this share of the largest layer's.
FAINT = 1e-8

#: Multiples of the mean curvature that can be suggested, largest first.
_MULTIPLES = tuple(10.0**-exponent for exponent in range(1, 9))

_DESCRIPTIONS = {
    "dead": "its gradients on the training data are zero, or below the rounding errors of the largest gradient, so its "
    "curvature counts as zero",
    "faint": "its gradients are negligible beside those of other layers, but Relative damping gives it their weight; "
    "leave it out with layers=, or give an absolute damping",
    "damping": "ten times the damping divides its expected influence by {factor:.1f}; use less damping",
}


@dataclass(frozen=True)
class LayerHealth:
    """Reliability of the results of a layer.

    Attributes:
        name: The layer.
        effective: ``f(delta)``, its number of effective parameters.
        factor: ``f(delta) / f(10 delta)``, from 1 (curvature dominates) to 10 (damping dominates).
        share: Its mean squared gradient over that of the layer with the largest.
        verdict: "fine", "dead", "faint" or "damping".
    """

    name: str
    effective: float
    factor: float
    share: float
    verdict: str

    @property
    def description(self) -> str:
        """The problem and its solution."""
        return _DESCRIPTIONS.get(self.verdict, "fine").format(factor=self.factor)


@dataclass(frozen=True, repr=False)
class FittedCoverage(Coverage):
    """Coverage with the health of each layer.

    Attributes:
        health: One entry for each covered layer.
        damping: Damping at which health is judged.
        suggested: The damping itself if no layer depends on it, else the largest power of ten times the mean
            curvature on which none depends. Dead and faint layers do not count.
    """

    health: tuple[LayerHealth, ...]
    damping: Damping
    suggested: Damping

    @property
    def unhealthy(self) -> tuple[LayerHealth, ...]:
        """Layers with a problem."""
        return tuple(layer for layer in self.health if layer.verdict != "fine")

    @property
    def frame(self) -> pd.DataFrame:
        """Rows of the coverage, with health and effective parameters of the covered layers."""
        health = {layer.name: layer for layer in self.health}
        known = [health.get(row.name) for row in self.rows]
        return super().frame.assign(
            health=[layer.verdict if layer else "" for layer in known],
            effective=[layer.effective if layer else float("nan") for layer in known],
        )

    @property
    def settings(self) -> dict[str, Any]:
        """Damping at which health is judged."""
        return {"damping": repr(self.damping)}

    @property
    def answer(self) -> str:
        """Covered share of the parameters and number of healthy layers."""
        healthy = len(self.health) - len(self.unhealthy)
        return f"{super().answer}, {healthy} of {len(self.health)} layers healthy"

    def __str__(self) -> str:
        return "\n".join([super().__str__(), *self.health_lines()])

    def health_lines(self) -> list[str]:
        """The health section of the printed table."""
        lines = [f"healthy: {len(self.health) - len(self.unhealthy)} of {len(self.health)} layers at {self.damping!r}"]
        lines += [f"  {layer.name} ({layer.verdict}): {layer.description}" for layer in self.unhealthy]
        if self.suggested != self.damping:
            lines.append(f"suggested damping: {self.suggested!r}")
        return lines


def with_health(coverage: Coverage, factors: Factors, damping: Damping) -> FittedCoverage:
    """Add the health of its layers to a coverage.

    Args:
        coverage: Treatment of the parameters.
        factors: The fitted curvature.
        damping: Damping of the scores.
    """
    sizes = {name: float(as_double(block.second_moments).sum()) for name, block in factors.blocks.items()}
    largest = max(sizes.values(), default=0.0)
    health = tuple(_layer_health(factors, name, damping, size, largest) for name, size in sizes.items())
    counting = [name for name, size in sizes.items() if size and size >= FAINT * largest]
    return FittedCoverage(coverage.rows, health, damping, _suggest(factors, counting, damping))


def _layer_health(factors: Factors, name: str, damping: Damping, size: float, largest: float) -> LayerHealth:
    moments = factors.blocks[name].second_moments
    delta = factors.damping_of(name, damping)
    share = size / largest if largest else 0.0
    factor = damping_factor(moments, delta)
    verdict = "dead" if not size else "faint" if share < FAINT else "damping" if factor > FACTOR else "fine"
    return LayerHealth(name or "(model)", _effective(moments, delta), factor, share, verdict)


def damping_factor(second_moments: Tensor, damping: float) -> float:
    """``f(delta) / f(10 delta)``: the factor by which ten times the damping divides the mean expected influence."""
    more = _effective(second_moments, 10 * damping)
    return _effective(second_moments, damping) / more if more else 1.0


def _effective(second_moments: Tensor, damping: float) -> float:
    """``f(delta)``, the effective number of parameters of a layer."""
    return float((as_double(second_moments) * inverse_curvature(second_moments, damping)).sum())


def _suggest(factors: Factors, names: Sequence[str], damping: Damping) -> Damping:
    """The damping itself, or the largest multiple of the mean curvature, on which none of the layers depends."""

    def dominates(candidate: Damping) -> bool:
        moments = {name: factors.blocks[name].second_moments for name in names}
        return any(damping_factor(moments[name], factors.damping_of(name, candidate)) > FACTOR for name in names)

    candidates: list[Damping] = [damping, *map(Relative, _MULTIPLES)]
    return next((candidate for candidate in candidates if not dominates(candidate)), candidates[-1])
