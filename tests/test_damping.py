"""Damping: its scale, its effect on influence, and tiny damping in single precision."""

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close

from cases import CASES, Case, seeded
from comparison import as_type, fitted
from experiments.models import LeNet
from ifcomp import IFComp, Relative
from oracles import Inputs

MODELS = ["lenet", "vision_transformer", "bert", "linear_sequence_first"]
SIZE = 7


def inputs_of(case: Case, size: int = SIZE, seed: int = 0) -> Inputs:
    return as_type(case.sample(size, seed), torch.float64)


@cache
def ready(name: str) -> IFComp:
    """The case fitted in double precision with the exact Fisher and a damping of 1e-3."""
    return fitted(CASES[name])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", [float, Relative])
def test_influence_falls_as_damping_grows(name: str, kind: Callable[[float], Any]) -> None:
    ifc, inputs = ready(name), inputs_of(CASES[name])
    values = [ifc.influence(inputs, damping=kind(value)) for value in (1e-8, 1e-4, 1e-2, 1.0, 1e2, 1e6, 2e6)]
    for weaker, stronger in pairwise(values):
        assert (stronger < weaker).all()
    assert (values[-1] > 0).all()
    assert_close(values[-1], values[-2] / 2, rtol=1e-4, atol=0)


@pytest.mark.parametrize("damping", [0.0, 1e-12, 0.5, 1, Relative(0.01), Relative(0)], ids=repr)
def test_damping_of_a_call_is_that_of_the_constructor(damping: Any) -> None:
    case = CASES["vision_transformer"]
    inputs = inputs_of(case)
    built, called = fitted(case, damping=damping), ready(case.name)
    assert torch.equal(built.influence(inputs), called.influence(inputs, damping=damping))
    assert torch.equal(built.logit_kernel(inputs), called.logit_kernel(inputs, damping=damping))
    assert torch.equal(built.predict_proba(inputs), called.predict_proba(inputs, damping=damping))
    frames = built.score([inputs]), called.score([inputs], damping=damping)
    pd.testing.assert_frame_equal(frames[0].frame, frames[1].frame, check_exact=True)
    assert frames[0].settings == frames[1].settings
    labels = torch.ones(SIZE, dtype=torch.long)
    one, other = (
        built.stochastic_complexity(inputs, labels),
        called.stochastic_complexity(inputs, labels, damping=damping),
    )
    assert torch.equal(one, other)


def test_relative_damping_is_a_multiple_of_the_mean_curvature() -> None:
    ifc = ready("vision_transformer")
    assert ifc.factors is not None
    for name, block in ifc.factors.blocks.items():
        mean_curvature = float(block.second_moments.mean())
        assert ifc.factors.damping_of(name, Relative(0.3)) == pytest.approx(0.3 * mean_curvature, rel=1e-12)
        assert ifc.factors.damping_of(name, 0.3) == 0.3


def test_relative_damping_is_the_absolute_one_of_each_block() -> None:
    case = CASES["vision_transformer"]
    inputs, data = inputs_of(case), inputs_of(case, SIZE, seed=1)
    whole = ready(case.name)
    assert whole.factors is not None
    total = torch.zeros(SIZE, case.num_classes, dtype=torch.float64)
    for name in ("patch", "mlp.0", "norm1", "head", "token"):
        one = IFComp(case.make().double(), layers=name, fisher="exact").fit([data])
        relative = one.influence(inputs, damping=Relative(0.1))
        absolute = one.influence(inputs, damping=whole.factors.damping_of(name, Relative(0.1)))
        assert_close(absolute, relative, rtol=1e-12, atol=0)
        total += relative
    assert (total < whole.influence(inputs, damping=Relative(0.1))).all()


# Small damping in single precision

DAMPINGS = [0.0, 1e-42, 1e-30, 1e-12, Relative(1e-6), Relative(0.1)]


@cache
def digits() -> tuple[Tensor, Tensor]:
    """Handwritten digits of 8 by 8 pixels, scaled up to 28 by 28."""
    images, labels = load_digits(return_X_y=True)
    small = torch.as_tensor(images[:600], dtype=torch.float32).view(-1, 1, 8, 8) / 16
    return functional.interpolate(small, size=(28, 28), mode="bilinear"), torch.as_tensor(labels[:600])


@cache
def trained_lenet(beta: float) -> IFComp:
    """A LeNet with a few steps of training, fitted in single precision."""
    x, y = digits()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LeNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(60):
        rows = slice(step * 50 % 600, step * 50 % 600 + 50)
        optimizer.zero_grad()
        functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    return IFComp(model.eval(), beta=beta).fit(list(x[:200].split(50)))


def near_and_far() -> Tensor:
    """Training examples, unseen examples and inputs far from them."""
    x, unseen = digits()[0][:4], digits()[0][400:404]
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    return torch.cat([x, unseen, torch.zeros_like(x), torch.ones_like(x), 100 * x, -100 * x, noise])


@pytest.mark.parametrize("damping", DAMPINGS, ids=repr)
def test_single_precision_stays_finite(damping: Any) -> None:
    ifc, x = trained_lenet(1.0), near_and_far()
    influence = ifc.influence(x, damping=damping)
    assert influence.isfinite().all()
    assert (influence >= 0).all()
    distribution = ifc.predict_proba(x, damping=damping)
    assert_close(distribution.sum(1), torch.ones(len(x), dtype=torch.float64))
    frame = ifc.score([(x, torch.arange(len(x)) % 10)], damping=damping).frame
    assert np.isfinite(frame.to_numpy()).all()


@pytest.mark.parametrize("damping", DAMPINGS[:4], ids=repr)
def test_single_precision_stays_finite_for_the_kernel(damping: float) -> None:
    ifc, x = trained_lenet(0.01), 100 * digits()[0][:3]
    kernel = ifc.logit_kernel(x, damping=damping)
    assert kernel.isfinite().all()
    assert (kernel.diagonal(dim1=1, dim2=2) >= 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("steepness", [1e2, 1e3, 1e6])
def test_scores_of_a_certain_model_are_finite(steepness: float, dtype: torch.dtype) -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))().to(dtype)
    with torch.no_grad():
        model[2].weight.mul_(steepness)
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    labels = torch.zeros(20, dtype=torch.long)
    for fisher in ("sampled", "exact"):
        ifc = IFComp(model, fisher=fisher).fit([x])
        for damping in (0.0, 1e-30, Relative(0.1)):
            frame = ifc.score([(x, labels)], damping=damping).frame
            assert frame.columns[~np.isfinite(frame).all()].empty
