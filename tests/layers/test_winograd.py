"""The quick backward of convolutions: that of PyTorch, with fewer multiplications."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

from cases import LAYER_CASES, MODEL_CASES, Case
from comparison import assert_exact, fitted
from ifcomp import IFComp, Relative
from ifcomp.data.batches import as_batch
from ifcomp.layers import winograd
from ifcomp.layers.registry import Selection
from ifcomp.layers.session import Session
from ifcomp.layers.winograd import QuickBackward, quick_backward


def gradients(module: nn.Conv2d, value: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of a convolution's input, quick and by PyTorch."""
    value = value.requires_grad_()
    output = module(value)
    cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(3)).to(output.dtype)
    quick = quick_backward(module)
    assert quick is not None
    rewired = quick.rewire(value, module(value), quick.filters(torch.empty(quick.shape, dtype=module.weight.dtype)))
    assert torch.equal(rewired, output)
    found, expected = (torch.autograd.grad(own, value, cotangent)[0] for own in (rewired, output))
    return found, expected


@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(3, 14),
    st.integers(3, 14),
    st.sampled_from([0, 1, 2, "same", "valid"]),
)
def test_it_is_that_of_pytorch(examples: int, inputs: int, outputs: int, rows: int, width: int, padding: Any) -> None:
    torch.manual_seed(0)
    module = nn.Conv2d(inputs, outputs, 3, padding=padding).double()
    found, expected = gradients(module, torch.randn(examples, inputs, rows, width, dtype=torch.float64))
    assert_close(found, expected, rtol=0, atol=1e-12 * float(expected.abs().max()))


def test_single_precision_rounds_little_more_than_a_convolution() -> None:
    torch.manual_seed(0)
    module, value = nn.Conv2d(128, 128, 3, padding=1), torch.randn(4, 128, 8, 8)
    found, plain = gradients(module, value)
    exact, _ = gradients(module.double(), value.detach().double())
    error, usual = ((own - exact).norm() / exact.norm() for own in (found, plain))
    assert usual < error < 2e-6  # and so single precision was at work


@pytest.mark.parametrize(
    "module",
    [
        nn.Conv2d(4, 4, 5),
        nn.Conv2d(4, 4, (3, 1)),
        nn.Conv2d(4, 4, 3, stride=2),
        nn.Conv2d(4, 4, 3, dilation=2),
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(4, 4, 3, padding=3),
        nn.Conv2d(4, 4, 3, padding=(1, 0)),
        nn.Conv1d(4, 4, 3),
        nn.Linear(4, 4),
        type("Own", (nn.Conv2d,), {})(4, 4, 3),
    ],
    ids=str,
)
def test_other_layers_have_none(module: nn.Module) -> None:
    assert quick_backward(module) is None


def test_a_convolution_with_its_own_forward_has_none() -> None:
    module = nn.Conv2d(4, 4, 3)
    assert quick_backward(module) is not None
    module.forward = lambda value: value
    assert quick_backward(module) is None


def test_it_is_for_wide_layers_of_many_examples_in_single_precision() -> None:
    def pays(channels: int, side: int, examples: int = 32, **like: Any) -> bool:
        module = nn.Conv2d(channels, channels, 3, padding=1, **like)
        return QuickBackward(module).pays(torch.empty(1, channels, side, side, **like), examples)

    assert [pays(512, 4), pays(256, 8), pays(128, 16)] == [True] * 3
    assert [pays(64, 32), pays(32, 16), pays(512, 4, examples=1)] == [False] * 3
    assert not pays(512, 4, dtype=torch.float64)
    assert not pays(512, 4, device="meta")
    assert not QuickBackward(nn.Conv2d(512, 512, 3)).pays(torch.empty(512, 4, 4), 32)  # one example, without its axis


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every convolution that can has a quick backward; how many examples each had."""
    seen: list[int] = []
    plain = winograd.input_gradient

    def counted(gradient: Tensor, **arguments: Any) -> Tensor:
        seen.append(len(gradient))
        return plain(gradient, **arguments)

    monkeypatch.setattr(QuickBackward, "pays", lambda *_: True)
    monkeypatch.setattr(winograd, "input_gradient", counted)
    return seen


def quick_layers(case: Case) -> int:
    return sum(quick_backward(module) is not None for module in case.make().modules())


CONVOLUTIONS = [case for case in [*LAYER_CASES, *MODEL_CASES] if quick_layers(case)]


@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
def test_a_fit_and_its_scores_are_exact(case: Case, always: list[int]) -> None:
    assert_exact(fitted(case), case)
    assert always or quick_layers(case) == 1  # nothing is asked of the input of the first


def wide() -> nn.Module:
    """Convolutions wide enough, one of them twice, an activation in place after it; below, layers that are covered."""
    torch.manual_seed(0)
    shared = nn.Conv2d(128, 128, 3, padding=1)
    return nn.Sequential(
        *(nn.Conv2d(3, 128, 3, padding=1), nn.ReLU(), shared, nn.ReLU(inplace=True), shared, nn.BatchNorm2d(128)),
        *(nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 4)),
    ).eval()


@pytest.mark.filterwarnings("ignore:The running statistics")
def test_scores_are_the_same_with_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(20, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    seen: list[int] = []
    plain = winograd.input_gradient
    monkeypatch.setattr(winograd, "input_gradient", lambda *args, **kw: seen.append(1) or plain(*args, **kw))
    ifc = IFComp(wide(), damping=Relative(0.1), sua=True).fit([x], progress=False)
    assert seen  # it pays here
    seen.clear()
    found = ifc.influence(x)
    assert len(seen) == 2 * 3  # both uses, and one label follows from the others
    limited = ifc.score([x], max_memory="8GB", progress=False).frame
    assert len(seen) == 2 * 3  # none with a limit
    stacked = IFComp.from_factors(wide(), ifc.factors, damping=Relative(0.1), sua=True)
    monkeypatch.setattr("ifcomp.layers.session.stacks_cotangents", lambda device: True)
    seen.clear()
    assert_close(stacked.influence(x), found, rtol=1e-5, atol=0)
    assert not seen
    quick = ifc.score([x], progress=False).frame
    assert seen
    assert_close(torch.tensor(quick["surprise"]), torch.tensor(limited["surprise"]), rtol=1e-5, atol=0)


@pytest.mark.filterwarnings("ignore:The running statistics")
def test_weights_that_changed_since_the_last_time_are_taken() -> None:
    batch = as_batch(torch.randn(20, 3, 8, 8, generator=torch.Generator().manual_seed(1)))
    model = wide()

    def first_gradient(session: Session) -> Tensor:
        with session.attached():
            [(piece, _)] = session.pieces([batch], 1, "unused")
            recording = session.record(piece)
            gradients = recording.backward(torch.eye(4)[0].expand(20, 4))
            assert session._tape._filters[model[2]].data_ptr() == session._tape.room._places["filters of 2"].data_ptr()
        return recording.rows(session.recorded[0], gradients)

    session = Session(model, Selection(), batch)
    before = first_gradient(session)
    model[2].weight.data.mul_(1.5)  # no version of a tensor shows this
    after = first_gradient(session)
    assert torch.equal(after, first_gradient(Session(model, Selection(), batch)))
    assert not torch.allclose(after, before, rtol=0.1)


@pytest.mark.filterwarnings("ignore:The running statistics")
def test_what_it_holds_is_counted() -> None:
    batch = as_batch(torch.randn(2, 3, 8, 8))
    session = Session(wide(), Selection(), batch)
    with session.attached():
        footprint = session.footprint(batch)
    assert footprint.filters == 36 * 128 * 128 * 4
    assert footprint.turned == (2 * 36 * 4 * 128 + 3 * 128 * 64) * 4


@pytest.mark.filterwarnings("ignore:The running statistics")
@pytest.mark.parametrize("inside", [False, True])
def test_layers_that_autocast_casts_have_the_backward_of_pytorch(inside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time the model leaves autocast by itself."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.shift = wide(), nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            x = self.layers[2](self.layers[0](x) + self.shift)  # float32 in, bfloat16 out
            with torch.autocast("cpu", enabled=False) if inside else nullcontext():
                found: Tensor = self.layers[5:](self.layers[2](x.float()))
            return found

    seen: list[torch.dtype] = []
    plain = winograd.input_gradient

    def noted(gradient: Tensor, **arguments: Any) -> Tensor:
        seen.append(gradient.dtype)
        return plain(gradient, **arguments)

    monkeypatch.setattr(winograd, "input_gradient", noted)
    x = torch.randn(20, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    ifc = IFComp(Mixed(), damping=Relative(0.1), sua=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = ifc.fit([x], progress=False).influence(x)
    assert found.isfinite().all()
    assert set(seen) == ({torch.float32} if inside else set())


class TwoPrecisions(nn.Module):
    """A first layer in float64, and a network in float32."""

    def __init__(self) -> None:
        super().__init__()
        first, *above = wide()
        self.first, self.above = first.double(), nn.Sequential(*above)

    def forward(self, x: Tensor) -> Tensor:
        return self.above(self.first(x.double()).float())


@pytest.mark.filterwarnings("ignore:The running statistics")
def test_a_model_of_two_precisions(always: list[int]) -> None:
    x = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    ifc = IFComp(TwoPrecisions().eval(), damping=Relative(0.1), sua=True).fit([x], progress=False)
    assert not always
    plain = IFComp(wide(), damping=Relative(0.1), sua=True).fit([x], progress=False)
    assert always  # by the other
    assert_close(ifc.influence(x), plain.influence(x).double(), rtol=1e-3, atol=0)
