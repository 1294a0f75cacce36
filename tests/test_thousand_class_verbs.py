"""Every verb runs end to end on an architecture of torchvision with 1,000 classes."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from experiments.torchvision_shim import declare_missing_operators
from ifcomp import IFComp

pytestmark = [pytest.mark.second_tier, pytest.mark.filterwarnings("ignore::ifcomp.errors.IfcompWarning")]

CLASSES = 1_000


def shufflenet() -> nn.Module:
    """ShuffleNet with random weights and running statistics."""
    declare_missing_operators()
    from torchvision.models import shufflenet_v2_x0_5

    torch.manual_seed(0)
    model: nn.Module = shufflenet_v2_x0_5(weights=None)
    model(torch.randn(32, 3, 32, 32))
    return model.eval()


def data(count: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, 32, 32, generator=generator)
    return list(zip(x.split(16), (torch.arange(count) % 12 * 80).split(16), strict=True))


def test_every_verb_runs_with_a_thousand_classes(tmp_path: Path) -> None:
    train, held_out = data(48, 0), data(48, 1)
    ifc = IFComp(shufflenet()).fit(train, progress=False)
    assert ifc.factors is not None
    assert ifc.factors.num_classes == CLASSES
    x, y = held_out[0]
    calibration = ifc.calibrate(held_out, progress=False)
    probability = ifc.predict_proba(x, 0.15)
    torch.testing.assert_close(probability.sum(1), torch.ones(16).double())
    assert bool((probability.argmax(1) == ifc.model(x).argmax(1)).all())
    assert bool(ifc.predict_set(x, 0.9).any(1).all())
    gate = ifc.ood_detector(held_out, progress=False)
    assert gate.predict(3 * x).shape == (16,)
    audit = ifc.audit(train, progress=False)
    assert audit.pred_probs.shape == (48, CLASSES)
    assert len(ifc.score(train, probes=2, progress=False)) == 48
    assert len(ifc.prune(data(1, 2), 0.5, progress=False)) == 1
    assert len(ifc.explain(x[:1], y[:1], train, k=2, progress=False).frame) == 4
    report = ifc.report(
        tmp_path / "report.html", audit=audit, ood=gate.table(held_out, progress=False), calibration=calibration
    )
    assert report.stat().st_size > 10_000
    ifc.save(tmp_path / "run.ifcomp")
    loaded = IFComp.load(tmp_path / "run.ifcomp", ifc.model)
    torch.testing.assert_close(loaded.predict_proba(x, 0.15), probability)
