"""Expected influence from probes: unbiased over seeds, exact for all probes, with a standard error."""

from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from cases import REPRESENTATIVE_CASES, Case
from comparison import as_type, dense, fitted
from ifcomp import IFComp, Relative
from ifcomp.errors import SettingError
from ifcomp.influence.probes import probe_cotangents, standard_error

SEEDS = 1000


def kernels(classes: int) -> tuple[Tensor, Tensor]:
    """Probabilities [2, K] and logit kernels [2, K, K]: one with a diagonal of many scales, one that is even."""
    generator = torch.Generator().manual_seed(classes)
    p = torch.softmax(2 * torch.randn(2, classes, generator=generator, dtype=torch.float64), 1)
    steep = torch.randn(classes, classes, generator=generator, dtype=torch.float64)
    scales = torch.logspace(-1, 1, classes, dtype=torch.float64)
    even = torch.ones(classes, classes, dtype=torch.float64) + torch.eye(classes, dtype=torch.float64)
    return p, torch.stack([steep @ steep.T * scales * scales[:, None], even])


def forms(p: Tensor, kernel: Tensor, probes: int, seed: int) -> Tensor:
    """``v^T M v`` of all probes by matrix products, [B, m]."""
    v = torch.cat(list(probe_cotangents(p, probes, seed).chunks(3)))
    return torch.einsum("cbk,bkl,cbl->bc", v, kernel, v)


@cache
def spread(classes: int, probes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Expected influence [B], and its estimates [seeds, B] and squared standard errors [seeds, B] over seeds."""
    p, kernel = kernels(classes)
    truth = torch.einsum("bk,bkk->b", p, kernel) - torch.einsum("bk,bkl,bl->b", p, kernel, p)
    values = [forms(p, kernel, probes, seed) for seed in range(SEEDS)]
    estimates = torch.stack([value.sum(1) for value in values])
    return truth, estimates, torch.stack([standard_error(value, classes) ** 2 for value in values])


@pytest.mark.parametrize("classes", [2, 5, 8])
def test_single_probes_are_unbiased(classes: int) -> None:
    """One probe has no standard error."""
    p, kernel = kernels(classes)
    truth = torch.einsum("bk,bkk->b", p, kernel) - torch.einsum("bk,bkl,bl->b", p, kernel, p)
    estimates = torch.stack([forms(p, kernel, 1, seed).sum(1) for seed in range(SEEDS)])
    error = estimates.std(0) / SEEDS**0.5
    assert (error < 0.2 * truth).all(), "the next line can fail"
    assert ((estimates.mean(0) - truth).abs() < 4 * error).all()


@pytest.mark.parametrize(("classes", "probes"), [(7, 3), (8, 4), (8, 5), (9, 6), (12, 11)])
def test_squared_errors_are_unbiased(classes: int, probes: int) -> None:
    truth, estimates, squares = spread(classes, probes)
    assert ((estimates.mean(0) - truth).abs() < 4 * estimates.std(0) / SEEDS**0.5).all()
    noise = 4 * (squares.std(0) + (estimates - truth).square().std(0)) / SEEDS**0.5
    assert ((squares.mean(0) - (estimates - truth).square().mean(0)).abs() < noise).all()
    assert (noise < 0.8 * squares.mean(0)).all(), "the line above can fail"


@pytest.mark.parametrize("classes", [3, 5, 8, 12])
def test_two_probes_are_unbiased_and_do_not_underestimate_their_error(classes: int) -> None:
    truth, estimates, squares = spread(classes, 2)
    assert ((estimates.mean(0) - truth).abs() < 4 * estimates.std(0) / SEEDS**0.5).all()
    noise = 4 * (squares.std(0) + (estimates - truth).square().std(0)) / SEEDS**0.5
    assert (squares.mean(0) > (estimates - truth).square().mean(0) - noise).all()


def test_errors_are_those_of_sampling_without_replacement() -> None:
    """``Var`` is proportional to ``(K - m) / m``."""
    classes = 16
    errors = {m: (spread(classes, m)[2]).mean(0) * m / (classes - m) for m in (4, 8, 14)}
    for scaled in errors.values():
        assert_close(scaled, errors[8], rtol=0.2, atol=0)


@pytest.mark.parametrize("classes", [2, 3, 8, 9])
def test_all_directions_have_no_error(classes: int) -> None:
    p, kernel = kernels(classes)
    assert (standard_error(forms(p, kernel, classes, 0), classes) == 0).all()


# Predictors


@pytest.mark.parametrize("case", REPRESENTATIVE_CASES, ids=str)
def test_probes_are_forms_in_the_logit_kernel(case: Case) -> None:
    """As many probes as classes give the exact value."""
    ifc, inputs = fitted(case, seed=3), as_type(case.sample(5), torch.float64)
    p, kernel = dense(case, size=5, seed=0).probability(1.0), ifc.logit_kernel(inputs)
    exact = ifc.parametric_complexity(inputs, linearized=True)
    for probes in (1, 2, case.num_classes):
        result = ifc.parametric_complexity(inputs, linearized=True, probes=probes)
        expected = forms(p, kernel, probes, seed=3).sum(1) / ifc.factors.count
        assert_close(result, expected, rtol=1e-9, atol=0)
    assert_close(result, exact, rtol=1e-10, atol=0)


def predictor(classes: int = 8, seed: int = 0) -> tuple[IFComp, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, classes)).double()
    x = torch.randn(40, 6, dtype=torch.float64)
    return IFComp(model, fisher="exact", damping=Relative(0.1), seed=seed).fit([x]), x[:5]


def test_estimates_scatter_by_their_error() -> None:
    truth = predictor()[0].score([predictor()[1]]).column("expected_influence")
    ratios = []
    for seed in range(40):
        ifc, x = predictor(seed=seed)
        frame = ifc.score([x], probes=4).frame
        ratios.append(torch.tensor((frame["expected_influence"] - truth) / frame["expected_influence_error"]))
    # With one degree of freedom the ratios have a Cauchy distribution, whose quartiles are -1, 0 and 1.
    inside = (torch.stack(ratios).abs() < 1).double().mean()
    assert 0.3 < inside < 0.7


def test_the_error_is_a_column_from_two_probes_on() -> None:
    ifc, x = predictor()
    assert "expected_influence_error" not in ifc.score([x]).frame
    assert "expected_influence_error" not in ifc.score([x], probes=1).frame
    exact = ifc.score([x], probes=8)
    assert (exact.column("expected_influence_error") == 0).all()
    assert "standard error" in exact.descriptions["expected_influence_error"]


@pytest.mark.parametrize("probes", [0, 9, 1.5])
def test_invalid_numbers_of_probes_are_refused(probes: float) -> None:
    ifc, x = predictor()
    with pytest.raises(SettingError, match="from 1 to the number of classes, 8"):
        ifc.score([x], probes=probes)
