"""The adapter of laplace-torch against a last-layer Laplace approximation written out in numpy."""

import math
import sys

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor, nn
from torch.testing import assert_close

from experiments.baselines.laplace import LastLayerLaplace
from ifcomp.errors import DataError, EmptyDataError, LabelError, MissingPackageError, ModelError, SettingError


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 3)).double()


def batches(size: int = 8) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(30, 3, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (30,), generator=generator)
    return list(zip(x.split(size), y.split(size), strict=True))


class ByHand:
    """Kronecker-factored Laplace of a last layer, weight and bias apart, with a probit link."""

    def __init__(self, model: nn.Sequential, x: Tensor, y: Tensor) -> None:
        model = model.eval()
        self.model, self.count = model, len(x)
        features = model[:-1](x).detach().numpy()
        p = torch.softmax(model(x), 1).detach().numpy()
        self.log_likelihood = np.log(p[np.arange(len(y)), y.numpy()]).sum()
        outputs = sum(np.diag(row) - np.outer(row, row) for row in p)  # summed, where inputs are averaged
        inputs = features.T @ features / len(x)
        self.hessians = [np.kron(outputs, inputs), outputs]
        weights = [model[-1].weight, model[-1].bias]
        self.squares = sum(float(value.detach().square().sum()) for value in weights)

    def covariances(self, precision: float) -> list[np.ndarray]:
        return [np.linalg.inv(hessian + precision * np.eye(len(hessian))) for hessian in self.hessians]

    def log_evidence(self, precision: float) -> float:
        size = sum(len(hessian) for hessian in self.hessians)
        determinants = sum(np.linalg.slogdet(h + precision * np.eye(len(h)))[1] for h in self.hessians)
        return self.log_likelihood - 0.5 * (precision * self.squares + determinants - size * math.log(precision))

    def predict(self, x: Tensor, precision: float) -> Tensor:
        features, logits = self.model[:-1](x).detach().numpy(), self.model(x).detach()
        of_weight, of_bias = self.covariances(precision)
        rows = []
        for feature, mean in zip(features, logits, strict=True):
            jacobian = np.kron(np.eye(3), feature)
            variance = np.diag(jacobian @ of_weight @ jacobian.T + of_bias)
            rows.append(torch.softmax(mean / torch.tensor(1 + math.pi / 8 * variance).sqrt(), 0))
        return torch.stack(rows)


def by_hand() -> ByHand:
    data = batches()
    return ByHand(network(), torch.cat([x for x, _ in data]), torch.cat([y for _, y in data]))


@pytest.mark.parametrize("size", [8, 30])
def test_is_the_predictive_written_out_by_hand(size: int) -> None:
    x = torch.randn(5, 3).double()
    found = LastLayerLaplace(network(), batches(size), prior_precision=0.7).predict_proba(x)
    assert_close(found, by_hand().predict(x, 0.7), rtol=1e-8, atol=0)


def test_prior_precision_maximises_the_evidence() -> None:
    oracle = by_hand()
    best = minimize_scalar(lambda log: -oracle.log_evidence(math.exp(log)), bounds=(-7, 7), method="bounded").x
    found = LastLayerLaplace(network(), batches())
    assert math.log(found.prior_precision) == pytest.approx(best, abs=0.05)  # 100 steps of Adam from 1
    x = torch.randn(4, 3).double()
    assert_close(found.predict_proba(x), oracle.predict(x, found.prior_precision), rtol=1e-8, atol=0)


def test_dicts_of_keyword_inputs() -> None:
    class Keyed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, values: Tensor, shift: Tensor) -> Tensor:
            return self.inner(values + shift)

    x, zero = torch.randn(4, 3).double(), torch.zeros(8, 1).double()
    data = [{"values": x, "shift": zero[: len(x)], "labels": y} for x, y in batches()]
    found = LastLayerLaplace(Keyed(), data, prior_precision=2.0).predict_proba({"values": x, "shift": zero[:4]})
    assert_close(found, by_hand().predict(x, 2.0), rtol=1e-8, atol=0)


def test_refuses_what_it_cannot_use() -> None:
    model, convolution = network(), nn.Sequential(nn.Conv1d(1, 3, 3), nn.Flatten()).double()
    with pytest.raises(ModelError, match="linear last layer"):
        LastLayerLaplace(convolution, [(torch.randn(4, 1, 3).double(), torch.zeros(4).long())])
    with pytest.raises(LabelError):
        LastLayerLaplace(model, [x for x, _ in batches()])
    with pytest.raises(EmptyDataError):
        LastLayerLaplace(model, [])
    with pytest.raises(SettingError, match="prior_precision"):
        LastLayerLaplace(model, batches(), prior_precision=0.0)
    with pytest.raises(DataError, match="iterator"):
        LastLayerLaplace(model, iter(batches()))


def test_says_how_to_install_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "laplace", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'ifcomp\[laplace\]'"):
        LastLayerLaplace(network(), batches())
