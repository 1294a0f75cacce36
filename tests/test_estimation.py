"""Estimates of memory, disk and time against measured peaks and file sizes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ifcomp import IFComp
from ifcomp.curvature.sizes import factor_bytes
from ifcomp.errors import DataError, EmptyDataError, MemoryLimitError, SettingError
from ifcomp.estimation import Estimate, estimate, process_bytes
from tracking import Alive


def net(classes: int = 10) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(8),
        nn.Flatten(),
        nn.Linear(64, classes),
    ).eval()


def data(count: int = 2, size: int = 32) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(size, 3, 16, 16), torch.randint(10, (size,))) for _ in range(count)]


def quick(model: nn.Module, batches: Any, **options: Any) -> Estimate:
    return estimate(model, batches, seconds=0.01, **options)


@pytest.mark.parametrize("options", [{"fisher": "exact"}, {"fisher": "sampled"}, {"sua": True}, {"layers": ["3", "7"]}])
def test_estimated_peaks_are_within_30_percent(options: dict[str, Any]) -> None:
    model, batches = net(), data()
    found = quick(model, batches, **options)
    ifc = IFComp(model, **options)
    with Alive() as fitting:
        ifc.fit(batches)
    recorder = ifc._recorder
    assert recorder is not None
    factors = factor_bytes(recorder.blocks, 4)
    with Alive() as scoring:
        ifc.score(batches)
    assert 0.7 < process_bytes(fitting.peak) / found.fit_memory < 1.3
    assert 0.7 < process_bytes(scoring.peak + factors) / found.score_memory < 1.3


def test_disk_is_the_size_of_the_file(tmp_path: Path) -> None:
    model, batches = net(), data()
    found = quick(model, batches)
    ifc = IFComp(model).fit(batches)
    ifc.save(tmp_path / "run.ifcomp")
    size = (tmp_path / "run.ifcomp").stat().st_size
    assert found.disk <= size < found.disk + 20_000  # names and settings
    assert sum(layer.disk for layer in found.layers) + ifc.factors.reference.nbytes == found.disk


def test_layers_cover_all_parameters() -> None:
    found = quick(net(), data())
    assert sum(layer.parameters for layer in found.layers) == sum(value.numel() for value in net().parameters())
    assert all(layer.memory >= layer.disk > 0 for layer in found.layers)


def test_limits_hold_in_the_estimate() -> None:
    limit = 4_000_000
    found = quick(net(), data(), max_memory=limit)
    assert found.fit_memory <= process_bytes(limit)
    assert found.score_memory <= process_bytes(limit)
    with pytest.raises(MemoryLimitError):
        quick(net(), data(), max_memory=10_000)


def test_probes_take_less_memory_than_many_classes() -> None:
    all_labels, probed = (quick(net(200), data(), probes=probes) for probes in (None, 2))
    assert probed.score_memory < all_labels.score_memory


def test_the_model_is_as_it_was() -> None:
    model = net().train()
    weights = [value.clone() for value in model.state_dict().values()]
    quick(model, data(), layers="last")
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert all(torch.equal(one, other) for one, other in zip(weights, model.state_dict().values(), strict=True))


def test_it_can_be_printed() -> None:
    found = Estimate((), 1000, 2_000_000_000, 1_500_000, 12, 3.0, 4.0)
    assert "fit: 2.0 GB at the peak, 3 s for 1,000 examples, 12 B on disk" in str(found)
    lines = str(quick(net(), data(), examples=7)).splitlines()
    assert lines[0].split() == ["layer", "kind", "parameters", "memory", "disk"]
    assert "7 examples" in lines[-1]


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(EmptyDataError):
        quick(net(), [])
    with pytest.raises(DataError):
        quick(net(), None)
    with pytest.raises(SettingError, match="max_memory"):
        quick(net(), data(), max_memory="lots")
    with pytest.raises(SettingError, match="fisher"):
        quick(net(), data(), fisher="best")
