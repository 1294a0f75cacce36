"""The health of layers: by hand, on networks with one sick layer, and where it is shown."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cases import seeded
from ifcomp import IFComp, Relative
from ifcomp.curvature.health import FACTOR, FittedCoverage, damping_factor
from ifcomp.report import build_report
from oracles import example_jacobians, example_logits, label_gradients, label_probabilities

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
USUAL = Relative(0.1)


def net(gain: float = 1.0, bias: float = 0.0) -> nn.Module:
    """Two branches; ``gain`` is what the logits get of the second, ``bias`` moves its units."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.head = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.relu(self.one(x)) + gain * torch.relu(self.two(x)))

    model = seeded(Branches)().double()
    with torch.no_grad():
        model.two.bias.add_(bias)
    return model


def coverage(model: nn.Module, damping: Any = USUAL) -> FittedCoverage:
    found = IFComp(model, fisher="exact", damping=damping).fit([X]).coverage
    assert isinstance(found, FittedCoverage)
    return found


def verdicts(model: nn.Module, damping: Any = USUAL) -> dict[str, str]:
    return {layer.name: layer.verdict for layer in coverage(model, damping).health}


def test_the_factor_by_hand() -> None:
    moments = torch.tensor([4.0, 1.0, 0.0])
    expected = (4 / 5 + 1 / 2) / (4 / 14 + 1 / 11)
    assert damping_factor(moments, 1.0) == pytest.approx(expected)
    assert damping_factor(moments, 0.0) == 1.0
    assert damping_factor(moments, 1e-12) == pytest.approx(1.0, abs=1e-9)
    assert damping_factor(moments, 1e12) == pytest.approx(10.0, abs=1e-9)
    assert damping_factor(torch.zeros(3), 1.0) == 1.0


@pytest.mark.parametrize("damping", [Relative(0.1), 1e-2])
def test_the_factor_is_what_ten_times_the_damping_does(damping: Any) -> None:
    """The mean expected influence of one layer over the training data, at a damping and at ten times as much."""
    ifc = IFComp(net(), fisher="exact", layers="one", damping=damping).fit([X])
    more = Relative(10 * damping.multiple) if isinstance(damping, Relative) else 10 * damping
    once, again = (ifc.score([X], damping=value).frame["expected_influence"].mean() for value in (damping, more))
    found = ifc.coverage
    assert isinstance(found, FittedCoverage)
    assert found.health[0].factor == pytest.approx(once / again, rel=1e-9)
    assert found.health[0].effective == pytest.approx(once, rel=1e-9)


def test_a_sound_network_is_fine() -> None:
    found = coverage(net())
    assert {layer.verdict for layer in found.health} == {"fine"}
    assert found.unhealthy == ()
    assert found.suggested == found.damping == Relative(0.1)
    assert str(found).splitlines()[-1] == "healthy: 3 of 3 layers at Relative(multiple=0.1)"


def test_the_share_is_that_of_squared_gradients() -> None:
    model = net(gain=0.3)
    probability = label_probabilities(example_logits(model, X), 1.0)
    jacobians = example_jacobians(model, X)
    sizes = {}
    for layer in ("one", "two", "head"):
        squares = [label_gradients(jacobians[f"{layer}.{part}"], probability).square() for part in ("weight", "bias")]
        sizes[layer] = sum(float((probability * part.flatten(2).sum(2)).sum(1).mean()) for part in squares)
    for layer in coverage(model).health:
        assert layer.share == pytest.approx(sizes[layer.name] / max(sizes.values()), rel=1e-9)


def test_a_layer_without_gradients_is_dead() -> None:
    assert verdicts(net(bias=-100.0)) == {"one": "fine", "two": "dead", "head": "fine"}


@pytest.mark.parametrize("damping", [Relative(0.1), 1e-12, 1e-4], ids=repr)
def test_a_layer_next_to_nothing_is_faint(damping: Any) -> None:
    found = coverage(net(gain=1e-7), damping)
    assert {layer.name: layer.verdict for layer in found.health} == {"one": "fine", "two": "faint", "head": "fine"}
    assert found.suggested == damping
    assert "two (faint)" in str(found)


def test_a_layer_below_the_damping_hangs_on_it() -> None:
    """A gain of 1e-3 leaves second moments of 1e-6, far below a damping of 1e-3."""
    found = coverage(net(gain=1e-3), 1e-3)
    sick = {layer.name: layer for layer in found.unhealthy}
    assert sick.keys() == {"two"}
    assert sick["two"].verdict == "damping"
    assert FACTOR < sick["two"].factor <= 10
    assert f"divides its expected influence by {sick['two'].factor:.1f}" in str(found)
    assert found.suggested == Relative(0.1)
    assert str(found).splitlines()[-1] == "suggested damping: Relative(multiple=0.1)"
    assert verdicts(net(gain=1e-3), found.suggested)["two"] == "fine"


def test_the_largest_damping_that_will_do_is_suggested() -> None:
    """A spectrum with one large direction: the others are far below a tenth of the mean."""
    model = nn.Linear(4, 3, bias=False).double()
    nn.init.zeros_(model.weight)
    ifc = IFComp(model, fisher="exact", damping=1e3).fit([X * torch.tensor([1.0, 1e-2, 1e-2, 1e-2])])
    found, factors = ifc.coverage, ifc.factors
    assert isinstance(found, FittedCoverage)
    assert factors is not None
    moments = factors.blocks[""].second_moments
    assert found.health[0].name == "(model)"
    scaled = {10.0**-k: damping_factor(moments, 10.0**-k * float(moments.mean())) for k in range(1, 9)}
    assert found.suggested == Relative(max(multiple for multiple, factor in scaled.items() if factor <= FACTOR))


def test_a_report_names_unhealthy_layers(tmp_path: Path) -> None:
    for name, damping in (("sick", 1e-3), ("fine", Relative(0.1))):
        build_report(tmp_path / name, title="health", coverage=coverage(net(gain=1e-3), damping))
    sick, fine = ((tmp_path / name).read_text() for name in ("sick", "fine"))
    assert "1 of 3 layers need attention; suggested damping: Relative(multiple=0.1)" in sick
    assert "two (damping): ten times the damping divides" in sick
    assert "need attention" not in fine


def test_before_the_fit_there_is_no_health() -> None:
    assert not isinstance(IFComp(net()).coverage, FittedCoverage)
