"""SWA and SWAG-Diagonal: a Gaussian around the mean of the weights that training went through.

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
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import update_bn

from experiments.baselines.interface import check_count, checked_batch, copied, derived_seed
from ifcomp.data.batches import Batch, as_batches
from ifcomp.data.checks import check_data
from ifcomp.errors import DataError, ModelError, NotFittedError, StorageError
from ifcomp.io.files import atomic_write
from ifcomp.io.untrusted import parse_json, read_safetensors
from ifcomp.layers.forward import evaluating, run_model
from ifcomp.progress import track

_KEY = "ifcomp.swag"
_PARTS = ("mean/", "variance/")


@dataclass(frozen=True, eq=False)
class WeightMoments:
    """Running mean and variance of every parameter, in float64 on the CPU: plain data.

    Attributes:
        count: How many sets of weights were collected.
        mean: The SWA weights by parameter name.
        variance: ``mean of squares - square of mean``, updated so that nothing cancels.
    """

    count: int = 0
    mean: Mapping[str, Tensor] = field(default_factory=dict)
    variance: Mapping[str, Tensor] = field(default_factory=dict)

    def collect(self, model: nn.Module) -> WeightMoments:
        """The moments with the model's present weights among them."""
        weights = {name: value.detach().double().cpu() for name, value in model.named_parameters()}
        if not self.count:
            return WeightMoments(
                1,
                {name: value.clone() for name, value in weights.items()},
                {name: torch.zeros_like(value) for name, value in weights.items()},
            )
        self.check(model)
        count = self.count + 1
        mean = {name: old + (weights[name] - old) / count for name, old in self.mean.items()}
        variance = {
            name: (old * self.count + (weights[name] - self.mean[name]) * (weights[name] - mean[name])) / count
            for name, old in self.variance.items()
        }
        return WeightMoments(count, mean, variance)

    def sample(self, seed: int) -> dict[str, Tensor]:
        """Weights from ``N(mean, diag(variance))``, float64."""
        generator = torch.Generator("cpu").manual_seed(seed)

        def draw(like: Tensor) -> Tensor:
            return torch.randn(like.shape, dtype=like.dtype, generator=generator, device="cpu").to(like.device)

        return {name: mean + self.variance[name].sqrt() * draw(mean) for name, mean in self.mean.items()}

    def check(self, model: nn.Module) -> None:
        """Raise if there are no moments yet, or if they are not of this model's parameters."""
        if not self.count:
            raise NotFittedError("No weights are collected yet: call moments = moments.collect(model) while training.")
        found = {name: value.shape for name, value in model.named_parameters()}
        known = {name: value.shape for name, value in self.mean.items()}
        wrong = sorted(name for name in found.keys() | known.keys() if found.get(name) != known.get(name))
        if wrong:
            raise ModelError(
                f"The moments are of another model: {', '.join(wrong)} are missing or of another shape. "
                "Collect and use one kind of model."
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to one safetensors file, atomically."""
        moments = zip(_PARTS, (self.mean, self.variance), strict=True)
        tensors = {part + name: value.contiguous() for part, values in moments for name, value in values.items()}
        with atomic_write(path) as scratch:
            save_file(tensors, scratch, metadata={_KEY: json.dumps({"count": self.count})})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file that `save` wrote."""
        try:
            tensors, metadata = read_safetensors(path)
            count = parse_json(metadata[_KEY])["count"]
            mean, variance = (
                {name[len(part) :]: value for name, value in tensors.items() if name.startswith(part)}
                for part in _PARTS
            )
            if not isinstance(count, int) or isinstance(count, bool) or count < 0:
                raise ValueError(f"its count is {count!r}")
            if {name: value.shape for name, value in mean.items()} != {n: v.shape for n, v in variance.items()}:
                raise ValueError("its means and variances are of different parameters")
            if not all(value.dtype == torch.float64 and bool(value.isfinite().all()) for value in tensors.values()):
                raise ValueError("it has entries that are not finite numbers in float64")
            if not all(bool((value >= 0).all()) for value in variance.values()):
                raise ValueError("it has negative variances")
        except (OSError, KeyError, ValueError, TypeError) as error:
            raise StorageError(
                f"Cannot read moments from '{path}': it is missing, damaged or not a file of weight moments ({error})."
            ) from error
        return cls(count, mean, variance)


def swa_model(model: nn.Module, moments: WeightMoments, data: Iterable[Any] | None = None) -> nn.Module:
    """A copy of the model with the averaged weights, in eval mode.

    Args:
        model: The architecture; not changed.
        moments: What was collected.
        data: Training data for the statistics of BatchNorm; needed where there is any.
    """
    _check(model, moments, data)
    return _with_weights(model, moments.mean, data, seed=0)


class Swag:
    """SWAG-Diagonal: mean of ``softmax(f(x))`` over m draws from ``N(mean, diag(variance))`` of the weights."""

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
        """Find the statistics of BatchNorm for every draw: as many passes over the data.

        Args:
            model: The architecture; not changed.
            moments: What was collected.
            data: Training data for the statistics of BatchNorm; needed where there is any.
            samples: m, 30 in the paper.
            seed: Of the draws.
            progress: Show a progress bar; None shows it on terminals.
        """
        check_count("samples", samples)
        _check(model, moments, data)
        self.model, self.moments = model, moments
        self.seeds = [derived_seed(seed, index) for index in range(samples)]
        self._statistics = [
            _statistics(_with_weights(model, moments.sample(seed), data, seed))
            for seed in track(self.seeds, "statistics of samples", progress)
        ]

    def predict_proba(self, x: Any) -> Tensor:
        """Mean probabilities [B, K]. Cost: m forward passes."""
        batch = checked_batch(self.model, x)
        with evaluating(self.model), torch.no_grad():
            samples = [self._sample(batch, *drawn) for drawn in zip(self.seeds, self._statistics, strict=True)]
        return torch.stack(samples).mean(0)

    def _sample(self, batch: Batch, seed: int, statistics: Mapping[str, Tensor]) -> Tensor:
        tensors = {**_like(self.model, self.moments.sample(seed)), **statistics}
        return torch.softmax(run_model(_Replaced(self.model, tensors), copied(batch)).double(), 1)


class _Replaced(nn.Module):
    """A model with some of its tensors replaced, the model itself unchanged."""

    def __init__(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.model, self.tensors = model, dict(tensors)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return functional_call(self.model, self.tensors, args, kwargs)


class _OnBatches(nn.Module):
    """A model that takes a whole `Batch`, so that ``update_bn`` can run it on any inputs."""

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
            "The model has BatchNorm, whose statistics belong to the weights: give the training data with data=."
        )


def _like(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights in the types and on the devices of the model's parameters."""
    return {name: weights[name].to(value) for name, value in model.named_parameters()}


def _with_weights(model: nn.Module, weights: Mapping[str, Tensor], data: Iterable[Any] | None, seed: int) -> nn.Module:
    """A copy of the model with other weights and, in eval mode, the statistics of BatchNorm that go with them."""
    made = copy.deepcopy(model)
    with torch.no_grad(), torch.random.fork_rng():
        for name, value in _like(model, weights).items():
            made.get_parameter(name).copy_(value)
        torch.manual_seed(seed)  # of dropout, which is active while statistics are gathered
        if data is not None:
            update_bn(as_batches(data), _OnBatches(made), next(made.parameters()).device)
    return made.eval()


def _statistics(model: nn.Module) -> dict[str, Tensor]:
    """The buffers of BatchNorm by full name."""
    return {
        f"{prefix}.{name}" if prefix else name: value
        for prefix, module in model.named_modules()
        if isinstance(module, _BatchNorm)
        for name, value in module.named_buffers(recurse=False)
    }
