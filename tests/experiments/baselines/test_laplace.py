"""The adapter of laplace-torch against a Laplace approximation written out in numpy; its covariances against ours."""

import copy
import math
import sys
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close

from experiments.baselines.laplace import LastLayerLaplace
from ifcomp import IFComp
from ifcomp.curvature.factors import Basis, BlockFactors
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
    probability = LastLayerLaplace(network(), batches(size), prior_precision=0.7).predict_proba(x)
    assert_close(probability, by_hand().predict(x, 0.7), rtol=1e-8, atol=0)


def test_prior_precision_maximises_the_evidence() -> None:
    oracle = by_hand()
    best = minimize_scalar(lambda log: -oracle.log_evidence(math.exp(log)), bounds=(-7, 7), method="bounded").x
    laplace = LastLayerLaplace(network(), batches())
    assert math.log(laplace.prior_precision) == pytest.approx(best, abs=0.05)  # 100 steps of Adam from 1
    x = torch.randn(4, 3).double()
    assert_close(laplace.predict_proba(x), oracle.predict(x, laplace.prior_precision), rtol=1e-8, atol=0)


def test_dicts_of_keyword_inputs() -> None:
    class Keyed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, values: Tensor, shift: Tensor) -> Tensor:
            return self.inner(values + shift)

    x, zero = torch.randn(4, 3).double(), torch.zeros(8, 1).double()
    data = [{"values": x, "shift": zero[: len(x)], "labels": y} for x, y in batches()]
    probability = LastLayerLaplace(Keyed(), data, prior_precision=2.0).predict_proba({"values": x, "shift": zero[:4]})
    assert_close(probability, by_hand().predict(x, 2.0), rtol=1e-8, atol=0)


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


# The logit kernel of IFComp -----------------------------------------------------------------------------------------


class DiagonalLinear(nn.Linear):
    """A Linear by another function; `IFComp` gives it diagonal curvature."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,oi->bo", x, self.weight) + self.bias


class DiagonalConv(nn.Conv2d):
    """A convolution by products with patches."""

    def forward(self, x: Tensor) -> Tensor:
        output = self.weight.flatten(1) @ functional.unfold(x, self.kernel_size) + self.bias.unsqueeze(1)
        return output.unflatten(2, [size - 1 for size in x.shape[2:]])  # the kernel is 2 x 2


def images(size: int, seed: int) -> Tensor:
    return torch.randn(size, 2, 4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def convolutional(conv: type[nn.Conv2d], linear: type[nn.Linear], bias: bool) -> nn.Module:
    torch.manual_seed(0)
    layers = [conv(2, 3, 2, bias=bias), nn.Tanh(), conv(3, 3, 2, bias=bias), nn.Tanh(), nn.Flatten()]
    return nn.Sequential(*layers, linear(12, 5, bias=bias), nn.Tanh(), linear(5, 3, bias=bias)).double()


def whole_network(model: nn.Module, x: Tensor, structure: str, precision: float) -> Any:
    """laplace-torch over all weights of a copy of the model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from laplace import Laplace

        posterior = Laplace(
            copy.deepcopy(model),
            "classification",
            subset_of_weights="all",
            hessian_structure=structure,
            prior_precision=precision,
        )
        data = torch.utils.data.TensorDataset(x, torch.zeros(len(x)).long())
        torch.set_default_dtype(torch.float64)  # it makes identity matrices in the default dtype
        try:
            posterior.fit(torch.utils.data.DataLoader(data, batch_size=len(x)))
        finally:
            torch.set_default_dtype(torch.float32)
    return posterior


def logit_covariance(ifc: IFComp, x: Tensor, precision: float) -> Tensor:
    """``M(x) / n`` at the damping ``precision / n``: the logit covariance of the linearised Laplace approximation."""
    count = ifc.factors.count
    return ifc.logit_kernel(x, damping=precision / count) / count


@pytest.mark.parametrize("precision", [0.3, 20.0])
def test_the_logit_kernel_is_the_covariance_of_laplace_torch_with_diagonal_curvature(precision: float) -> None:
    model, x, new = convolutional(DiagonalConv, DiagonalLinear, bias=True), images(20, seed=0), images(4, seed=1)
    ifc = IFComp(model, fisher="exact").fit([x])
    assert {row.treatment for row in ifc.coverage.rows} == {"diagonal"}
    _, expected = whole_network(model, x, "diag", precision)._glm_predictive_distribution(new)
    assert_close(logit_covariance(ifc, new, precision), expected, rtol=1e-8, atol=1e-12)


def test_the_logit_kernel_is_the_covariance_of_laplace_torch_with_its_kronecker_factors() -> None:
    """Both have the eigenvectors of laplace-torch, and products of its eigenvalues as second moments."""
    model, x, new = convolutional(nn.Conv2d, nn.Linear, bias=False), images(20, seed=0), images(4, seed=1)
    posterior = whole_network(model, x, "kron", 0.5)
    ifc = IFComp(model, fisher="exact").fit([x])
    blocks = {}
    factors = zip(ifc.factors.blocks, posterior.H.eigenvectors, posterior.H.eigenvalues, strict=True)
    for name, (outputs, inputs), values in factors:
        blocks[name] = BlockFactors(torch.outer(*values)[None] / len(x), Basis(inputs[None], outputs[None]))
    ifc = IFComp.from_factors(model, replace(ifc.factors, blocks=blocks))
    _, expected = posterior._glm_predictive_distribution(new)
    assert_close(logit_covariance(ifc, new, 0.5), expected, rtol=1e-8, atol=0)


@pytest.mark.parametrize("bias", [True, False])
def test_the_logit_kernel_is_the_covariance_of_laplace_torch_with_full_curvature(bias: bool) -> None:
    """If the logits do not depend on x, the Fisher is a Kronecker product and EKFAC is exact."""
    torch.manual_seed(0)
    model, x, new = nn.Linear(4, 3, bias=bias).double(), torch.randn(20, 4).double(), torch.randn(5, 4).double()
    model.weight.detach().zero_()
    ifc = IFComp(model, fisher="exact").fit([x])
    _, expected = whole_network(model, x, "full", 0.8)._glm_predictive_distribution(new)
    assert_close(logit_covariance(ifc, new, 0.8), expected, rtol=1e-8, atol=1e-12)
