"""Squared gradient norms equal those of explicit gradients, one example and one label at a time in float64."""

from functools import cache

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from cases import LAYER_CASES, MODEL_CASES, Case
from comparison import as_type
from experiments.models import LeNet
from ifcomp.data.batches import as_batch
from ifcomp.influence import norms
from ifcomp.layers.registry import Selection
from ifcomp.layers.session import Session
from oracles import Inputs, example_jacobians

ALL_CASES = [*LAYER_CASES, *MODEL_CASES]


def found_norms(case: Case, inputs: Inputs, cotangents: Tensor, dtype: torch.dtype) -> Tensor:
    batch = as_batch(as_type(inputs, dtype))
    session = Session(case.make().to(dtype), Selection(), batch)
    with session.attached():
        return norms.squared_gradient_norms(session, session.record(batch), batch, cotangents)


@cache
def jacobians_of(name: str) -> dict[str, Tensor]:
    case = next(case for case in ALL_CASES if case.name == name)
    return example_jacobians(case.make(), case.sample(5))


def explicit_norms(case: Case, cotangents: Tensor) -> Tensor:
    jacobians = jacobians_of(case.name)
    gradients = [torch.einsum("cbk,bk...->bc...", cotangents, jacobian) for jacobian in jacobians.values()]
    return sum(gradient.flatten(2).square().sum(2) for gradient in gradients)


def some_cotangents(case: Case, count: int) -> Tensor:
    return torch.randn(count, 5, case.num_classes, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4)], ids=str)
@pytest.mark.parametrize("way", ["direct", "ghost"])
@pytest.mark.parametrize("case", ALL_CASES, ids=str)
def test_both_ways_are_exact(
    case: Case, way: str, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(norms, "choose_way", lambda *_: way)
    monkeypatch.setattr(norms, "SLAB_ENTRIES", 30)  # several slabs
    inputs, cotangents = case.sample(5), some_cotangents(case, 3)
    found = found_norms(case, inputs, cotangents, dtype)
    assert found.dtype == torch.float64
    assert_close(found, explicit_norms(case, cotangents), rtol=tolerance, atol=0)


def test_more_cotangents_than_are_held_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in MODEL_CASES if case.name == "lenet")
    inputs, cotangents = case.sample(5), some_cotangents(case, 7)
    monkeypatch.setattr(norms, "COTANGENTS_AT_ONCE", 3)
    found = found_norms(case, inputs, cotangents, torch.float64)
    assert_close(found, explicit_norms(case, cotangents), rtol=1e-10, atol=0)


def test_choice_of_a_way() -> None:
    """LeNet: T = 784 positions for a 6 x 26 gradient, T = 100 for 16 x 151, T = 1 for the Linear."""
    session = Session(LeNet(), Selection(), as_batch(torch.zeros(2, 1, 28, 28)))
    blocks = {block.name: block for block in session.kronecker}
    assert norms.choose_way(blocks["conv1"], 784, 10) == "direct"
    assert norms.choose_way(blocks["conv2"], 100, 10) == "direct"
    assert norms.choose_way(blocks["fc1"], 1, 10) == "ghost"
