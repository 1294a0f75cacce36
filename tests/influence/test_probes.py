"""Standard errors of expected influence from probes: against the spread over seeds, by arithmetic and end to end."""

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from comparison import assert_close
from ifcomp import IFComp, Relative
from ifcomp.errors import SettingError
from ifcomp.influence.probes import probe_cotangents, standard_error

SEEDS = 1000


def kernels(classes: int) -> tuple[Tensor, Tensor]:
    """P [2, K] and logit kernels [2, K, K]: one with a wild diagonal, one that is dense and even."""
    generator = torch.Generator().manual_seed(classes)
    p = torch.softmax(2 * torch.randn(2, classes, generator=generator, dtype=torch.float64), 1)
    wild = torch.randn(classes, classes, generator=generator, dtype=torch.float64)
    scales = torch.logspace(-1, 1, classes, dtype=torch.float64)
    even = torch.ones(classes, classes, dtype=torch.float64) + torch.eye(classes, dtype=torch.float64)
    return p, torch.stack([wild @ wild.T * scales * scales[:, None], even])


def forms(p: Tensor, kernel: Tensor, probes: int, seed: int) -> Tensor:
    """``v^T M v``, [B, m], by plain matrix products."""
    v = torch.cat(list(probe_cotangents(p, probes, seed).chunks(3)))
    return torch.einsum("cbk,bkl,cbl->bc", v, kernel, v)


@cache
def spread(classes: int, probes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Truth, estimates [seeds, B] and squared standard errors [seeds, B]."""
    p, kernel = kernels(classes)
    truth = torch.einsum("bk,bkk->b", p, kernel) - torch.einsum("bk,bkl,bl->b", p, kernel, p)
    found = [forms(p, kernel, probes, seed) for seed in range(SEEDS)]
    return truth, torch.stack([f.sum(1) for f in found]), torch.stack([standard_error(f, classes) ** 2 for f in found])


@pytest.mark.parametrize(("classes", "probes"), [(7, 3), (8, 4), (8, 5), (9, 6), (12, 11)])
def test_squared_errors_are_unbiased(classes: int, probes: int) -> None:
    truth, estimates, squares = spread(classes, probes)
    assert ((estimates.mean(0) - truth).abs() < 4 * estimates.std(0) / SEEDS**0.5).all()
    noise = 4 * (squares.std(0) + (estimates - truth).square().std(0)) / SEEDS**0.5
    assert ((squares.mean(0) - (estimates - truth).square().mean(0)).abs() < noise).all()
    assert (noise < 0.8 * squares.mean(0)).all()  # so that the line above can fail


@pytest.mark.parametrize("classes", [3, 5, 8, 12])
def test_two_probes_never_promise_too_much(classes: int) -> None:
    truth, estimates, squares = spread(classes, 2)
    noise = 4 * (squares.std(0) + (estimates - truth).square().std(0)) / SEEDS**0.5
    assert (squares.mean(0) > (estimates - truth).square().mean(0) - noise).all()


def test_errors_fall_as_without_replacement() -> None:
    """``Var`` is proportional to ``(K - m) / m``."""
    classes = 16
    errors = {m: (spread(classes, m)[2]).mean(0) * m / (classes - m) for m in (4, 8, 14)}
    for found in errors.values():
        assert_close(found, errors[8], rtol=0.2, atol=0)


@pytest.mark.parametrize("classes", [2, 3, 8, 9])
def test_all_directions_have_no_error(classes: int) -> None:
    p, kernel = kernels(classes)
    assert (standard_error(forms(p, kernel, classes, 0), classes) == 0).all()


def predictor(classes: int = 8, seed: int = 0) -> tuple[IFComp, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, classes)).double()
    x = torch.randn(40, 6, dtype=torch.float64)
    return IFComp(model, fisher="exact", damping=Relative(0.1), seed=seed).fit([x]), x[:5]


def test_tables_have_the_error() -> None:
    truth = predictor()[0].score([predictor()[1]]).column("expected_influence")
    ratios = []
    for seed in range(40):
        ifc, x = predictor(seed=seed)
        frame = ifc.score([x], probes=4).frame
        ratios.append(torch.tensor((frame["expected_influence"] - truth) / frame["expected_influence_error"]))
    # one degree of freedom has no variance, but its quartiles are those of a Cauchy distribution: -1, 0, 1
    inside = (torch.stack(ratios).abs() < 1).double().mean()
    assert 0.3 < inside < 0.7


def test_columns_and_zero_with_all_probes() -> None:
    ifc, x = predictor()
    assert "expected_influence_error" not in ifc.score([x]).frame
    assert "expected_influence_error" not in ifc.score([x], probes=1).frame
    exact = ifc.score([x], probes=8)
    assert (exact.column("expected_influence_error") == 0).all()
    assert "standard error" in exact.descriptions["expected_influence_error"]


@pytest.mark.parametrize("probes", [0, 9, 1.5])
def test_probes_are_refused_before_the_model_runs(probes: float) -> None:
    ifc, x = predictor()
    with pytest.raises(SettingError, match="from 1 to the number of classes, 8"):
        ifc.score([x], probes=probes)
