"""The preset of the paper on tiny synthetic data: colour images, BatchNorm and all kinds of label noise."""

import gzip
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from experiments import models
from experiments.reproduce import mislabel, ood, pruning
from experiments.reproduce.publish import publish
from experiments.reproduce.record import run
from experiments.reproduce.study import Study
from experiments.reproduce.subject import Subject

COUNT = 48


@pytest.fixture(autouse=True)
def synthetic_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write random images to every file that the settings need."""
    monkeypatch.setenv("IFCOMP_DATA", str(tmp_path))
    monkeypatch.setenv("IFCOMP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(models, "MODELS", {"resnet18": small_network})
    generator = np.random.default_rng(0)
    colour = generator.integers(0, 256, (COUNT, 32, 32, 3), dtype=np.uint8)
    grey, labels = colour[:, :28, :28, 0].copy(), (np.arange(COUNT) % 10).astype(np.uint8)
    for name in ("mnist", "fashion-mnist", "notmnist"):
        for part, array in (("images-idx3", grey), ("labels-idx1", labels)):
            header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / f"t10k-{part}-ubyte.gz").write_bytes(gzip.compress(header + array.tobytes()))
    for name in ("cifar10", "tinyimagenet", "cifar10-noisy-labels"):
        (tmp_path / name).mkdir()
    for split in ("train", "test"):
        np.save(tmp_path / f"cifar10/x_{split}.npy", colour)
        np.save(tmp_path / f"cifar10/y_{split}.npy", labels)
    np.savez(tmp_path / "tinyimagenet/val_3000_32x32.npz", x=colour[:20], y=labels[:20] + 1)
    wrong, prefix = np.where(np.arange(COUNT) % 3 == 0, (labels + 1) % 10, labels), "HOC_IDN_0p6_C10_0"
    np.savez(tmp_path / "cifar10-noisy-labels/cifar10n.npz", clean_label=labels, random_label1=wrong)
    content = {f"{prefix}_clean_label_train": labels, f"{prefix}_noise_label_train": wrong}
    np.savez(tmp_path / "cifar10-noisy-labels/hoc_idn.npz", **content)


def tiny(subject: Subject) -> Subject:
    """Return the subject with two epochs of training."""
    recipe = replace(subject.recipe, epochs=2, milestones=(1,), checkpoint_every=1, batch_size=16)
    return replace(subject, recipe=recipe, held_out=12)


def small_network(classes: int) -> nn.Module:
    """Build the replacement of ResNet-18."""
    first = nn.Conv2d(3, 4, 3, stride=2, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.AvgPool2d(5)
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(36, classes))


def run_study(study: Study, settings: object, folder: Path) -> dict[str, object]:
    record = run(replace(study, presets={"paper": settings}), "paper", folder)
    publish(study, record, folder)
    study.claims(record)
    assert (folder / "table.md").exists()
    return dict(record.results)


def test_ood(tmp_path: Path) -> None:
    settings = ood.PRESETS["paper"]
    assert settings.subject.model == "resnet18"
    assert settings.fit_examples is None
    small = replace(
        settings,
        subject=tiny(settings.subject),
        images=10,
        tuning_images=5,
        tuning_near=("made-halves",),
        tuning_far=("made-clouds",),
        near=("tinyimagenet-near",),
        far=("mnist", "textures"),
        held_out_images=6,
        betas=(0.001,),
        dampings=(1e-4,),
        detectors=("MSP", "DICE"),
    )
    results = run_study(ood.STUDY, small, tmp_path / "ood")
    assert ood.choices(small, results)[ood.AS_PAPER].beta == 0.001
    assert set(results["detector DICE"]["sets"]) == {"tinyimagenet-near", "mnist", "textures"}


def test_mislabel_with_all_kinds_of_noise(tmp_path: Path) -> None:
    settings = mislabel.PRESETS["paper"]
    assert (settings.short_runs, settings.short_epochs) == (10, 20)
    small = replace(settings, subject=tiny(settings.subject), fit_examples=12, short_runs=1, short_epochs=1)
    results = run_study(mislabel.STUDY, small, tmp_path / "mislabel")
    for kind in ("human random1", "data-dependent", "asymmetric 0.3", "symmetric 0.6"):
        assert 0.1 < results[f"{kind}, train"]["wrong"] < 0.8
        assert results[f"{kind}, late"].keys() == set(mislabel.METHODS)


def test_pruning(tmp_path: Path) -> None:
    settings = pruning.PRESETS["paper"]
    assert len(settings.seeds) == 5
    small = replace(
        settings,
        subject=tiny(settings.subject),
        fractions=(0.5,),
        seeds=(0,),
        short_runs=1,
        short_epochs=1,
        fit_examples=12,
    )
    results = run_study(pruning.STUDY, small, tmp_path / "pruning")
    assert {f"{method}, 0.5, seed 0" for method in pruning.METHODS} <= results.keys()
