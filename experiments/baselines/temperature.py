"""Temperature scaling: one number, fitted on held-out data, that the logits are divided by."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from experiments.baselines.interface import model_logits
from ifcomp.data.batches import Batch, as_batches
from ifcomp.data.checks import check_data, check_labels
from ifcomp.errors import EmptyDataError, SettingError
from ifcomp.tasks.calibration import fitted_inverse_temperature

Logits = Callable[[Any], Tensor]


@dataclass(frozen=True)
class TemperatureScaling:
    """``softmax(f(x) / T)``.

    Attributes:
        logits: Gives logits [B, K] of inputs; a model is run in eval mode, another function as it is.
        temperature: T > 0; above 1 makes the distribution less confident. The inverse of the library's beta.
    """

    logits: nn.Module | Logits
    temperature: float

    def __post_init__(self) -> None:
        """Refuse a temperature that means nothing."""
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise SettingError(f"temperature must be a finite number above 0, but is {self.temperature!r}.")

    @classmethod
    def fit(cls, logits: nn.Module | Logits, data: Iterable[Any]) -> Self:
        """Choose the temperature with the least negative log-likelihood on held-out data, between 0.02 and 50.

        Args:
            logits: A model, or a function from inputs to logits.
            data: Batches with labels, ``(x, y)`` or dicts, that the model was not trained on.
        """
        check_data(data)
        pairs = [_logits_and_labels(logits, batch) for batch in as_batches(data)]
        if not pairs:
            raise EmptyDataError("Fitting a temperature needs at least one example, but the data is empty.")
        found, labels = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        return cls(logits, 1 / fitted_inverse_temperature(found.cpu(), labels.cpu()))

    def predict_proba(self, x: Any) -> Tensor:
        """``softmax(f(x) / T)``, [B, K]."""
        return torch.softmax(_logits(self.logits, x) / self.temperature, 1)


def _logits(logits: nn.Module | Logits, x: Any) -> Tensor:
    if isinstance(logits, nn.Module):
        return model_logits(logits, x)
    return logits(x).detach().double()


def _logits_and_labels(logits: nn.Module | Logits, batch: Batch) -> tuple[Tensor, Tensor]:
    x = batch.kwargs if batch.kwargs else batch.args[0]
    found = _logits(logits, x)
    return found, check_labels(batch, found.shape[1]).to(found.device)
