"""What can be known of GPUs without one: where tensors are made, and when the library would wait for a device."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from cases import LAYER_CASES, MODEL_CASES, Case
from ifcomp import Checkpoint, IFComp
from ifcomp.curvature.factors import Factors
from ifcomp.errors import FingerprintError

CASES = {case.name: case for case in (*LAYER_CASES, *MODEL_CASES)}
SOME = ["lenet", "embedding", "batchnorm2d", "groupnorm", "vision_transformer"]


def labelled(case: Case, size: int = 7) -> list[Any]:
    inputs, labels = case.sample(size), torch.arange(size) % case.num_classes
    return [{**inputs, "labels": labels} if isinstance(inputs, dict) else (inputs, labels)]


def everything(model: nn.Module, data: list[Any], inputs: Any, labels: Tensor, folder: Path) -> list[Any]:
    with Checkpoint(folder / "partial", every=0) as checkpoint:
        ifc = IFComp(model).fit(data, checkpoint=checkpoint)
    ifc.save(folder / "factors")
    loaded = IFComp.load(folder / "factors", model)
    explained = loaded.explain(inputs, labels, data, positions=[0, 1, 2, 3, 4])
    tables = [loaded.score(data).frame, loaded.score(data, probes=1, linearized=True).frame, explained.frame]
    return [*tables, ifc.influence(inputs), ifc.logit_kernel(inputs), ifc.predict_proba(inputs, alpha=1e-3)]


@pytest.mark.parametrize("name", SOME)
def test_the_default_device_does_not_matter(name: str, tmp_path: Path) -> None:
    """A tensor that is made without a device lands on ``meta`` here, and does not go together with any other."""
    case = CASES[name]
    given = case.make(), labelled(case), case.sample(5), torch.arange(5) % case.num_classes
    expected = everything(*given, tmp_path)
    with torch.device("meta"):
        found = everything(*given, tmp_path)
    for one, other in zip(found, expected, strict=True):
        if isinstance(one, Tensor):
            assert torch.equal(one, other)
        else:
            pd.testing.assert_frame_equal(one, other)


class Waits(TorchDispatchMode):
    """Operations after which a program on a GPU has to wait: a value, or a size, is needed on the CPU."""

    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := function.overloadpacket.__name__) in self.NAMES:
            self.seen[name] += 1
        return function(*args, **(kwargs or {}))


def network(classes: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    hidden = [part for _ in range(layers) for part in (nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU())]
    return nn.Sequential(nn.Conv2d(3, 4, 3), *hidden, nn.Flatten(), nn.Linear(4 * 36, classes))


def waits(classes: int, layers: int, call: Callable[[IFComp, Tensor], object], stacks: bool) -> Counter[str]:
    inputs = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    ifc = IFComp(network(classes, layers), fisher="exact").fit([inputs])
    ifc._session.stacks_cotangents = stacks
    call(ifc, inputs)
    with Waits() as seen:
        call(ifc, inputs)
    return seen.seen


CALLS = {
    "influence": IFComp.influence,
    "kernel": IFComp.logit_kernel,
    "distribution": lambda ifc, inputs: ifc.predict_proba(inputs, alpha=1e-3),
    "two batches": lambda ifc, inputs: ifc.influence(torch.cat([inputs, inputs])),
}


@pytest.mark.parametrize("stacks", [False, True], ids=["one by one", "stacked"])
@pytest.mark.parametrize("call", CALLS)
def test_waits_of_scoring_do_not_grow_with_labels_or_layers(call: str, stacks: bool) -> None:
    few = waits(3, 1, CALLS[call], stacks)
    assert few == waits(6, 1, CALLS[call], stacks) == waits(3, 3, CALLS[call], stacks)
    assert 0 < few.total() <= 4  # are inputs, logits and influence finite?


@pytest.mark.parametrize("fisher", ["sampled", "exact"])
def test_waits_of_a_batch_in_a_fit_do_not_grow_with_labels_or_layers(fisher: Any) -> None:
    def fit(classes: int, layers: int, batches: int) -> int:
        inputs = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(1))
        with Waits() as seen:
            IFComp(network(classes, layers), fisher=fisher).fit([inputs] * batches)
        return seen.seen.total()

    each = [fit(classes, layers, 4) - fit(classes, layers, 3) for classes, layers in ((3, 1), (6, 1), (3, 3))]
    assert each == [4, 4, 4]  # inputs and logits, in two passes


def test_half_precision_waits_once_a_backward() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).half()
    inputs = torch.randn(5, 6).half()
    ifc = IFComp(model).fit([inputs])
    ifc.influence(inputs)
    with Waits() as seen:
        ifc.influence(inputs)
    assert seen.seen.total() == 3 + 3  # three backwards for four labels


def test_factors_follow_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that moves has its tensors elsewhere, as here; so factors are asked to move to its device."""
    case, asked = CASES["lenet"], []
    model, inputs = case.make(), case.sample(5)
    ifc = IFComp(model).fit([inputs])
    expected = ifc.influence(inputs)
    plain = Factors.to

    def noted(factors: Factors, device: torch.device) -> Factors:
        asked.append(device)
        return plain(factors, device)

    monkeypatch.setattr(Factors, "to", noted)
    model._apply(lambda tensor: tensor.clone())
    assert torch.equal(ifc.influence(inputs), expected)
    assert asked == [torch.device("cpu")]
    assert torch.equal(IFComp.from_factors(model, ifc.factors).influence(inputs), expected)
    assert len(asked) == 2


def test_a_model_that_stays_is_not_examined_anew() -> None:
    """Weights are written, but their values do not change, as if the same weights are loaded."""
    case = CASES["lenet"]
    model, inputs = case.make(), case.sample(5)
    ifc = IFComp(model).fit([inputs])
    expected, session = ifc.influence(inputs), ifc._session
    model.load_state_dict(model.state_dict())
    assert torch.equal(ifc.influence(inputs), expected)
    assert ifc._session is session
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    with pytest.raises(FingerprintError):
        ifc.influence(inputs)
