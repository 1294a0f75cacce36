"""The whole-network predictive against laplace-torch, where the structures of curvature coincide, and by hand."""

import copy
import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close

from cases import LAYER_CASES, MODEL_CASES
from comparison import as_type, basis_arguments, fitted, library_block, oracle_blocks
from experiments.baselines.linearized import LinearizedLaplace, evidence_prior_precision
from ifcomp import IFComp
from ifcomp.blocks.block import Basis
from ifcomp.curvature.factors import BlockFactors
from ifcomp.errors import NotFittedError, SettingError
from oracles import block_jacobian, example_jacobians, rotation_matrix

CASES = {case.name: case for case in [*LAYER_CASES, *MODEL_CASES]}


class OwnLinear(nn.Linear):
    """A Linear with its own forward, which makes its curvature diagonal here."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


class OwnConv(nn.Conv2d):
    """A convolution with its own forward."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.conv2d(x, self.weight, self.bias)


def images(size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, 2, 4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def convolutional(conv: type[nn.Conv2d], linear: type[nn.Linear], bias: bool) -> nn.Module:
    torch.manual_seed(0)
    layers = [conv(2, 3, 2, bias=bias), nn.Tanh(), conv(3, 3, 2, bias=bias), nn.Tanh(), nn.Flatten()]
    return nn.Sequential(*layers, linear(12, 5, bias=bias), nn.Tanh(), linear(5, 3, bias=bias)).double()


def laplace_of(model: nn.Module, x: Tensor, structure: str, precision: float = 1.0) -> object:
    """laplace-torch over all weights of a copy of the model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from laplace import Laplace

        found = Laplace(
            copy.deepcopy(model),
            "classification",
            subset_of_weights="all",
            hessian_structure=structure,
            prior_precision=precision,
        )
        data = torch.utils.data.TensorDataset(x, torch.zeros(len(x)).long())
        torch.set_default_dtype(torch.float64)  # it makes identity matrices in the default type
        try:
            found.fit(torch.utils.data.DataLoader(data, batch_size=len(x)))
        finally:
            torch.set_default_dtype(torch.float32)
    return found


@pytest.mark.parametrize("precision", [0.3, 20.0])
def test_agrees_with_laplace_torch_on_a_whole_network_with_diagonal_curvature(precision: float) -> None:
    model, x, new = convolutional(OwnConv, OwnLinear, bias=True), images(20), images(4, seed=1)
    ifc = IFComp(model, fisher="exact").fit([x])
    assert {row.treatment for row in ifc.coverage.rows} == {"diagonal"}
    theirs = laplace_of(model, x, "diag", precision)
    mean, covariance = theirs._glm_predictive_distribution(new)
    ours = LinearizedLaplace(ifc, precision)
    assert_close(ours.logit_distribution(new), (mean, covariance), rtol=1e-8, atol=1e-12)
    assert_close(ours.predict_proba(new), theirs(new, link_approx="probit"), rtol=1e-8, atol=0)


def test_agrees_with_laplace_torch_on_a_whole_network_with_its_kronecker_factors() -> None:
    """Both are given the same eigenvectors, and products of laplace-torch's eigenvalues as second moments."""
    model, x, new = convolutional(nn.Conv2d, nn.Linear, bias=False), images(20), images(4, seed=1)
    theirs = laplace_of(model, x, "kron", 0.5)
    ifc = IFComp(model, fisher="exact").fit([x])
    kron = theirs.H
    blocks = {}
    for name, vectors, values in zip(ifc.factors.blocks, kron.eigenvectors, kron.eigenvalues, strict=True):
        moments = torch.outer(*values) / len(x)  # outputs, then inputs
        blocks[name] = BlockFactors(moments[None], Basis(vectors[1][None], vectors[0][None]))
    ifc.factors = replace(ifc.factors, blocks=blocks)
    assert_close(
        LinearizedLaplace(ifc, 0.5).logit_distribution(new), theirs._glm_predictive_distribution(new), rtol=1e-8, atol=0
    )


@pytest.mark.parametrize("bias", [True, False])
def test_agrees_with_laplace_torch_where_ekfac_is_the_full_curvature(bias: bool) -> None:
    """With logits that do not depend on x the Fisher is a Kronecker product, and EKFAC exact."""
    torch.manual_seed(0)
    model, x, new = nn.Linear(4, 3, bias=bias).double(), torch.randn(20, 4).double(), torch.randn(5, 4).double()
    model.weight.detach().zero_()
    ifc = IFComp(model, fisher="exact").fit([x])
    theirs = laplace_of(model, x, "full", 0.8)
    ours = LinearizedLaplace(ifc, 0.8)
    assert_close(ours.logit_distribution(new), theirs._glm_predictive_distribution(new), rtol=1e-8, atol=1e-12)
    assert_close(ours.predict_proba(new), theirs(new, link_approx="probit"), rtol=1e-8, atol=0)


@pytest.mark.parametrize("name", ["conv2d_groups", "lenet", "class_token"])
def test_covariance_is_that_of_the_dense_posterior(name: str) -> None:
    """``J (n F + tau)^-1 J^T`` with F from the library's factors."""
    case, precision = CASES[name], 2.5
    ifc = fitted(case)
    new = as_type(case.sample(3, seed=5), torch.float64)
    jacobians = example_jacobians(ifc.model, new)
    expected = torch.zeros(3, case.num_classes, case.num_classes).double()
    for block in oracle_blocks(case):
        own = library_block(ifc, block)
        moments = ifc.factors.blocks[own.name].second_moments
        rotation = rotation_matrix(moments.shape, **basis_arguments(ifc, own))
        fisher = rotation @ torch.diag(moments.flatten()) @ rotation.T
        posterior = torch.linalg.inv(ifc.factors.count * fisher + precision * torch.eye(len(fisher)).double())
        flat = block_jacobian(jacobians, block).flatten(2)
        expected += flat @ posterior @ flat.transpose(1, 2)
    assert_close(LinearizedLaplace(ifc, precision).logit_distribution(new)[1], expected, rtol=1e-8, atol=1e-12)


def test_a_temperature_is_a_factor_in_the_model() -> None:
    class Scaled(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return 0.4 * self.inner(x)

    model, x, new = convolutional(nn.Conv2d, nn.Linear, bias=True), images(10), images(3, seed=1)
    tempered = LinearizedLaplace(IFComp(model, beta=0.4, fisher="exact").fit([x]), 1.5)
    scaled = LinearizedLaplace(IFComp(Scaled(model), fisher="exact").fit([x]), 1.5)
    assert_close(tempered.logit_distribution(new), scaled.logit_distribution(new), rtol=1e-8, atol=1e-12)
    assert evidence_prior_precision(tempered.ifc) == pytest.approx(evidence_prior_precision(scaled.ifc), rel=1e-7)


def test_samples_approach_the_integral() -> None:
    """For two labels ``E[softmax]`` is one integral over the difference of the logits."""
    torch.manual_seed(0)
    model, x, new = nn.Linear(3, 2).double(), torch.randn(6, 3).double(), 3 * torch.randn(4, 3).double()
    ifc = IFComp(model, fisher="exact").fit([x])
    samples = 20_000
    predictive = LinearizedLaplace(ifc, 0.1, link="mc", samples=samples)
    mean, covariance = (value.numpy() for value in predictive.logit_distribution(new))
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    for row, found in enumerate(predictive.predict_proba(new)[:, 0].tolist()):
        spread = math.sqrt(covariance[row, 0, 0] + covariance[row, 1, 1] - 2 * covariance[row, 0, 1])
        values = 1 / (1 + np.exp(-(mean[row, 0] - mean[row, 1] + spread * nodes)))
        integral, square = (weights @ values**power / weights.sum() for power in (1, 2))
        assert abs(found - integral) < 4 * math.sqrt((square - integral**2) / samples)
        assert spread > 1


def test_samples_of_three_labels_have_the_covariance() -> None:
    """A root of the covariance that is not symmetric, or transposed, would give other samples."""
    ifc = fitted(CASES["conv2d_groups"])
    new = as_type(CASES["conv2d_groups"].sample(2, seed=5), torch.float64)
    predictive = LinearizedLaplace(ifc, 0.3, link="mc", samples=20_000)
    mean, covariance = predictive.logit_distribution(new)
    drawn = torch.distributions.MultivariateNormal(mean, covariance + 1e-9 * torch.eye(3))
    with torch.random.fork_rng():
        torch.manual_seed(9)
        expected = torch.softmax(drawn.sample((20_000,)), 2)
    deviation = expected.std(0) * (2 / 20_000) ** 0.5
    assert ((predictive.predict_proba(new) - expected.mean(0)).abs() < 4 * deviation).all()


@pytest.mark.parametrize("link", ["probit", "mc"])
def test_a_sharp_prior_leaves_the_softmax(link: str) -> None:
    ifc = fitted(CASES["lenet"])
    new = as_type(CASES["lenet"].sample(3, seed=5), torch.float64)
    found = LinearizedLaplace(ifc, 1e12, link=link).predict_proba(new)
    assert_close(found, torch.softmax(ifc.model(new), 1).detach(), rtol=1e-4, atol=0)
    if link == "probit":
        doubtful = LinearizedLaplace(ifc, 1e-2).predict_proba(new)
        assert (doubtful.max(1).values < found.max(1).values).all()


def test_prior_precision_maximises_the_evidence() -> None:
    """``P/2 log tau - tau/2 |theta|^2 - 1/2 log det(n F + tau)``, maximised numerically."""
    case = CASES["class_token"]
    ifc = fitted(case)
    squares = sum(float(value.detach().square().sum()) for value in ifc.model.parameters())
    moments = torch.cat([block.second_moments.flatten() for block in ifc.factors.blocks.values()]).numpy()

    def evidence(log: float) -> float:
        tau = math.exp(log)
        return 0.5 * (len(moments) * log - tau * squares - np.log(ifc.factors.count * moments + tau).sum())

    best = minimize_scalar(lambda log: -evidence(log), bounds=(-15, 10), method="bounded", options={"xatol": 1e-9})
    assert len(moments) == sum(value.numel() for value in ifc.model.parameters())
    assert math.log(evidence_prior_precision(ifc)) == pytest.approx(best.x, abs=1e-5)


def test_prior_precision_agrees_with_laplace_torch() -> None:
    model, x = convolutional(OwnConv, OwnLinear, bias=True), images(20)
    theirs = laplace_of(model, x, "diag")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        theirs.optimize_prior_precision(method="marglik", n_steps=300)
    found = evidence_prior_precision(IFComp(model, fisher="exact").fit([x]))
    assert found == pytest.approx(float(theirs.prior_precision), rel=1e-3)


def test_refuses_what_means_nothing() -> None:
    model = nn.Linear(2, 3).double()
    x = torch.randn(6, 2).double()
    ifc = IFComp(model, fisher="exact").fit([x])
    with pytest.raises(NotFittedError):
        LinearizedLaplace(IFComp(model), 1.0)
    with pytest.raises(SettingError, match="prior_precision"):
        LinearizedLaplace(ifc, -1.0)
    with pytest.raises(SettingError, match="link"):
        LinearizedLaplace(ifc, 1.0, link="logit")  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="beta"):
        LinearizedLaplace(IFComp(model, beta=0.0, fisher="exact").fit([x]), 1.0)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    with pytest.raises(SettingError, match="zero"):
        evidence_prior_precision(IFComp(model, fisher="exact").fit([x]))
