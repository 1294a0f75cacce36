"""Rules are checked on the first batch, and models that run otherwise later are noticed."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.testing import assert_close

from cases import seeded
from ifcomp import IFComp
from ifcomp.errors import ModelError


class LongOnly(nn.Module):
    """A layer that runs for sequences of more than two positions only, sequence first."""

    def __init__(self) -> None:
        super().__init__()
        self.extra, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > 2:
            x = self.extra(x.transpose(0, 1)).tanh().transpose(0, 1)
        return self.head(x.mean(1))


class HeadFirst(nn.Module):
    """A head that is defined before the body."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.body = nn.Linear(5, 3), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())


def sequences(length: int) -> Tensor:
    return torch.randn(6, length, 4, generator=torch.Generator().manual_seed(length))


def test_a_layer_that_did_not_run_when_checked_is_named() -> None:
    with pytest.raises(ModelError, match=r"'extra'.*checked first.*layers="):
        IFComp(seeded(LongOnly)()).fit([sequences(2), sequences(5)])
    assert IFComp(seeded(LongOnly)()).fit([sequences(5), sequences(2)]).influence(sequences(3)).isfinite().all()


def test_the_last_layer_to_run_is_loaded_again(tmp_path: Path) -> None:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    ifc = IFComp(seeded(HeadFirst)(), layers="last").fit([x])
    ifc.save(tmp_path / "run.ifcomp")
    loaded = IFComp.load(tmp_path / "run.ifcomp", seeded(HeadFirst)())
    assert [row.name for row in loaded.coverage.rows if row.covered] == ["head"]
    assert torch.equal(loaded.influence(x), ifc.influence(x))


def test_what_was_demoted_stays_demoted_after_loading(tmp_path: Path) -> None:
    """On blank sequences nothing tells where the batch axis of the first layer is."""
    ifc = IFComp(seeded(LongOnly)(), damping=1e-2).fit([torch.zeros(6, 3, 4), sequences(3)])
    ifc.save(tmp_path / "run.ifcomp")
    loaded = IFComp.load(tmp_path / "run.ifcomp", seeded(LongOnly)())
    assert_close(loaded.influence(sequences(4)), ifc.influence(sequences(4)), rtol=1e-6, atol=0)


def test_the_last_layer_has_a_weight() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), weight_norm(nn.Linear(5, 3)))
    assert [row.name for row in IFComp(model, layers="last").coverage.rows if row.covered] == ["0"]
