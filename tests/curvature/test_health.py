"""The health of layers: with numbers worked out by hand, on networks with one unhealthy layer, and in reports."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases import seeded
from ifcomp import IFComp, Relative
from ifcomp.curvature.factors import BlockFactors, Factors, FitSettings
from ifcomp.curvature.health import FACTOR, FittedCoverage, damping_factor, with_health
from ifcomp.layers.coverage import Coverage
from ifcomp.report import build_report
from oracles import example_jacobians, example_logits, label_gradients, label_probabilities

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
DAMPING = Relative(0.1)


def net(gain: float = 1.0, bias: float = 0.0) -> nn.Module:
    """Two branches; ``gain`` scales the second, ``bias`` shifts its units."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.head = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.relu(self.one(x)) + gain * torch.relu(self.two(x)))

    model = seeded(Branches)().double()
    with torch.no_grad():
        model.two.bias.add_(bias)
    return model


def coverage(model: nn.Module, damping: Any = DAMPING) -> FittedCoverage:
    result = IFComp(model, fisher="exact", damping=damping).fit([X]).coverage
    assert isinstance(result, FittedCoverage)
    return result


def verdicts(model: nn.Module, damping: Any = DAMPING) -> dict[str, str]:
    return {layer.name: layer.verdict for layer in coverage(model, damping).health}


# By hand


def double(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def health(damping: Any, **moments: Tensor) -> FittedCoverage:
    """The health of diagonal blocks with these second moments."""
    blocks = {name: BlockFactors(value) for name, value in moments.items()}
    return with_health(Coverage(()), Factors(blocks, 3, 2, FitSettings()), damping)


def test_health_by_hand() -> None:
    """At a damping of 1, b has 1e-9 of a's curvature and c has 1e-3 of it, which is less than the damping."""
    result = health(1.0, a=double(100.0, 50.0), b=double(1.5e-7), c=double(0.15), d=double(0.0))
    a, b, c, d = result.health
    assert [layer.verdict for layer in (a, b, c, d)] == ["fine", "faint", "damping", "dead"]
    assert [layer.name for layer in (a, b, c, d)] == ["a", "b", "c", "d"]
    assert (a.share, d.share) == (1.0, 0.0)
    assert (b.share, c.share) == (pytest.approx(1e-9), pytest.approx(1e-3))
    assert a.effective == pytest.approx(100 / 101 + 50 / 51)
    assert a.factor == pytest.approx((100 / 101 + 50 / 51) / (100 / 110 + 50 / 60))
    assert c.factor == pytest.approx((0.15 / 1.15) / (0.15 / 10.15))
    assert (d.effective, d.factor) == (0.0, 1.0)
    assert result.unhealthy == (b, c, d)
    assert result.suggested == Relative(0.1)
    lines = result.health_lines()
    assert lines[0] == "healthy: 1 of 4 layers at 1.0"
    assert [line.partition(":")[0] for line in lines[1:4]] == ["  b (faint)", "  c (damping)", "  d (dead)"]
    assert lines[4] == "suggested damping: Relative(multiple=0.1)"
    assert a.description == "fine"
    assert "divides its expected influence by 8.8" in c.description


def test_the_damping_stays_if_no_layer_can_be_judged() -> None:
    dead = health(1.0, a=double(0.0))
    assert dead.health[0].verdict == "dead"
    assert dead.suggested == 1.0
    assert health(2.0).suggested == 2.0


def test_the_smallest_damping_is_suggested_if_none_suffices() -> None:
    """Each layer has one direction of curvature 1 and very many tiny ones. Large multiples of the mean are too much for
    the first layer, small ones for the second.
    """
    moments = [torch.full((200_001,), total / 200_000, dtype=torch.float64) for total in (1e-5, 1e-9)]
    for layer in moments:
        layer[0] = 1.0
    assert health(Relative(0.1), a=moments[0], b=moments[1]).suggested == Relative(1e-8)


def test_the_factor_by_hand() -> None:
    moments = torch.tensor([4.0, 1.0, 0.0])
    expected = (4 / 5 + 1 / 2) / (4 / 14 + 1 / 11)
    assert damping_factor(moments, 1.0) == pytest.approx(expected)
    assert damping_factor(moments, 0.0) == 1.0
    assert damping_factor(moments, 1e-12) == pytest.approx(1.0, abs=1e-9)
    assert damping_factor(moments, 1e12) == pytest.approx(10.0, abs=1e-9)
    assert damping_factor(torch.zeros(3), 1.0) == 1.0


# On networks


@pytest.mark.parametrize("damping", [Relative(0.1), 1e-2])
def test_the_factor_is_the_effect_of_ten_times_the_damping(damping: Any) -> None:
    """The mean expected influence of one layer over the training data, at a damping divided by that at ten times it."""
    ifc = IFComp(net(), fisher="exact", layers="one", damping=damping).fit([X])
    more = Relative(10 * damping.multiple) if isinstance(damping, Relative) else 10 * damping
    once, again = (ifc.score([X], damping=value).frame["expected_influence"].mean() for value in (damping, more))
    result = ifc.coverage
    assert isinstance(result, FittedCoverage)
    assert result.health[0].factor == pytest.approx(once / again, rel=1e-9)
    assert result.health[0].effective == pytest.approx(once, rel=1e-9)


def test_a_healthy_network_is_fine() -> None:
    result = coverage(net())
    assert {layer.verdict for layer in result.health} == {"fine"}
    assert result.unhealthy == ()
    assert result.suggested == result.damping == Relative(0.1)
    assert str(result).splitlines()[-1] == "healthy: 3 of 3 layers at Relative(multiple=0.1)"


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
def test_a_layer_with_tiny_gradients_is_faint(damping: Any) -> None:
    result = coverage(net(gain=1e-7), damping)
    assert {layer.name: layer.verdict for layer in result.health} == {"one": "fine", "two": "faint", "head": "fine"}
    assert result.suggested == damping
    assert "two (faint)" in str(result)


def test_a_layer_below_the_damping_depends_on_it() -> None:
    """At a gain of 1e-3 second moments are near 1e-6, far below a damping of 1e-3."""
    result = coverage(net(gain=1e-3), 1e-3)
    unhealthy = {layer.name: layer for layer in result.unhealthy}
    assert unhealthy.keys() == {"two"}
    assert unhealthy["two"].verdict == "damping"
    assert FACTOR < unhealthy["two"].factor <= 10
    assert f"divides its expected influence by {unhealthy['two'].factor:.1f}" in str(result)
    assert result.suggested == Relative(0.1)
    assert str(result).splitlines()[-1] == "suggested damping: Relative(multiple=0.1)"
    assert verdicts(net(gain=1e-3), result.suggested)["two"] == "fine"


def test_the_largest_sufficient_damping_is_suggested() -> None:
    """One direction has a large curvature; the others are far below a tenth of the mean."""
    model = nn.Linear(4, 3, bias=False).double()
    nn.init.zeros_(model.weight)
    ifc = IFComp(model, fisher="exact", damping=1e3).fit([X * torch.tensor([1.0, 1e-2, 1e-2, 1e-2])])
    result, factors = ifc.coverage, ifc.factors
    assert isinstance(result, FittedCoverage)
    assert factors is not None
    moments = factors.blocks[""].second_moments
    assert result.health[0].name == "(model)"
    scaled = {10.0**-k: damping_factor(moments, 10.0**-k * float(moments.mean())) for k in range(1, 9)}
    assert result.suggested == Relative(max(multiple for multiple, factor in scaled.items() if factor <= FACTOR))


def test_a_report_names_unhealthy_layers(tmp_path: Path) -> None:
    for name, damping in (("unhealthy", 1e-3), ("fine", Relative(0.1))):
        build_report(tmp_path / name, title="health", coverage=coverage(net(gain=1e-3), damping))
    unhealthy, fine = ((tmp_path / name).read_text() for name in ("unhealthy", "fine"))
    assert "1 of 3 layers need attention; suggested damping: Relative(multiple=0.1)" in unhealthy
    assert "two (damping): ten times the damping divides" in unhealthy
    assert "need attention" not in fine


def test_before_the_fit_there_is_no_health() -> None:
    assert not isinstance(IFComp(net()).coverage, FittedCoverage)
