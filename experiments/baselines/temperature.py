"""Temperature scaling: ``softmax(f(x) / T)``, with T fitted on held-out data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from experiments.baselines.inference import model_logits, run_data
from experiments.baselines.interface import check_positive
from ifcomp.tasks.simple_scores import fit_temperature


@dataclass(frozen=True)
class TemperatureScaling:
    """``softmax(f(x) / T)``; T = 1 is the softmax of the model.

    Attributes:
        model: The classifier; it is run in eval mode.
        temperature: T > 0; above 1 makes predictions less confident. The inverse of the library's beta.
    """

    model: nn.Module
    temperature: float

    def __post_init__(self) -> None:
        """Raise SettingError if the temperature is not above 0."""
        check_positive("temperature", self.temperature)

    @classmethod
    def fit(cls, model: nn.Module, data: Iterable[Any]) -> Self:
        """Fit the temperature by negative log-likelihood, see `fit_temperature`.

        Args:
            model: The classifier.
            data: Batches with labels, ``(x, y)`` or dicts, that the model was not trained on.
        """
        outputs = run_data(model, data, progress=False)
        assert outputs.labels is not None
        return cls(model, fit_temperature(outputs.logits, outputs.labels))

    def predict_proba(self, x: Any) -> Tensor:
        """Return ``softmax(f(x) / T)``, [B, K]. Cost: one forward pass."""
        return torch.softmax(model_logits(self.model, x) / self.temperature, 1)
