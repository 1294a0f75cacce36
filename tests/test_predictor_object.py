"""`IFComp` as an object: its line of text, copies and pickles."""

import copy
import pickle
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from ifcomp import IFComp
from ifcomp.errors import FingerprintError

LABELS = torch.arange(60) % 3


class ResNet18(nn.Module):
    """A small network with the name of the contract."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).relu().mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.LSTM(5, 7, batch_first=True), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cells(x)[0][:, -1])


@cache
def inputs(kind: type[nn.Module]) -> Tensor:
    shape = (60, 1, 8, 8) if kind is ResNet18 else (60, 4, 5)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def network(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    model = kind()
    with torch.no_grad():
        model(inputs(kind))  # running statistics
    return model.eval()


def pickled(ifc: IFComp) -> IFComp:
    return pickle.loads(pickle.dumps(ifc))  # noqa: S301  (our own bytes)


def test_text() -> None:
    ifc = IFComp(network(ResNet18))
    assert repr(ifc) == "IFComp(ResNet18, not fitted, 100 % covered, beta 1)"
    assert ifc.training_accuracy is None
    ifc.fit((inputs(ResNet18).repeat(20, 1, 1, 1), LABELS.repeat(20)))
    assert str(ifc) == "IFComp(ResNet18, fitted on 1,200 examples, 3 classes, 100 % covered, beta 1)"
    assert ifc._repr_html_().startswith(f"<p>{ifc!r}</p><p>training accuracy ")
    assert "<td>conv</td>" in ifc._repr_html_()


def test_text_of_a_partial_fit() -> None:
    model = network(ResNet18)
    ifc = IFComp(model, beta=0.5, layers="last").fit((inputs(ResNet18), LABELS))
    share = int(1000 * 15 / (40 + 8 + 15)) / 10
    assert repr(ifc) == f"IFComp(ResNet18, fitted on 60 examples, 3 classes, {share:g} % covered, beta 0.5)"


@pytest.mark.filterwarnings("ignore:60 held-out examples are few")
@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@pytest.mark.parametrize("kind", [ResNet18, Recurrent])
def test_copies_of_a_fit_give_the_same_results(kind: type[nn.Module], copied: Callable[[IFComp], IFComp]) -> None:
    x = inputs(kind)
    ifc = IFComp(network(kind)).fit((x, LABELS))
    calibration = ifc.calibrate((x, LABELS))
    again = copied(ifc)
    assert again.model is not ifc.model
    assert repr(again) == repr(ifc)
    assert again.coverage == ifc.coverage
    assert again.training_accuracy == ifc.training_accuracy is not None
    assert again.calibration is not None
    assert again.calibration.frame.equals(calibration.frame)
    assert torch.equal(again.predict_proba(x), ifc.predict_proba(x))
    assert torch.equal(again.predict_set(x, 0.8), ifc.predict_set(x, 0.8))
    assert again.score((x, LABELS)).frame.equals(ifc.score((x, LABELS)).frame)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@pytest.mark.parametrize("kind", [ResNet18, Recurrent])
def test_copies_before_the_fit_can_be_fitted(kind: type[nn.Module], copied: Callable[[IFComp], IFComp]) -> None:
    x = inputs(kind)
    ifc = IFComp(network(kind), beta=0.5, damping=1e-3)
    again = copied(ifc)
    expected = ifc.fit((x, LABELS)).influence(x)
    assert torch.equal(again.fit((x, LABELS)).influence(x), expected)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_of_a_changed_model_is_refused(copied: Callable[[IFComp], IFComp]) -> None:
    x = inputs(ResNet18)
    ifc = IFComp(network(ResNet18)).fit((x, LABELS))
    with torch.no_grad():
        ifc.model.get_parameter("head.weight").mul_(2)
    with pytest.raises(FingerprintError, match=r"head\.weight"):
        copied(ifc).influence(x)
