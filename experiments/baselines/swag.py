"""SWA and SWAG-Diagonal: a Gaussian around the mean of the weights along the training path.

Collect the weights at the end of each epoch of the averaging phase, at a constant learning rate::

    moments = WeightMoments()
    for epoch in range(epochs):
        ...
        moments = moments.collect(model)
    swa = swa_model(model, moments, train_loader)  # SWA, an ordinary model
    swag = Swag(model, moments, train_loader)  # SWAG-Diagonal
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import update_bn

from experiments.baselines.inference import forward, nonempty_batch
from experiments.baselines.interface import check_count, derived_seed
from ifcomp.data.batches import Batch, as_batches
from ifcomp.data.checks import check_data
from ifcomp.errors import DataError, ModelError, NotFittedError
from ifcomp.layers.forward import evaluating, run_model
from ifcomp.progress import track


@dataclass(frozen=True, eq=False)
class WeightMoments:
    """Running mean and variance of every parameter, in float64 on the CPU.

    Attributes:
        count: Number of collected sets of weights.
        mean: The SWA weights by parameter name.
        variance: Mean of squared deviations from the mean, by parameter name.
    """

    count: int = 0
    mean: Mapping[str, Tensor] = field(default_factory=dict)
    variance: Mapping[str, Tensor] = field(default_factory=dict)

    def collect(self, model: nn.Module) -> WeightMoments:
        """Return the moments updated with the model's current weights (Welford's algorithm)."""
        weights = {name: value.detach().double().cpu() for name, value in model.named_parameters()}
        if not self.count:
            mean = {name: value.clone() for name, value in weights.items()}
            return WeightMoments(1, mean, {name: torch.zeros_like(value) for name, value in weights.items()})
        self.check(model)
        count = self.count + 1
        mean = {name: old + (weights[name] - old) / count for name, old in self.mean.items()}
        variance = {
            name: (old * self.count + (weights[name] - self.mean[name]) * (weights[name] - mean[name])) / count
            for name, old in self.variance.items()
        }
        return WeightMoments(count, mean, variance)

    def sample(self, seed: int) -> dict[str, Tensor]:
        """Draw weights from ``N(mean, diag(variance))``, in float64."""
        generator = torch.Generator("cpu").manual_seed(seed)
        return {
            name: mean + self.variance[name].sqrt() * torch.randn(mean.shape, dtype=mean.dtype, generator=generator)
            for name, mean in self.mean.items()
        }

    def check(self, model: nn.Module) -> None:
        """Raise NotFittedError if there are no moments yet, ModelError if they belong to other parameters."""
        if not self.count:
            raise NotFittedError("No weights are collected yet: call moments = moments.collect(model) while training.")
        shapes = {name: value.shape for name, value in model.named_parameters()}
        collected = {name: value.shape for name, value in self.mean.items()}
        names = shapes.keys() | collected.keys()
        different = sorted(name for name in names if shapes.get(name) != collected.get(name))
        if different:
            raise ModelError(
                f"The moments belong to another model: {', '.join(different)} are missing or have another shape. "
                "Collect and use one architecture."
            )


def swa_model(model: nn.Module, moments: WeightMoments, data: Iterable[Any] | None = None) -> nn.Module:
    """Return a copy of the model with the averaged weights, in eval mode.

    Args:
        model: The architecture; not modified.
        moments: Moments of the weights.
        data: Training data for the running statistics of BatchNorm; required if the model has BatchNorm.
    """
    _check(model, moments, data)
    return _with_weights(model, moments.mean, data, seed=0)


class Swag:
    """SWAG-Diagonal: ``1/m sum_i softmax(f(x; theta_i))`` with m draws ``theta_i ~ N(mean, diag(variance))``."""

    def __init__(
        self,
        model: nn.Module,
        moments: WeightMoments,
        data: Iterable[Any] | None = None,
        *,
        samples: int = 30,
        seed: int = 0,
        progress: bool | None = None,
    ) -> None:
        """Compute the running statistics of BatchNorm for every draw. Cost: m passes over the data.

        Args:
            model: The architecture; not modified.
            moments: Moments of the weights.
            data: Training data for the running statistics of BatchNorm; required if the model has BatchNorm.
            samples: m, 30 in the paper.
            seed: Seed of the draws.
            progress: Show a progress bar; None shows it on terminals.
        """
        check_count("samples", samples)
        _check(model, moments, data)
        self.model, self.moments = model, moments
        self.seeds = [derived_seed(seed, index) for index in range(samples)]
        self._statistics = [
            _statistics(_with_weights(model, moments.sample(draw), data, draw))
            for draw in track(self.seeds, "statistics of samples", progress)
        ]

    def predict_proba(self, x: Any) -> Tensor:
        """Return the mean probabilities, [B, K]. Cost: m forward passes."""
        batch = nonempty_batch(x)
        draws = zip(self.seeds, self._statistics, strict=True)
        with evaluating(self.model), torch.no_grad():
            samples = [self._sample(batch, seed, statistics) for seed, statistics in draws]
        return torch.stack(samples).mean(0)

    def _sample(self, batch: Batch, seed: int, statistics: Mapping[str, Tensor]) -> Tensor:
        """Return the probabilities [B, K] with the weights of one draw."""
        tensors = {**_like(self.model, self.moments.sample(seed)), **statistics}
        return torch.softmax(forward(_Replaced(self.model, tensors), batch).double(), 1)


class _Replaced(nn.Module):
    """A model with replaced parameters and buffers. The model itself is not modified."""

    def __init__(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.model, self.tensors = model, dict(tensors)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return functional_call(self.model, self.tensors, args, kwargs)


class _OnBatches(nn.Module):
    """A model that takes a `Batch`, so that ``update_bn`` can run it on any inputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> Tensor:
        return run_model(self.model, batch)


def _check(model: nn.Module, moments: WeightMoments, data: Iterable[Any] | None) -> None:
    moments.check(model)
    if data is not None:
        check_data(data)
    elif any(isinstance(module, _BatchNorm) for module in model.modules()):
        raise DataError(
            "The model has BatchNorm, whose statistics depend on the weights: give the training data with data=."
        )


def _like(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights in the dtypes and on the devices of the model's parameters."""
    return {name: weights[name].to(value) for name, value in model.named_parameters()}


def _with_weights(model: nn.Module, weights: Mapping[str, Tensor], data: Iterable[Any] | None, seed: int) -> nn.Module:
    """Return a copy of the model with other weights and their BatchNorm statistics, in eval mode."""
    replaced = copy.deepcopy(model)
    with torch.no_grad(), torch.random.fork_rng():
        for name, value in _like(model, weights).items():
            replaced.get_parameter(name).copy_(value)
        torch.manual_seed(seed)  # of dropout, which is active while statistics are computed
        if data is not None:
            update_bn(as_batches(data), _OnBatches(replaced), next(replaced.parameters()).device)
    return replaced.eval()


def _statistics(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of BatchNorm by full name."""
    return {
        f"{prefix}.{name}" if prefix else name: value
        for prefix, module in model.named_modules()
        if isinstance(module, _BatchNorm)
        for name, value in module.named_buffers(recurse=False)
    }
