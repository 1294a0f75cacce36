"""The ensemble against a mean written out by hand."""

import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from experiments.baselines.ensemble import DeepEnsemble
from ifcomp.errors import LogitsError, SettingError


def constant(*logits: float) -> nn.Module:
    """A model with the same logits everywhere."""
    layer = nn.Linear(1, len(logits))
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.copy_(torch.tensor(logits))
    return layer


def test_is_the_mean_of_probabilities_not_of_logits() -> None:
    ensemble = DeepEnsemble([constant(0.0, math.log(3)), constant(math.log(9), 0.0), constant(0.0, 0.0)])
    first = (1 / 4 + 9 / 10 + 1 / 2) / 3
    assert_close(ensemble.predict_proba(torch.zeros(2, 1)), torch.tensor([[first, 1 - first]] * 2).double())


def test_one_member_is_the_plain_softmax() -> None:
    assert_close(DeepEnsemble([constant(0.0, math.log(3))]).predict_proba(torch.zeros(1, 1)).tolist(), [[0.25, 0.75]])


def test_members_are_in_eval_mode() -> None:
    noisy = nn.Sequential(constant(1.0, 2.0), nn.Dropout(0.5))
    assert_close(
        DeepEnsemble([noisy]).predict_proba(torch.zeros(3, 1)),
        torch.softmax(torch.tensor([[1.0, 2.0]] * 3).double(), 1),
    )


def test_refuses_nothing_and_members_that_do_not_match() -> None:
    with pytest.raises(SettingError):
        DeepEnsemble([])
    with pytest.raises(SettingError):
        DeepEnsemble(constant(0.0, 1.0))  # type: ignore[arg-type]
    with pytest.raises(LogitsError, match="different numbers"):
        DeepEnsemble([constant(0.0, 1.0), constant(0.0, 1.0, 2.0)]).predict_proba(torch.zeros(1, 1))
