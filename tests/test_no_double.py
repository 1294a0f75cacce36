"""On a device without float64, no tensor of 64-bit floats is created there, and results are those of the CPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from cases import CASES, Case
from comparison import as_type, labelled
from ifcomp import Checkpoint, IFComp
from ifcomp.curvature.factors import Relative
from ifcomp.oracle.hindsight import hindsight
from pretended_device import DEVICE, DeviceTensor, MixedDevicesError, NoDoubleError, on_device, pretended_device

#: An MLP, a conv net with BatchNorm, attention, an embedding, parameters without a rule.
_NAMES = ["linear", "lenet", "encoder_layer", "embedding", "embedding_bag_mean", "class_token", "lstm"]


def training_data(case: Case) -> list[Any]:
    return [labelled(case.sample(7, seed=1), torch.arange(7) % case.num_classes)]


def fitted(model: nn.Module, case: Case, **options: Any) -> IFComp:
    return IFComp(model, **options).fit(training_data(case))


def scores(model: nn.Module, case: Case, folder: Path) -> list[Any]:
    ifc = fitted(model, case, fisher="exact")
    inputs = case.sample(5)
    ifc.save(folder / "factors")
    loaded = IFComp.load(folder / "factors", model)
    data = training_data(case)
    with Checkpoint(folder / "partial", every=0) as checkpoint:
        table = loaded.score(data, checkpoint=checkpoint)
    return [
        table.frame,
        loaded.score(data, probes=2, damping=Relative(1e-4)).frame,
        loaded.explain(inputs, torch.arange(5) % case.num_classes, data).frame,
        ifc.influence(inputs),
        ifc.logit_kernel(inputs),
        ifc.predict_proba(inputs, alpha=1e-3),
        ifc.bounded_complexity(inputs, damping=0.0),
        ifc.coverage,
    ]


def estimates(model: nn.Module, case: Case, folder: Path) -> list[Any]:
    sampled, empirical = fitted(model, case, label_samples=2), fitted(model, case, fisher="empirical")
    with Checkpoint(folder / "fit", every=0) as checkpoint:
        saved = IFComp(model).fit(training_data(case), checkpoint=checkpoint)
    return [ifc.influence(case.sample(3)) for ifc in (sampled, empirical, saved)]


CALLS = {"scores": scores, "estimates": estimates}


def assert_equal(results: list[Any], expected: list[Any]) -> None:
    """Compare up to the rounding of float32: fused operations of the CPU are split on the device."""
    for result, reference in zip(results, expected, strict=True):
        if isinstance(result, Tensor):
            assert result.device.type == "cpu"
            assert_close(result, reference, rtol=1e-3, atol=1e-6)
        elif isinstance(result, pd.DataFrame):
            pd.testing.assert_frame_equal(result, reference, rtol=1e-3, atol=1e-6)
        else:
            assert str(result) == str(reference)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", _NAMES)
def test_float64_is_not_made_on_the_device(
    name: str, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, run = CASES[name], CALLS[call]
    for folder in ("cpu", "device"):
        (tmp_path / folder).mkdir()
    expected = run(case.make(), case, tmp_path / "cpu")
    with pretended_device(monkeypatch):
        results = run(on_device(case.make()), case, tmp_path / "device")
    assert_equal(results, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_has_no_float64_on_the_device(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    def influence(make: Callable[[nn.Module], nn.Module]) -> Tensor:
        inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(1)).to(dtype)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        model.append(Shift(4))
        return IFComp(make(model.to(dtype)), fisher="exact").fit([inputs]).influence(inputs)

    expected = influence(lambda model: model)
    with pretended_device(monkeypatch):
        assert torch.equal(influence(on_device), expected)


@pytest.mark.parametrize("name", ["lenet", "class_token", "embedding"])
def test_a_float64_model_stays_on_its_device(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the device has float64."""
    case = CASES[name]
    inputs = as_type(case.sample(4), torch.float64)
    data = [labelled(as_type(case.sample(7, seed=1), torch.float64), torch.arange(7) % case.num_classes)]

    def results(model: nn.Module) -> list[Tensor]:
        ifc = IFComp(model.double()).fit(data)
        ifc.explain(inputs, torch.arange(4) % case.num_classes, data)
        return [ifc.influence(inputs), ifc.logit_kernel(inputs), ifc.bounded_complexity(inputs)]

    expected = results(case.make())
    with pretended_device(monkeypatch, exempt=("",)):
        found = results(on_device(case.make().double()))
        assert {value.device for value in found} == {DEVICE}
        for value, reference in zip(found, expected, strict=True):
            assert_close(value.cpu(), reference)


def test_the_ground_truth_has_no_float64_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["linear"]

    def probabilities(model: nn.Module) -> list[Any]:
        data = training_data(case)
        constrained = hindsight(model, data, case.sample(1), lam=1.0, alpha=0.1, max_iterations=3, progress=False)
        return [constrained.log_probability, constrained.log_base]

    expected = probabilities(case.make())
    with pretended_device(monkeypatch):
        assert_equal(probabilities(on_device(case.make())), expected)


class Shift(nn.Module):
    """A parameter without a layer rule."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(size))

    def forward(self, value: Tensor) -> Tensor:
        return value + self.shift


def test_the_pretended_device_refuses_float64_and_mixed_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other tests of this file depend on these errors."""
    with pretended_device(monkeypatch) as mode:
        device = DEVICE
        value = torch.ones(3).to(device)
        assert isinstance(value, DeviceTensor)
        assert value.device == torch.zeros(2, device=device).device == device
        assert torch.equal(value.cpu().double(), torch.ones(3, dtype=torch.float64))
        for make in (
            value.double,
            lambda: torch.zeros(2, dtype=torch.float64, device=device),
            lambda: value.to(torch.complex128),
            lambda: torch.ones(3, dtype=torch.float64).to(device),
        ):
            with pytest.raises(NoDoubleError):
                make()
        with pytest.raises(MixedDevicesError):
            value + torch.ones(3)
        assert (value + torch.ones(())).device == device
        copies = mode.copies
        value.to(device).cpu().cpu().to(device)
        assert mode.copies == copies + 2


@pytest.mark.parametrize("call", [IFComp.influence, IFComp.logit_kernel])
def test_copies_do_not_grow_with_labels_or_layers(
    call: Callable[[IFComp, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy between the devices waits for all operations before it."""

    def copies(classes: int, layers: int) -> int:
        torch.manual_seed(0)
        hidden = [part for _ in range(layers) for part in (nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh())]
        model, inputs = nn.Sequential(*hidden, nn.Linear(6, classes)), torch.randn(4, 6)
        with pretended_device(monkeypatch) as mode:
            ifc = IFComp(on_device(model)).fit([inputs])
            call(ifc, inputs)  # memory is measured
            before = mode.copies
            call(ifc, inputs)
            return mode.copies - before

    assert copies(3, 1) == copies(6, 1) == copies(3, 3) <= 6
