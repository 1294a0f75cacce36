"""EL2N against its definition, by hand."""

import math

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from torch import Tensor, nn

from experiments.baselines.el2n import el2n
from ifcomp.errors import DataError, EmptyDataError, LabelError, SettingError

PROBABILITIES = torch.tensor([[0.7, 0.2, 0.1], [0.25, 0.25, 0.5], [0.9, 0.06, 0.04]])
LABELS = torch.tensor([0, 1, 2])
DATA = [(PROBABILITIES[:2].log(), LABELS[:2]), (PROBABILITIES[2:].log(), LABELS[2:])]


class Scaled(nn.Module):
    """Logits are the inputs times a number, with dropout that must be off."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(scale))
        self.dropout = nn.Dropout(0.9)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x) * self.scale


def test_el2n_is_the_norm_of_the_error() -> None:
    expected = np.sqrt([0.3**2 + 0.2**2 + 0.1**2, 0.25**2 + 0.75**2 + 0.5**2, 0.9**2 + 0.06**2 + 0.96**2])
    assert_allclose(el2n(Scaled(), DATA), expected, rtol=1e-6)


def test_el2n_is_averaged_over_networks() -> None:
    p = torch.softmax(2 * PROBABILITIES.double().log(), 1).numpy()
    sharper = np.linalg.norm(p - np.eye(3)[LABELS], axis=1)
    assert_allclose(el2n([Scaled(), Scaled(2.0)], DATA), (el2n(Scaled(), DATA) + sharper) / 2, rtol=1e-6)


def test_errors_of_confident_predictions_are_still_ordered() -> None:
    """``1 - p`` of 1e-9 and 1e-12, both far below float32."""
    logits = torch.tensor([[math.log(1e-9), 0.0], [math.log(1e-12), 0.0]])
    norms = el2n(Scaled(), [(logits, torch.tensor([1, 1]))])
    assert_allclose(norms, [math.sqrt(2) * 1e-9, math.sqrt(2) * 1e-12], rtol=1e-6)


def test_the_model_keeps_its_mode() -> None:
    model = Scaled().train()
    el2n(model, DATA)
    assert model.training
    assert model.dropout.training


def test_bad_data_is_refused() -> None:
    x, y = DATA[0]
    with pytest.raises(EmptyDataError, match="no example"):
        el2n(Scaled(), [])
    with pytest.raises(LabelError, match="labels are needed"):
        el2n(Scaled(), [x])
    with pytest.raises(LabelError, match="outside"):
        el2n(Scaled(), [(x, y + 2)])
    with pytest.raises(SettingError, match="At least one network"):
        el2n([], DATA)
    with pytest.raises(DataError, match="iterator"):
        el2n([Scaled(), Scaled()], iter(DATA))
