"""ACNML: amortised conditional normalised maximum likelihood.

For every label y the model is fitted to y under a Gaussian posterior. The hindsight weights of y minimise

    ``-log p_theta(y | x) + 1/2 (theta - base)^T Sigma^-1 (theta - base)``

with the covariance ``Sigma`` of the posterior around the base weights. With ``g(theta)``, the gradient of the label's
codelength, the minimiser satisfies ``theta = base - Sigma g(theta)``. One step is

    ``theta <- (1 - r) theta + r (base - Sigma g(theta))``,

gradient descent on the objective with preconditioner Sigma and step size r. The published code uses r = 1, so that
every step starts from the base weights. Small r with many steps converges to the minimiser.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.func import grad

from experiments.baselines.ekfac import EkfacCovariance
from experiments.baselines.inference import forward, nonempty_batch, on_device
from experiments.baselines.interface import check_count, check_not_negative
from experiments.baselines.per_example import Inputs, example_logits, map_examples
from experiments.baselines.swag import WeightMoments
from ifcomp import IFComp, Relative
from ifcomp.data.batches import Batch
from ifcomp.errors import ModelError, NonFiniteError, NotFittedError, SettingError
from ifcomp.layers.forward import evaluating

#: Copies of the weights per pair of example and label: weights, gradient, step and temporary results.
_COPIES = 6

#: Largest number of pairs that are fitted together.
_MAX_PAIRS = 128


class Covariance(Protocol):
    """The covariance ``Sigma`` of a Gaussian around the weights of a model.

    Attributes:
        names: Parameters that may change.
    """

    names: set[str]

    def multiply(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return ``Sigma g`` in the shapes of the parameters. Must work under ``vmap``."""
        ...


class DiagonalCovariance:
    """``Sigma = diag(variance)``."""

    def __init__(self, variance: Mapping[str, Tensor]) -> None:
        """Set the variances, in the shapes and precision of the parameters."""
        self.names = set(variance)
        self._variance = variance

    def multiply(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return ``variance * g``."""
        return {name: self._variance[name] * gradient for name, gradient in gradients.items()}


@dataclass(frozen=True)
class Acnml:
    """Amortised conditional normalised maximum likelihood of a classifier.

    Attributes:
        model: The classifier with the base weights.
        covariance: Covariance of the posterior around them.
        steps: s, 5 in the paper.
        relaxation: r in (0, 1]; 1 as published. With r = 1 many steps diverge if the posterior is wide.
        memory: Bytes for the weights of the pairs of example and label that are fitted together; one pair at least.
    """

    model: nn.Module
    covariance: Covariance
    steps: int = 5
    relaxation: float = 1.0
    memory: int = 256 * 2**20

    def __post_init__(self) -> None:
        """Raise SettingError if steps or relaxation are out of range."""
        check_count("steps", self.steps)
        if not 0 < self.relaxation <= 1:
            raise SettingError(f"relaxation must be above 0 and at most 1, but is {self.relaxation!r}.")

    @classmethod
    def from_swag(
        cls, model: nn.Module, moments: WeightMoments, *, scale: float = 0.5, steps: int = 5, relaxation: float = 1.0
    ) -> Self:
        """Use ``Sigma = scale * diag(variance)`` of SWAG-Diagonal.

        Args:
            model: The classifier with the averaged weights, as `swa_model` returns it.
            moments: Moments of the weights along the training path.
            scale: 0.5 as published.
            steps: s.
            relaxation: r.
        """
        check_not_negative("scale", scale)
        moments.check(model)
        parameters = dict(model.named_parameters())
        different = [name for name, p in parameters.items() if not torch.equal(p.detach(), moments.mean[name].to(p))]
        if different:
            raise ModelError(
                f"The posterior is around the averaged weights, but the model has others in {', '.join(different)}. "
                "Give the model that swa_model(model, moments, data) returns."
            )
        variance = {name: (scale * moments.variance[name]).to(p.detach()) for name, p in parameters.items()}
        return cls(model, DiagonalCovariance(variance), steps, relaxation)

    @classmethod
    def from_ekfac(
        cls,
        ifc: IFComp,
        *,
        damping: float | Relative | None = None,
        scale: float = 1e-4,
        steps: int = 5,
        relaxation: float = 1.0,
    ) -> Self:
        """Use ``Sigma = scale/n (F + delta)^-1``; with scale 1 this is the posterior of the Laplace approximation.

        Args:
            ifc: A predictor that was fitted at beta = 1.
            damping: delta > 0, 1e-12 for ResNets and 1e-30 for LeNet in the paper. None uses that of ``ifc``.
            scale: 1e-4 as published.
            steps: s.
            relaxation: r.
        """
        check_not_negative("scale", scale)
        if ifc.factors is None:
            raise NotFittedError("The predictor is not fitted yet: call ifc.fit(train_loader) first.")
        if ifc.beta != 1:
            raise SettingError(f"ACNML needs a fit at beta = 1, but this one is at {ifc.beta}. Fit again.")
        chosen = ifc.damping if damping is None else damping
        covariance = EkfacCovariance(ifc, chosen, scale / ifc.factors.count)
        return cls(ifc.model, covariance, steps, relaxation)

    def predict_proba(self, x: Any) -> Tensor:
        """Return the hindsight probabilities, normalised over labels, [B, K]. Cost: K (3 s + 1) forward passes."""
        hindsight = self.hindsight_proba(x)
        return hindsight / hindsight.sum(1, keepdim=True)

    def hindsight_proba(self, x: Any, labels: Sequence[int] | None = None) -> Tensor:
        """Return the probability of each label after a fit to that label, [B, K]; rows sum to more than 1.

        Args:
            x: Inputs [B, ...], or a dict of keyword inputs.
            labels: Labels to fit, the columns of the result; None fits all K.
        """
        with evaluating(self.model), torch.inference_mode(False), torch.no_grad():
            batch = on_device(self.model, nonempty_batch(x))
            classes = forward(self.model, batch.select(slice(0, 1))).shape[1]
            columns = torch.tensor(range(classes) if labels is None else labels)
            pairs = torch.cartesian_prod(torch.arange(batch.size), columns)
            parts = [self._fit(batch, part, classes) for part in pairs.split(self._pairs_at_once())]
        hindsight = torch.cat(parts).view(batch.size, len(columns))
        diverged = ~hindsight.isfinite().all(1) | (hindsight.sum(1) == 0)
        if diverged.any():
            raise NonFiniteError(
                f"Fitting the labels of example {int(diverged.nonzero()[0])} diverges. "
                "Use a smaller scale, more damping or less relaxation."
            )
        return hindsight

    def _base_weights(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.model.named_parameters() if name in self.covariance.names}

    def _pairs_at_once(self) -> int:
        pair_bytes = sum(value.numel() * value.element_size() for value in self._base_weights().values())
        return max(1, min(_MAX_PAIRS, self.memory // (_COPIES * max(pair_bytes, 1))))

    def _fit(self, batch: Batch, pairs: Tensor, classes: int) -> Tensor:
        """Return the probability of the label of every pair (example, label), [N], with the weights fitted to it."""
        base = self._base_weights()
        targets = torch.nn.functional.one_hot(pairs[:, 1], classes).to(next(iter(base.values())).device)

        def codelength(weights: Mapping[str, Tensor], inputs: Inputs, target: Tensor) -> Tensor:
            logits = example_logits(self.model, weights, inputs)
            return -(target * torch.log_softmax(logits, 0)).sum()

        def hindsight(inputs: Inputs, target: Tensor) -> Tensor:
            weights = base
            for _ in range(self.steps):
                step = self.covariance.multiply(grad(codelength)(weights, inputs, target))
                weights = {name: torch.lerp(weights[name], base[name] - step[name], self.relaxation) for name in base}
            return (target * torch.softmax(example_logits(self.model, weights, inputs).double(), 0)).sum()

        return map_examples(hindsight, batch, pairs[:, 0], targets)
