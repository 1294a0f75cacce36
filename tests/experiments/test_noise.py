"""Label noise: number of wrong labels, their classes, and labels from files."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments.datasets import Dataset, MissingDataError
from experiments.noise import CIFAR10_PAIRS, asymmetric, data_dependent, human, next_class, symmetric
from ifcomp.errors import DataError, LabelError, SettingError


def _data(count: int = 1000, classes: int = 10) -> Dataset:
    labels = torch.arange(count) % classes
    return Dataset("made", torch.zeros(count, 2, 2, dtype=torch.uint8), labels, tuple(map(str, range(classes))))


@pytest.mark.parametrize("fraction", [0.0, 0.2, 0.6, 0.999, 1.0])
def test_symmetric_noise_changes_exactly_the_fraction(fraction: float) -> None:
    data = _data()
    noisy = symmetric(data, fraction, seed=3)
    pairs = zip(noisy.data.labels.tolist(), data.labels.tolist(), noisy.wrong.tolist(), strict=True)
    assert all((new != old) == wrong for new, old, wrong in pairs)
    assert int(noisy.wrong.sum()) == round(fraction * 1000)


def test_symmetric_noise_is_uniform_over_labels() -> None:
    data = _data(20000, 5)
    noisy = symmetric(data, 1.0, seed=0)
    counts = Counter(zip(data.labels.tolist(), noisy.data.labels.tolist(), strict=True))
    assert len(counts) == 20
    assert all(abs(count - 1000) < 150 for count in counts.values())  # 5 standard deviations of a binomial


def test_noise_depends_on_the_seed() -> None:
    data = _data()
    assert torch.equal(symmetric(data, 0.5, seed=1).data.labels, symmetric(data, 0.5, seed=1).data.labels)
    assert not torch.equal(symmetric(data, 0.5, seed=1).data.labels, symmetric(data, 0.5, seed=2).data.labels)
    assert not torch.equal(data.labels, symmetric(data, 0.5, seed=1).data.labels)
    assert torch.equal(data.labels, torch.arange(1000) % 10)


def test_pairs_of_cifar10() -> None:
    for one, other in ((1, 9), (0, 2), (3, 5), (4, 7), (6, 8)):
        assert CIFAR10_PAIRS[one] == other
        assert CIFAR10_PAIRS[other] == one


@pytest.mark.parametrize("mapping", [CIFAR10_PAIRS, next_class(10)])
def test_asymmetric_noise_changes_exactly_the_fraction_to_the_mapped_class(mapping: tuple[int, ...]) -> None:
    data = _data()
    noisy = asymmetric(data, 0.3, mapping, seed=0)
    assert int(noisy.wrong.sum()) == 300
    for new, old, wrong in zip(noisy.data.labels.tolist(), data.labels.tolist(), noisy.wrong.tolist(), strict=True):
        assert new == (mapping[old] if wrong else old)
    assert set(data.labels[noisy.wrong].tolist()) == set(range(10))


def test_next_class() -> None:
    assert next_class(4) == (1, 2, 3, 0)


def test_the_name_describes_the_noise() -> None:
    assert symmetric(_data(), 0.6, seed=2).data.name == "made-symmetric0.6s2"
    assert asymmetric(_data(), 0.3, next_class(10), seed=0).data.name == "made-asymmetric0.3s0"


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(SettingError, match="wrong labels must be in"):
        symmetric(_data(), 1.5, seed=0)
    with pytest.raises(SettingError, match="another of"):
        asymmetric(_data(), 0.5, range(10), seed=0)
    with pytest.raises(SettingError, match="another of"):
        asymmetric(_data(), 0.5, next_class(4), seed=0)
    with pytest.raises(LabelError, match="no labels"):
        symmetric(Dataset("bare", torch.zeros(3, 2, 2), None, ("a", "b")), 0.5, seed=0)
    with pytest.raises(SettingError, match="random1"):
        human(_data(), "best")


def _save_label_files(folder: Path, clean: torch.Tensor) -> dict[str, np.ndarray]:
    (folder / "cifar10-noisy-labels").mkdir()
    generator = np.random.default_rng(0)
    keys = ("aggre_label", "worse_label", "random_label1", "random_label2", "random_label3")
    noisy_labels = {key: generator.integers(0, 10, len(clean)).astype(np.uint8) for key in keys}
    stored = clean.numpy().astype(np.uint8)
    np.savez(folder / "cifar10-noisy-labels/cifar10n.npz", clean_label=stored, **noisy_labels)
    prefix = "HOC_IDN_0p6_C10_0"
    pair = {f"{prefix}_clean_label_train": stored, f"{prefix}_noise_label_train": noisy_labels["worse_label"]}
    np.savez(folder / "cifar10-noisy-labels/hoc_idn.npz", **pair)
    return noisy_labels


def test_labels_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IFCOMP_DATA", str(tmp_path))
    data = _data()
    noisy_labels = _save_label_files(tmp_path, data.labels)
    for kind, key in (("aggre", "aggre_label"), ("random2", "random_label2"), ("worse", "worse_label")):
        noisy = human(data, kind)
        assert noisy.data.labels.tolist() == noisy_labels[key].tolist()
        assert noisy.wrong.tolist() == (noisy_labels[key] != data.labels.numpy()).tolist()
    assert data_dependent(data).data.labels.tolist() == noisy_labels["worse_label"].tolist()


def test_labels_of_other_images_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IFCOMP_DATA", str(tmp_path))
    data = _data()
    with pytest.raises(MissingDataError, match=r"cifar10n\.npz"):
        human(data, "worse")
    _save_label_files(tmp_path, data.labels.flip(0))
    with pytest.raises(DataError, match="original order"):
        human(data, "worse")
    with pytest.raises(DataError, match="original order"):
        data_dependent(data)
