"""ACNML: for every label, fit the model to it under a Gaussian posterior, and normalise what it then says.

The hindsight weights of label y are the minimiser of

    ``-log p_theta(y | x) + 1/2 (theta - base)^T Sigma^-1 (theta - base)``

with the covariance ``Sigma`` of a posterior around the base weights. Its gradient is zero where
``theta = base - Sigma g(theta)``, g being the gradient of the label's codelength, and that gives the step:

    ``theta <- (1 - r) theta + r (base - Sigma g(theta))``,

gradient descent on the objective, preconditioned by Sigma, with step size r. Relaxation r = 1 starts every step from
the base weights again, as the published code of the paper does; many steps with a small r reach the minimiser.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.func import grad

from experiments.baselines.ekfac import EkfacCovariance
from experiments.baselines.interface import (
    Inputs,
    by_example,
    check_count,
    checked_batch,
    count_classes,
    example_logits,
)
from experiments.baselines.swag import WeightMoments
from ifcomp.curvature.factors import Damping, Factors, check_damping, check_number
from ifcomp.data.batches import Batch
from ifcomp.errors import ModelError, NonFiniteError, SettingError
from ifcomp.layers.forward import evaluating
from ifcomp.predictor import DEFAULT_DAMPING

#: What the weights of the pairs of example and label that are fitted together may hold, in bytes.
CHUNK_BYTES = 256 * 2**20

#: Copies of the weights for each pair: weights, gradient, step, and what rotating leaves behind.
_COPIES = 6

#: More pairs at once gain nothing.
_MOST_PAIRS = 128


class Covariance(Protocol):
    """The covariance ``Sigma`` of a Gaussian around a model's weights.

    Attributes:
        names: The parameters that may move.
    """

    names: set[str]

    def times(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``Sigma g`` in the shapes of the parameters; is run under ``vmap``."""
        ...


class DiagonalCovariance:
    """``Sigma = diag(variance)``."""

    def __init__(self, variance: Mapping[str, Tensor]) -> None:
        """Keep the variances, in the shapes and precision of the parameters."""
        self.names = set(variance)
        self._variance = variance

    def times(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``variance * g``."""
        return {name: self._variance[name] * gradient for name, gradient in gradients.items()}


@dataclass(frozen=True)
class Acnml:
    """Amortised conditional normalised maximum likelihood of a classifier.

    Attributes:
        model: The classifier with the base weights.
        covariance: Of the posterior around them.
        steps: s, 5 in the paper.
        relaxation: r in (0, 1]; 1 as published. Many steps diverge at 1 where the posterior is wide.
    """

    model: nn.Module
    covariance: Covariance
    steps: int = 5
    relaxation: float = 1.0

    def __post_init__(self) -> None:
        """Refuse settings that mean nothing."""
        check_count("steps", self.steps)
        if not 0 < self.relaxation <= 1:
            raise SettingError(f"relaxation must be above 0 and at most 1, but is {self.relaxation!r}.")

    @classmethod
    def from_swag(
        cls, model: nn.Module, moments: WeightMoments, *, scale: float = 0.5, steps: int = 5, relaxation: float = 1.0
    ) -> Self:
        """With ``Sigma = scale * diag(variance)`` of SWAG-Diagonal.

        Args:
            model: With the averaged weights, as `swa_model` makes it.
            moments: Of the weights along the training path.
            scale: As published, 0.5.
            steps: s.
            relaxation: r.
        """
        check_number("scale", scale)
        moments.check(model)
        parameters = dict(model.named_parameters())
        moved = [name for name, p in parameters.items() if not torch.equal(p.detach(), moments.mean[name].to(p))]
        if moved:
            raise ModelError(
                f"The posterior is around the averaged weights, but the model has others in {', '.join(moved)}. "
                "Give the model that swa_model(model, moments, data) returns."
            )
        variance = {name: (scale * moments.variance[name]).to(p.detach()) for name, p in parameters.items()}
        return cls(model, DiagonalCovariance(variance), steps, relaxation)

    @classmethod
    def from_ekfac(
        cls,
        model: nn.Module,
        factors: Factors,
        *,
        damping: Damping = DEFAULT_DAMPING,
        scale: float = 1e-4,
        steps: int = 5,
        relaxation: float = 1.0,
    ) -> Self:
        """With ``Sigma = scale/n (F + delta)^-1``: at scale 1 the Laplace approximation's posterior.

        Args:
            model: The classifier that was fitted.
            factors: ``IFComp(model).fit(data).factors``, at beta = 1.
            damping: delta; the paper has 1e-12 for ResNets and 1e-30 for LeNet.
            scale: As published, 1e-4.
            steps: s.
            relaxation: r.
        """
        check_number("scale", scale)
        if factors.settings.beta != 1:
            raise SettingError(f"ACNML needs factors at beta = 1, but these are at {factors.settings.beta}. Fit again.")
        covariance = EkfacCovariance(model, factors, check_damping(damping), scale / factors.count)
        return cls(model, covariance, steps, relaxation)

    def predict_proba(self, x: Any) -> Tensor:
        """Hindsight probabilities normalised over labels, [B, K]. Cost: K (3 s + 1) forward passes."""
        hindsight = self.hindsight_proba(x)
        return hindsight / hindsight.sum(1, keepdim=True)

    def hindsight_proba(self, x: Any) -> Tensor:
        """Probability of each label after fitting that label, [B, K]; not normalised."""
        batch = checked_batch(self.model, x)
        base = {n: p.detach() for n, p in self.model.named_parameters() if n in self.covariance.names}
        size = sum(value.numel() * value.element_size() for value in base.values())
        chunk = max(1, min(_MOST_PAIRS, CHUNK_BYTES // (_COPIES * max(size, 1))))
        with evaluating(self.model), torch.inference_mode(False), torch.no_grad():
            classes = count_classes(self.model, batch)
            pairs = torch.arange(batch.size * classes)
            parts = [self._fit(batch, some, classes, base) for some in pairs.split(chunk)]
        found = torch.cat(parts).view(batch.size, classes)
        wrong = ~found.isfinite().all(1) | (found.sum(1) == 0)
        if wrong.any():
            raise NonFiniteError(
                f"{batch.name}: fitting the labels of {batch.describe_example(wrong)} diverges. "
                "Use a smaller scale, more damping or less relaxation."
            )
        return found

    def _fit(self, batch: Batch, pairs: Tensor, classes: int, base: Mapping[str, Tensor]) -> Tensor:
        """Probability of the label of every pair ``example * K + label``, [N], with the weights fitted to it."""
        targets = torch.nn.functional.one_hot(pairs % classes, classes).to(next(iter(base.values())).device)

        def codelength(weights: Mapping[str, Tensor], inputs: Inputs, target: Tensor) -> Tensor:
            logits = example_logits(self.model, weights, inputs)
            return -(target * torch.log_softmax(logits, 0)).sum()

        def hindsight(inputs: Inputs, target: Tensor) -> Tensor:
            weights = dict(base)
            for _ in range(self.steps):
                step = self.covariance.times(grad(codelength)(weights, inputs, target))
                weights = {n: torch.lerp(weights[n], base[n] - step[n], self.relaxation) for n in base}
            return (target * torch.softmax(example_logits(self.model, weights, inputs).double(), 0)).sum()

        return by_example(hindsight, batch, pairs // classes, targets)
