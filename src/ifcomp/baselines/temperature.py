"""Temperature scaling: one number, fitted on held-out data, that the logits are divided by."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.special import softmax
from torch import Tensor, nn

from ifcomp.baselines.interface import model_logits
from ifcomp.batches import Batch, as_batches, check_data, check_labels
from ifcomp.errors import DataError, EmptyDataError, LabelError, SettingError

Logits = Callable[[Any], Tensor]

#: Inverse temperatures over the spread of the logits: beyond it every probability is 0 or 1, or all are equal.
_RANGE = (1e-6, 1e6)


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
        """Choose the temperature with the least negative log-likelihood on held-out data.

        Args:
            logits: A model, or a function from inputs to logits.
            data: Batches with labels, ``(x, y)`` or dicts, that the model was not trained on.
        """
        check_data(data)
        pairs = [_logits_and_labels(logits, batch) for batch in as_batches(data)]
        if not pairs:
            raise EmptyDataError("Fitting a temperature needs at least one example, but the data is empty.")
        found, labels = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        return cls(logits, fit_temperature(found, labels))

    def predict_proba(self, x: Any) -> Tensor:
        """``softmax(f(x) / T)``, [B, K]."""
        return torch.softmax(_logits(self.logits, x) / self.temperature, 1)


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """The T that minimises the mean of ``-log softmax(f / T)_y``.

    The objective is convex in ``1/T``; its derivative, the mean of ``E_p[f] - f_y``, grows from below to above zero,
    and its root is found by bracketing.

    Args:
        logits: f, [N, K].
        labels: y, [N].

    Raises:
        DataError: If no temperature is best: the labels do not go with the logits at all (the best is infinite), or
            every label has the largest logit (the best is zero).
    """
    values, truth = logits.detach().double().cpu().numpy(), labels.cpu().numpy()
    if values.ndim != 2 or truth.shape != values.shape[:1]:
        raise LabelError(f"Logits [N, K] and labels [N] are needed, but have {values.shape} and {truth.shape}.")
    values = values - values.mean(1, keepdims=True)
    scale = float(np.abs(values).max()) or 1.0
    own = values[np.arange(len(truth)), truth]

    def slope(log_beta: float) -> float:
        return float(((softmax(math.exp(log_beta) * values, axis=1) * values).sum(1) - own).mean() / scale)

    low, high = (math.log(bound / scale) for bound in _RANGE)
    if slope(low) >= 0:
        raise DataError(
            "No temperature fits: the labels' logits are not above average, so uniform probabilities are best. "
            "Check that labels and logits are in the same order."
        )
    if slope(high) <= 0:
        raise DataError(
            "No temperature fits: every held-out label has the largest logit, so the best temperature is zero. "
            "Give more held-out data, with some errors among the predictions."
        )
    return math.exp(-brentq(slope, low, high, xtol=1e-13, rtol=1e-13))


def _logits(logits: nn.Module | Logits, x: Any) -> Tensor:
    if isinstance(logits, nn.Module):
        return model_logits(logits, x)
    return logits(x).detach().double()


def _logits_and_labels(logits: nn.Module | Logits, batch: Batch) -> tuple[Tensor, Tensor]:
    x = batch.kwargs if batch.kwargs else batch.args[0]
    found = _logits(logits, x)
    return found, check_labels(batch, found.shape[1]).to(found.device)
