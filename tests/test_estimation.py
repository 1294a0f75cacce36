"""Estimates before a fit: against what tensors then take, the file's size, and what the settings must do to them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ifcomp import IFComp, estimation
from ifcomp.errors import DataError, EmptyDataError, MemoryLimitError, SettingError
from ifcomp.estimation import Estimate, estimate
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


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimation, "_PATIENCE", 0.01)


@pytest.fixture
def tensors_only(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what the process takes beside tensors, which no account of tensors sees."""
    monkeypatch.setattr(estimation, "_LIBRARIES", 0)
    monkeypatch.setattr(estimation, "_OVERHEAD", 1.0)


@pytest.mark.usefixtures("tensors_only")
@pytest.mark.parametrize("options", [{"fisher": "exact"}, {"fisher": "sampled"}, {"sua": True}, {"layers": ["3", "7"]}])
def test_peaks_are_those_of_the_tensors(options: dict[str, Any]) -> None:
    model, batches = net(), data()
    found = estimate(model, batches, **options)
    ifc = IFComp(model, **options)
    with Alive() as fitting:
        ifc.fit(batches)
    with Alive() as scoring:
        ifc.score(batches)
    assert 0.85 < fitting.peak / found.fit_memory < 1.0
    assert 0.85 < scoring.peak / found.score_memory < 1.0


@pytest.mark.usefixtures("tensors_only")
def test_pieces_of_a_batch_are_of_equal_size(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = net(), data()
    monkeypatch.setattr("ifcomp.layers.session.PIECE_BYTES", int(0.8 * estimate(model, batches).score_memory))
    ifc = IFComp(model).fit(batches)
    with Alive() as scoring:
        ifc.score(batches)
    assert 0.85 < scoring.peak / estimate(model, batches).score_memory < 1.0


@pytest.mark.usefixtures("tensors_only")
def test_transformed_filters_are_counted() -> None:
    """Convolutions whose quick backward holds more than all else."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 128, 3, padding=1), nn.ReLU(), nn.Conv2d(128, 128, 3, padding=1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Conv2d(128, 128, 3, padding=1), nn.AvgPool2d(8), nn.Flatten(), nn.Linear(128, 4))
    batches = [torch.randn(20, 3, 8, 8)]
    found = estimate(model, batches, sua=True)
    ifc = IFComp(model, sua=True)
    with Alive() as fitting:
        ifc.fit(batches)
    with Alive() as scoring:
        ifc.influence(batches[0])
    assert 0.75 < fitting.peak / found.fit_memory < 1.0
    assert 0.75 < scoring.peak / found.score_memory < 1.0


@pytest.mark.usefixtures("quick")
def test_disk_is_the_size_of_the_file(tmp_path: Path) -> None:
    model, batches = net(), data()
    found = estimate(model, batches)
    IFComp(model).fit(batches).save(tmp_path / "run.ifcomp")
    size = (tmp_path / "run.ifcomp").stat().st_size
    assert found.disk <= size < found.disk + 20_000  # names and settings
    assert sum(layer.disk for layer in found.layers) == found.disk


@pytest.mark.usefixtures("quick")
def test_layers_share_the_time_and_cover_all_parameters() -> None:
    found = estimate(net(), data())
    assert found.examples == 64
    assert [layer.name for layer in found.layers] == ["0", "1", "3", "7"]
    assert sum(layer.parameters for layer in found.layers) == sum(value.numel() for value in net().parameters())
    assert sum(layer.fit_seconds for layer in found.layers) == pytest.approx(found.fit_seconds)
    assert sum(layer.score_seconds for layer in found.layers) == pytest.approx(found.score_seconds)
    assert max(found.layers, key=lambda layer: layer.score_seconds).name == "3"


@pytest.mark.usefixtures("tensors_only")
def test_limits_hold_in_the_estimate_too() -> None:
    free, tight = estimate(net(), data()), estimate(net(), data(), max_memory="3MB")
    assert tight.fit_memory <= 3_000_000 < free.fit_memory
    assert tight.score_memory <= 3_000_000 < free.score_memory
    with pytest.raises(MemoryLimitError, match=r"max_memory is 10\.0 kB"):
        estimate(net(), data(), max_memory="10kB")


@pytest.mark.usefixtures("quick")
def test_probes_take_less_memory_than_many_classes() -> None:
    all_labels, probed = (estimate(net(200), data(), probes=probes) for probes in (None, 2))
    assert probed.score_memory < all_labels.score_memory


@pytest.mark.usefixtures("quick")
def test_the_model_is_as_it_was() -> None:
    model = net().train()
    weights = [value.clone() for value in model.state_dict().values()]
    estimate(model, data(), layers="last")
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert all(torch.equal(one, other) for one, other in zip(weights, model.state_dict().values(), strict=True))


@pytest.mark.usefixtures("quick")
def test_it_can_be_printed() -> None:
    found = Estimate((), 1000, 2_000_000_000, 1_500_000, 12, 3.0, 4.0)
    assert "fit: 2.0 GB at the peak, 3 s for 1,000 examples, 12 B on disk" in str(found)
    lines = str(estimate(net(), data(), examples=7)).splitlines()
    assert lines[0].split() == ["layer", "kind", "parameters", "memory", "disk", "fit", "score"]
    assert "7 examples" in lines[-1]


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(EmptyDataError):
        estimate(net(), [])
    with pytest.raises(DataError):
        estimate(net(), data()[0][0])
    with pytest.raises(SettingError, match="max_memory"):
        estimate(net(), data(), max_memory="lots")
    with pytest.raises(SettingError, match="fisher"):
        estimate(net(), data(), fisher="best")
