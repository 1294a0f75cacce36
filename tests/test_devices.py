"""Properties of GPU runs that a CPU can check: the device of new tensors, and synchronisations with the device."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from cases import CASES, Case
from comparison import labelled
from ifcomp import Checkpoint, IFComp
from ifcomp.curvature.factors import Factors
from ifcomp.errors import FingerprintError


def training_data(case: Case) -> list[Any]:
    return [labelled(case.sample(7), torch.arange(7) % case.num_classes)]


def everything(model: nn.Module, data: list[Any], inputs: Any, labels: Tensor, folder: Path) -> list[Any]:
    """Results of a fit with a checkpoint, of a saved fit, and of every kind of call."""
    with Checkpoint(folder / "partial", every=0) as checkpoint:
        ifc = IFComp(model).fit(data, checkpoint=checkpoint)
    ifc.save(folder / "factors")
    loaded = IFComp.load(folder / "factors", model)
    explained = loaded.explain(inputs, labels, data, positions=[0, 1, 2, 3, 4])
    tables = [loaded.score(data).frame, loaded.score(data, probes=1, linearized=True).frame, explained.frame]
    return [*tables, ifc.influence(inputs), ifc.logit_kernel(inputs), ifc.predict_proba(inputs, alpha=1e-3)]


@pytest.mark.parametrize("name", ["lenet", "embedding", "batchnorm2d", "groupnorm", "vision_transformer"])
def test_results_do_not_depend_on_the_default_device(name: str, tmp_path: Path) -> None:
    """A tensor that is made without a device would be on ``meta`` and could not be combined with others."""
    case = CASES[name]
    given = case.make(), training_data(case), case.sample(5), torch.arange(5) % case.num_classes
    expected = everything(*given, tmp_path)
    with torch.device("meta"):
        results = everything(*given, tmp_path)
    for result, reference in zip(results, expected, strict=True):
        if isinstance(result, Tensor):
            assert torch.equal(result, reference)
        else:
            pd.testing.assert_frame_equal(result, reference)


class Synchronisations(TorchDispatchMode):
    """Counts operations for which a program on a GPU has to wait: their result is a value or a size on the CPU.

    Attributes:
        counts: Number of calls by operation.
    """

    OPERATIONS = ("_local_scalar_dense", "nonzero", "masked_select", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := function.overloadpacket.__name__) in self.OPERATIONS:
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))


def network(classes: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    hidden = [part for _ in range(layers) for part in (nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU())]
    return nn.Sequential(nn.Conv2d(3, 4, 3), *hidden, nn.Flatten(), nn.Linear(4 * 36, classes))


def synchronisations(classes: int, layers: int, call: Callable[[IFComp, Tensor], object]) -> Counter[str]:
    """Synchronisations of a call after a first one, in which memory is measured."""
    inputs = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    ifc = IFComp(network(classes, layers), fisher="exact").fit([inputs])
    call(ifc, inputs)
    with Synchronisations() as seen:
        call(ifc, inputs)
    return seen.counts


CALLS = {
    "influence": IFComp.influence,
    "kernel": IFComp.logit_kernel,
    "distribution": lambda ifc, inputs: ifc.predict_proba(inputs, alpha=1e-3),
    "two batches": lambda ifc, inputs: ifc.influence(torch.cat([inputs, inputs])),
}


@pytest.mark.parametrize("call", CALLS)
def test_synchronisations_of_scoring_do_not_grow_with_labels_or_layers(call: str) -> None:
    few = synchronisations(3, 1, CALLS[call])
    assert few == synchronisations(6, 1, CALLS[call]) == synchronisations(3, 3, CALLS[call])
    assert 0 < few.total() <= 4  # checks that inputs, logits and influence are finite


@pytest.mark.parametrize("fisher", ["sampled", "exact"])
def test_synchronisations_of_a_fit_do_not_grow_with_labels_or_layers(fisher: Any) -> None:
    def fit(classes: int, layers: int, batches: int) -> int:
        inputs = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(1))
        with Synchronisations() as seen:
            IFComp(network(classes, layers), fisher=fisher).fit([inputs] * batches)
        return seen.counts.total()

    per_batch = [fit(classes, layers, 4) - fit(classes, layers, 3) for classes, layers in ((3, 1), (6, 1), (3, 3))]
    assert per_batch == [4, 4, 4]  # inputs and logits are checked in two passes


def test_half_precision_synchronises_once_per_backward() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).half()
    inputs = torch.randn(5, 6).half()
    ifc = IFComp(model).fit([inputs])
    ifc.influence(inputs)
    with Synchronisations() as seen:
        ifc.influence(inputs)
    assert seen.counts.total() == 3 + 4  # four labels


def test_factors_are_moved_with_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parameters of a model that was moved have other addresses."""
    case, devices = CASES["lenet"], []
    model, inputs = case.make(), case.sample(5)
    ifc = IFComp(model).fit([inputs])
    expected = ifc.influence(inputs)
    move = Factors.to

    def recorded(factors: Factors, device: torch.device) -> Factors:
        devices.append(device)
        return move(factors, device)

    monkeypatch.setattr(Factors, "to", recorded)
    model._apply(lambda tensor: tensor.clone())
    assert torch.equal(ifc.influence(inputs), expected)
    assert devices == [torch.device("cpu")]
    assert torch.equal(IFComp.from_factors(model, ifc.factors).influence(inputs), expected)
    assert len(devices) == 2


def test_an_unchanged_model_is_not_verified_again() -> None:
    """Loading the same weights writes to the parameters without changing them."""
    case = CASES["lenet"]
    model, inputs = case.make(), case.sample(5)
    ifc = IFComp(model).fit([inputs])
    expected, recorder = ifc.influence(inputs), ifc._recorder
    model.load_state_dict(model.state_dict())
    assert torch.equal(ifc.influence(inputs), expected)
    assert ifc._recorder is recorder
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    with pytest.raises(FingerprintError):
        ifc.influence(inputs)
