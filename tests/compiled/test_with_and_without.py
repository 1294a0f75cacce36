"""Fits and scores of networks go through the library, and are the same without it."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from ifcomp import IFComp, Relative, compiled
from ifcomp.curvature import rotation

pytestmark = pytest.mark.skipif(not compiled.panel_width(), reason="there is no library here")


def network() -> tuple[nn.Module, Tensor]:
    """Convolutions with 200 and with 50 positions, one of them on groups, and a layer on tokens."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(25, 20, 3, padding=1), nn.Tanh(), nn.Conv2d(20, 20, 3, stride=2, padding=1, groups=2), nn.Tanh()),
        *(nn.Conv2d(20, 33, 3, padding=1, bias=False), nn.Tanh(), nn.AdaptiveAvgPool2d(4), nn.Flatten(2)),
        *(nn.Linear(16, 18), nn.Tanh(), nn.Flatten(), nn.Linear(33 * 18, 4)),
    )
    return model, torch.randn(23, 25, 10, 20, generator=torch.Generator().manual_seed(1))


def results(model: nn.Module, x: Tensor, fisher: str) -> tuple[dict[str, Tensor], list[Tensor]]:
    ifc = IFComp(model, fisher=fisher, damping=Relative(0.1), sua=True).fit([x])
    moments = {name: block.second_moments for name, block in ifc.factors.blocks.items()}
    return moments, [ifc.influence(x), ifc.parametric_complexity(x, probes=2), ifc.logit_kernel(x)]


@pytest.mark.parametrize("fisher", ["exact", "sampled"])
@pytest.mark.parametrize("columns", [rotation.COLUMN_ENTRIES, 20_000], ids=["all inputs at once", "some at a time"])
def test_the_same_without(fisher: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With it in single precision, without it in single and in double."""
    model, x = network()
    monkeypatch.setattr(rotation, "COLUMN_ENTRIES", columns)
    used: list[tuple[str, torch.Size]] = []
    weigh, add = compiled.weighted_squares, compiled.add_squares

    def noted_weigh(rows: Tensor, inputs: Tensor, weights: Tensor) -> Tensor:
        used.append(("weigh", rows.shape[2:]))
        return weigh(rows, inputs, weights)

    def noted_add(totals: Tensor, rows: Tensor, inputs: Tensor) -> None:
        used.append(("add", rows.shape[2:]))
        add(totals, rows, inputs)

    monkeypatch.setattr(compiled, "weighted_squares", noted_weigh)
    monkeypatch.setattr(compiled, "add_squares", noted_add)
    moments, scores = results(model, x, fisher)
    assert {(name, shape) for name in ("weigh", "add") for shape in ((20, 200), (33, 50))} <= set(used)
    used.clear()
    monkeypatch.setattr(compiled, "panel_width", lambda: 0)
    double = copy.deepcopy(model).double()
    for other, inputs, rtol in ((model, x, 1e-5), (double, x.double(), 1e-3)):
        other_moments, other_scores = results(other, inputs, fisher)
        for name, own in moments.items():
            assert_close(own.double(), other_moments[name].double(), rtol=rtol, atol=1e-2 * rtol * float(own.max()))
        for found, expected in zip(scores, other_scores, strict=True):
            assert_close(found, expected, rtol=rtol, atol=1e-2 * rtol * float(expected.abs().max()))
    assert not used
