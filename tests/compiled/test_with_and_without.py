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


def results(model: nn.Module, x: Tensor, fisher: str, sua: bool) -> tuple[dict[str, Tensor], list[Tensor]]:
    ifc = IFComp(model, fisher=fisher, damping=Relative(0.1), sua=sua).fit([x])
    moments = {name: block.second_moments for name, block in ifc.factors.blocks.items()}
    return moments, [ifc.influence(x), ifc.parametric_complexity(x, probes=2), ifc.logit_kernel(x)]


def check_without(
    model: nn.Module, x: Tensor, fisher: str, sua: bool, used: set[tuple[str, int, int]], patch: pytest.MonkeyPatch
) -> None:
    """Results with it in single precision, without it in single and in double; what was used is what was expected."""
    found: set[tuple[str, int, int]] = set()
    weigh, add, form = compiled.weighted_squares, compiled.add_squares, compiled.add_gradients

    def noted_weigh(rows: Tensor, inputs: Tensor, weights: Tensor) -> Tensor:
        found.add(("weigh", *rows.shape[2:]))
        return weigh(rows, inputs, weights)

    def noted_add(totals: Tensor, rows: Tensor, inputs: Tensor) -> None:
        found.add(("add", *rows.shape[2:]))
        add(totals, rows, inputs)

    def noted_form(gradients: Tensor, rows: Tensor, windows: compiled.Windows, bias: bool) -> None:
        found.add(("form", rows.shape[2], gradients.shape[2]))
        form(gradients, rows, windows, bias)

    patch.setattr(compiled, "weighted_squares", noted_weigh)
    patch.setattr(compiled, "add_squares", noted_add)
    patch.setattr(compiled, "add_gradients", noted_form)
    moments, scores = results(model, x, fisher, sua)
    assert used <= found
    found.clear()
    patch.setattr(compiled, "panel_width", lambda: 0)
    double = copy.deepcopy(model).double()
    for other, inputs, rtol in ((model, x, 1e-5), (double, x.double(), 1e-3)):
        other_moments, other_scores = results(other, inputs, fisher, sua)
        for name, own in moments.items():
            assert_close(own.double(), other_moments[name].double(), rtol=rtol, atol=1e-2 * rtol * float(own.max()))
        for own, expected in zip(scores, other_scores, strict=True):
            assert_close(own, expected, rtol=rtol, atol=1e-2 * rtol * float(expected.abs().max()))
    assert not found


@pytest.mark.parametrize("fisher", ["exact", "sampled"])
@pytest.mark.parametrize("columns", [rotation.COLUMN_ENTRIES, 20_000], ids=["all inputs at once", "some at a time"])
def test_the_same_without(fisher: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotation, "COLUMN_ENTRIES", columns)
    used = {(name, *shape) for name in ("weigh", "add") for shape in ((20, 200), (33, 50))}
    check_without(*network(), fisher, True, used, monkeypatch)


class Reused(nn.Module):
    """Convolutions with many positions: one that is used twice, on images of two sizes; one on groups, whose examples
    come in four parts each; and one in three axes without a bias.
    """

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Conv2d(3, 4, 3, padding=1)
        self.parts = nn.Conv1d(4, 6, 5, stride=2, padding=3, groups=2, padding_mode="circular")
        self.solid = nn.Conv3d(1, 3, (2, 3, 2), bias=False)
        self.last = nn.Linear(6 * 4 + 3, 4)

    def forward(self, x: Tensor) -> Tensor:
        large, small = torch.tanh(self.twice(x)), torch.tanh(self.twice(x[:, :, ::2, ::2]))
        rows = large.unflatten(2, (4, -1)).permute(0, 2, 1, 3, 4).flatten(3).flatten(0, 1)  # [4 B, 4, 4 * 20]
        means = torch.tanh(self.parts(rows)).mean(2).view(len(x), -1)
        return self.last(torch.cat([means, torch.tanh(self.solid(small.unsqueeze(1))).mean((2, 3, 4))], 1))


@pytest.mark.parametrize("fisher", ["exact", "sampled"])
@pytest.mark.parametrize("slab", [rotation.FORMED_ENTRIES, 1_000, 1], ids=["all", "some", "one"])
def test_gradients_from_windows_are_the_same_without(fisher: str, slab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions and columns of every image, the columns in whole vectors where these are hardly more."""
    torch.manual_seed(0)
    model, x = Reused(), torch.randn(13, 3, 16, 20, generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(rotation, "FORMED_ENTRIES", slab)
    used = {("form", *shape) for shape in ((320, 32), (80, 32), (164, 11), (162, 12))}
    check_without(model, x, fisher, False, used, monkeypatch)
