"""Confident learning against its definitions, and cross-validation against scikit-learn."""

import sys

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, cross_val_predict
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from experiments.baselines.confident import (
    in_sample_probabilities,
    label_suspicion,
    out_of_sample_probabilities,
)
from ifcomp.errors import DataError, LabelError, MissingPackageError, ModelError, SettingError

PROBABILITIES = np.array([[0.7, 0.2, 0.1], [0.3, 0.2, 0.5], [0.9, 0.06, 0.04]])
LABELS = np.array([0, 1, 2])


def test_self_confidence_is_the_probability_of_the_label() -> None:
    assert_allclose(label_suspicion(LABELS, PROBABILITIES), [-0.7, -0.2, -0.04])


def test_normalized_margin() -> None:
    margins = np.array([0.7 - 0.2, 0.2 - 0.5, 0.04 - 0.9])
    assert_allclose(label_suspicion(LABELS, PROBABILITIES, "normalized_margin"), -(margins + 1) / 2)


def test_confidence_weighted_entropy() -> None:
    entropy = -(PROBABILITIES * np.log(PROBABILITIES)).sum(1) / np.log(3)
    u = entropy / np.array([0.7, 0.2, 0.04])
    assert_allclose(label_suspicion(LABELS, PROBABILITIES, "confidence_weighted_entropy"), -np.log(1 + u) / u)


class LogisticModel(nn.Module):
    """The classifier that scikit-learn fits."""

    def __init__(self, fitted: LogisticRegression) -> None:
        super().__init__()
        self.linear = nn.Linear(*reversed(fitted.coef_.shape)).double()
        self.linear.weight.data = torch.tensor(fitted.coef_)
        self.linear.bias.data = torch.tensor(fitted.intercept_)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def blobs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(60) % 3
    return torch.randn(60, 2, dtype=torch.float64, generator=generator) + 2 * torch.eye(3, 2)[y], y


def tensors(data: Dataset) -> tuple[Tensor, Tensor]:
    x, y = zip(*(data[i] for i in range(len(data))), strict=True)
    return torch.stack(x), torch.stack(y)


def fit(data: Dataset, seed: int) -> nn.Module:
    x, y = tensors(data)
    return LogisticModel(LogisticRegression().fit(x.numpy(), y.numpy()))


def test_out_of_sample_probabilities_are_those_of_scikit_learn() -> None:
    x, y = blobs()
    probabilities = out_of_sample_probabilities(fit, TensorDataset(x, y), folds=4, seed=3, batch_size=7)
    parts = StratifiedKFold(4, shuffle=True, random_state=3)
    expected = cross_val_predict(LogisticRegression(), x.numpy(), y.numpy(), cv=parts, method="predict_proba")
    assert_allclose(probabilities, expected, rtol=1e-9)


def test_seeds_of_the_training_runs() -> None:
    seeds = []

    def train(data: Dataset, seed: int) -> nn.Module:
        seeds.append((seed, len(data)))
        return fit(data, seed)

    out_of_sample_probabilities(train, TensorDataset(*blobs()), folds=3, seed=10)
    assert seeds == [(10, 40), (11, 40), (12, 40)]


def test_in_sample_probabilities() -> None:
    x, y = blobs()
    reference = LogisticRegression().fit(x.numpy(), y.numpy())
    probabilities = in_sample_probabilities(LogisticModel(reference), [(x[:50], y[:50]), (x[50:],)])
    assert_allclose(probabilities, reference.predict_proba(x.numpy()), rtol=1e-9)


def test_bad_data_is_refused() -> None:
    x, y = blobs()
    with pytest.raises(SettingError, match="at most 20"):
        out_of_sample_probabilities(fit, TensorDataset(x, y), folds=21)
    with pytest.raises(SettingError, match="at least 2"):
        out_of_sample_probabilities(fit, TensorDataset(x, y), folds=1)
    with pytest.raises(DataError, match="TensorDataset"):
        out_of_sample_probabilities(fit, TensorDataset(x))
    with pytest.raises(LabelError, match="integers"):
        out_of_sample_probabilities(fit, TensorDataset(x, y.float()))


def test_models_must_know_all_classes() -> None:
    models = iter([nn.Linear(2, 3).double(), nn.Linear(2, 4).double()])
    with pytest.raises(ModelError, match="fold 1 has 4 logits"):
        out_of_sample_probabilities(lambda *_: next(models), TensorDataset(*blobs()), folds=2)


def test_without_cleanlab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cleanlab.rank", None)
    with pytest.raises(MissingPackageError, match=r"ifcomp\[cleanlab\]"):
        label_suspicion(LABELS, PROBABILITIES)
