"""Cotangents that go through one backward, as on a GPU, give what they give one by one."""

from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from cases import LAYER_CASES, MODEL_CASES, Case
from comparison import as_type, assert_exact, fitted
from ifcomp import IFComp, Relative
from ifcomp.layers import backward
from ifcomp.layers.session import stacks_cotangents
from ifcomp.memory import as_bytes
from tracking import Alive

ALL_CASES = [*LAYER_CASES, *MODEL_CASES]
LENET = next(case for case in MODEL_CASES if case.name == "lenet")


@pytest.fixture
def stacked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Stacking on the CPU: how many cotangents each stacked backward had."""
    seen: list[int] = []
    plain = backward._pull_stacked

    def counted(logits: Tensor, edges: Any, cotangents: Tensor) -> Any:
        seen.append(len(cotangents))
        return plain(logits, edges, cotangents)

    monkeypatch.setattr("ifcomp.layers.session.stacks_cotangents", lambda device: True)
    monkeypatch.setattr(backward, "_pull_stacked", counted)
    return seen


def test_the_device_decides() -> None:
    assert [stacks_cotangents(torch.device(name)) for name in ("cpu", "cuda", "cuda:1")] == [False, True, True]


@pytest.mark.parametrize("case", ALL_CASES, ids=str)
def test_scores_are_those_of_one_by_one(case: Case, stacked: list[int]) -> None:
    ifc = fitted(case)
    inputs = as_type(case.sample(5), torch.float64)
    stacked.clear()
    influence, kernel = ifc.influence(inputs), ifc.logit_kernel(inputs)
    assert stacked == [case.num_classes - 1, case.num_classes]  # the last residual follows from the others
    ifc._session.stacks_cotangents = False
    assert_close(influence, ifc.influence(inputs), rtol=1e-10, atol=0)
    expected = ifc.logit_kernel(inputs)
    assert_close(kernel, expected, rtol=1e-10, atol=1e-13 * float(expected.abs().max()))
    assert len(stacked) == 2


@pytest.mark.parametrize("case", MODEL_CASES, ids=str)
def test_a_fit_and_its_scores_are_exact(case: Case, stacked: list[int]) -> None:
    ifc = fitted(case)
    assert set(stacked) == {2, case.num_classes}  # a trial, and both passes
    assert_exact(ifc, case)


def test_single_precision_is_that_of_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    one, inputs = fitted(LENET, torch.float32), LENET.sample(5)
    monkeypatch.setattr("ifcomp.layers.session.stacks_cotangents", lambda device: True)
    other = fitted(LENET, torch.float32)
    assert_close(other.influence(inputs), one.influence(inputs), rtol=1e-5, atol=0)


def test_half_precision_is_the_same(stacked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cotangent and example has its own scale."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).half()
    inputs = torch.randn(5, 6).half()
    found = IFComp(model, fisher="exact").fit([inputs]).influence(inputs)
    assert max(stacked) > 1
    monkeypatch.undo()
    assert_close(found, IFComp(model, fisher="exact").fit([inputs]).influence(inputs), rtol=1e-2, atol=0)


class Choosy(torch.autograd.Function):
    """The identity, whose backward looks at values, which ``vmap`` cannot."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient if bool(gradient.isfinite().all()) else torch.zeros_like(gradient)


class OwnBackward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.outer(Choosy.apply(self.inner(x).tanh()))
        return found


def test_a_backward_that_cannot_be_stacked_is_run_one_by_one(
    stacked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = OwnBackward().double(), torch.randn(5, 6, dtype=torch.float64)
    found = IFComp(model, fisher="exact").fit([inputs]).influence(inputs)
    assert stacked == [2]  # the trial
    monkeypatch.undo()
    assert torch.equal(found, IFComp(model, fisher="exact").fit([inputs]).influence(inputs))


def many_classes() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3), nn.AvgPool2d(4))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(72, 40)).eval()


@pytest.mark.filterwarnings("ignore:The running statistics")
@pytest.mark.parametrize(
    ("limit", "fewest", "most"), [("100MB", 39, 39), ("18MB", 17, 38), ("3MB", 1, 16)], ids=["much", "some", "little"]
)
def test_as_many_go_together_as_there_is_room_for(limit: str, fewest: int, most: int, stacked: list[int]) -> None:
    inputs = [torch.randn(20, 3, 16, 16, generator=torch.Generator().manual_seed(1))]
    ifc = IFComp(many_classes(), fisher="exact", damping=Relative(1.0))
    with Alive() as fitting:
        ifc.fit(inputs, max_memory=limit)
    stacked.clear()
    with Alive() as scoring:
        found = ifc.score(inputs, max_memory=limit).frame
    assert fewest <= max(stacked) <= most
    assert max(fitting.peak, scoring.peak) <= as_bytes(limit)
    pd.testing.assert_frame_equal(found, ifc.score(inputs).frame, rtol=1e-4)
