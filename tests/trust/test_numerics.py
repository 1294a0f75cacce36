"""Ill-conditioned, rank-deficient, tiny and huge data: every output is finite, or an error names the overflow."""

import math
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from cases import seeded
from ifcomp import IFComp, Relative
from ifcomp.errors import NonFiniteError

X = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(20) % 3

#: Training inputs in single precision. Second moments of "tiny" are near 1e-38, the smallest normal number.
DATA: dict[str, Tensor] = {
    "plain": X,
    "rank_one": X[:, :1] * torch.ones(4),
    "nearly_rank_one": X[:, :1] * torch.ones(4) + 1e-6 * X,
    "constant": torch.ones_like(X),
    "zero": torch.zeros_like(X),
    "tiny": X * 1e-19,
    "denormal": X * 1e-42,
    "large": X * 1e8,
    "ill_conditioned": X * torch.tensor([1e-19, 1e-8, 1.0, 1e8]),
}

ABSOLUTE = [1e-38, 1e-30, 1e-12, 1e-3, 1.0, 1e10]
DAMPINGS: list[Any] = [0.0, 1e-38, 1e-12, 1e10, Relative(1e-12), Relative(0.1)]


def net(steepness: float = 1.0) -> nn.Module:
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3)))()
    with torch.no_grad():
        model[4].weight.mul_(steepness)
    return model


@cache
def fitted(kind: str, beta: float = 1.0, steepness: float = 1.0, fisher: Any = "exact", double: bool = False) -> IFComp:
    model, x = net(steepness), DATA[kind]
    return IFComp(model.double() if double else model, beta, fisher=fisher).fit([x.double() if double else x])


def outputs(ifc: IFComp, x: Tensor, damping: Any) -> dict[str, Any]:
    """Results of every kind of call."""
    return {
        "influence": ifc.influence(x, damping=damping),
        "kernel": ifc.logit_kernel(x, damping=damping),
        "parametric": ifc.parametric_complexity(x, damping=damping),
        "probes": ifc.parametric_complexity(x, probes=2, damping=damping),
        "stochastic": ifc.stochastic_complexity(x, Y[: len(x)], damping=damping),
        "unseen": ifc.stochastic_complexity(x, Y[: len(x)], seen=False, damping=damping),
        "pnml": ifc.predict_proba(x, alpha=1.0, keep_argmax=False, damping=damping),
        "argmax": ifc.predict_proba(x, alpha=1.0, damping=damping),
        "table": torch.tensor(ifc.score([(x, Y[: len(x)])], damping=damping).frame.to_numpy(float)),
    }


def check_outputs(ifc: IFComp, x: Tensor, damping: Any) -> None:
    results = outputs(ifc, x, damping)
    wrong = [name for name, value in results.items() if not value.isfinite().all()]
    assert not wrong, f"{wrong} at damping {damping}"
    for name in ("influence", "parametric", "probes"):
        assert (results[name] >= 0).all(), name
    for name in ("pnml", "argmax"):
        assert_close(results[name].sum(1), torch.ones(len(x), dtype=torch.float64))


@pytest.mark.parametrize("steepness", [1e-18, 1.0, 1e3])
@pytest.mark.parametrize("kind", DATA)
def test_every_output_is_finite(kind: str, steepness: float) -> None:
    """With a steep head probabilities are 0 and 1. With a flat head second moments are near 1e-38."""
    for damping in DAMPINGS:
        check_outputs(fitted(kind, steepness=steepness), torch.cat([DATA[kind][:2], 100 * X[:2]]), damping)


@pytest.mark.parametrize("beta", [0.0, 1e-6, 1e-3, 1.0, 100.0])
@pytest.mark.parametrize("kind", ["plain", "rank_one", "tiny"])
def test_outputs_are_finite_at_every_temperature(kind: str, beta: float) -> None:
    for damping in (0.0, 1e-30, Relative(0.1), 1e10):
        check_outputs(fitted(kind, beta, fisher="sampled"), X[:2], damping)


@pytest.mark.parametrize("beta", [1e-6, 1.0, 100.0])
@pytest.mark.parametrize("kind", DATA)
def test_influence_does_not_grow_with_damping(kind: str, beta: float) -> None:
    """Up to rounding errors in single precision, relative to the label with the largest influence."""
    ifc = fitted(kind, beta)
    x = torch.cat([DATA[kind][:4], 100 * X[:4]])
    for weaker, stronger in pairwise(ifc.influence(x, damping=damping) for damping in ABSOLUTE):
        assert (stronger <= weaker * (1 + 1e-5) + 1e-12 * weaker.amax(1, keepdim=True)).all()


@pytest.mark.parametrize("damping", [1e-6, 1e-3, 1.0, 1e10, Relative(0.1)], ids=repr)
@pytest.mark.parametrize("kind", ["plain", "rank_one", "nearly_rank_one", "constant", "zero"])
def test_single_precision_agrees_with_double(kind: str, damping: Any) -> None:
    single, double = fitted(kind), fitted(kind, double=True)
    results, expected = outputs(single, X[:4], damping), outputs(double, X[:4].double(), damping)
    for name in ("influence", "parametric", "stochastic", "pnml"):
        scale = float(expected[name].abs().max())
        assert_close(
            results[name], expected[name], rtol=2e-4, atol=1e-6 * scale, msg=lambda text, name=name: name + text
        )


def test_second_moments_down_to_the_smallest_number_are_inverted() -> None:
    """Inputs of size 1e-19 have second moments near 1e-38, and the influence of inputs of size 1."""
    model = nn.Linear(4, 3, bias=False)
    nn.init.zeros_(model.weight)
    expected = IFComp(model, fisher="exact", damping=0.0).fit([X]).influence(X)
    ifc = IFComp(model, fisher="exact", damping=0.0).fit([X * 1e-19])
    assert ifc.factors is not None
    moments = ifc.factors.blocks[""].second_moments
    assert 0 < float(moments[moments > 0].min()) < 1e-37
    assert_close(ifc.influence(X * 1e-19), expected, rtol=1e-3, atol=1e-3)
    assert_close(ifc.influence(X), expected * 1e38, rtol=1e-3, atol=1e35)


# Overflow


def test_the_example_of_an_overflow_is_named() -> None:
    ifc, far = fitted("plain"), X.clone()
    far[5] *= 1e22
    for run in (
        lambda: ifc.influence(far, damping=1e-30),
        lambda: ifc.logit_kernel(far, damping=1e-30),
        lambda: ifc.parametric_complexity(far, probes=2, damping=1e-30),
        lambda: ifc.score([X, far], damping=1e-30),
    ):
        with pytest.raises(NonFiniteError, match=r"example 5.*double") as caught:
            run()
        assert "leave the example out" in str(caught.value)
    double = fitted("plain", double=True).score([far.double()], damping=1e-30)
    assert np.isfinite(double.frame).all(axis=None)


def test_the_layer_of_an_overflow_is_named() -> None:
    """Inputs are large, weights small, then large: logits are moderate, gradients of the small weights near 1e20."""
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 6, bias=False), nn.ReLU(), nn.Linear(6, 3)))()
    with torch.no_grad():
        model[0].weight.mul_(1e-20)
        model[2].weight.mul_(1e10)
    with pytest.raises(NonFiniteError, match=r"squared gradients of 0 overflow.*double.*layers="):
        IFComp(model).fit([X * 1e10])
    assert IFComp(model.double()).fit([X.double() * 1e10]).influence(X.double() * 1e10).isfinite().all()


# Eigendecompositions that fail


def failing_eigh(failures: float, only: Callable[[Tensor], bool] = lambda matrix: True) -> Callable[[Tensor], Any]:
    """``torch.linalg.eigh``, of which the first calls do not converge."""
    original, left = torch.linalg.eigh, [failures]

    def eigh(matrix: Tensor) -> Any:
        if only(matrix) and left[0] > 0:
            left[0] -= 1
            raise torch.linalg.LinAlgError("linalg.eigh: the algorithm failed to converge")
        return original(matrix)

    return eigh


def test_a_fit_with_failed_decompositions_has_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = fitted("plain", double=True).influence(X.double())
    monkeypatch.setattr(torch.linalg, "eigh", failing_eigh(3))
    result = IFComp(net().double(), fisher="exact").fit([X.double()]).influence(X.double())
    assert_close(result, expected, rtol=1e-6, atol=0)


def test_a_decomposition_that_never_converges_names_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.linalg, "eigh", failing_eigh(math.inf, lambda matrix: matrix.shape[-1] == 7))
    with pytest.raises(NonFiniteError) as caught:
        IFComp(net()).fit([X])
    for word in ("inputs of layer '2'", "does not converge", "jitter", "double", "layers="):
        assert word in str(caught.value)
