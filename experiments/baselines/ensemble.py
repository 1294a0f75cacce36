"""Deep ensemble: the mean over models that were trained from different seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from experiments.baselines.interface import model_logits
from ifcomp.errors import LogitsError, SettingError


@dataclass(frozen=True)
class DeepEnsemble:
    """Mean of the members' ``softmax(f(x))``; with one member the plain softmax of a model.

    Attributes:
        members: Trained models over the same labels; 30 in the paper.
    """

    members: Sequence[nn.Module]

    def __post_init__(self) -> None:
        """Refuse an ensemble of nothing."""
        if isinstance(self.members, nn.Module) or not self.members:
            raise SettingError(f"members must be a list of at least one model, but is {self.members!r}.")

    def predict_proba(self, x: Any) -> Tensor:
        """Mean probabilities [B, K]. Cost: a forward pass for each member."""
        logits = [model_logits(member, x) for member in self.members]
        if len({found.shape for found in logits}) > 1:
            raise LogitsError(f"The members have different numbers of logits: {[found.shape[1] for found in logits]}.")
        return torch.stack([torch.softmax(found, 1) for found in logits]).mean(0)
