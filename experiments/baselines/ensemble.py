"""Deep ensemble: the mean over models trained from different seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from experiments.baselines.inference import model_logits
from ifcomp.errors import LogitsError, SettingError


@dataclass(frozen=True)
class DeepEnsemble:
    """``1/m sum_i softmax(f_i(x))`` over m members.

    Attributes:
        members: Trained models over the same labels; 30 in the paper.
    """

    members: Sequence[nn.Module]

    def __post_init__(self) -> None:
        """Raise SettingError if there are no members."""
        if isinstance(self.members, nn.Module) or not self.members:
            raise SettingError(f"members must be a list of at least one model, but is {self.members!r}.")

    def predict_proba(self, x: Any) -> Tensor:
        """Return the mean probabilities, [B, K]. Cost: m forward passes."""
        logits = [model_logits(member, x) for member in self.members]
        classes = [values.shape[1] for values in logits]
        if len(set(classes)) > 1:
            raise LogitsError(f"The members have different numbers of logits: {classes}.")
        return torch.stack([torch.softmax(values, 1) for values in logits]).mean(0)
