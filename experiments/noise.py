"""Label noise: symmetric, asymmetric, human and data-dependent, with the mask of wrong labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from experiments.datasets import Dataset, read_npz
from ifcomp.errors import DataError, LabelError, SettingError

#: Asymmetric noise of CIFAR-10 in the paper. It swaps automobile and truck, airplane and bird, cat and dog, deer and
#: horse, frog and ship.
CIFAR10_PAIRS = (2, 9, 0, 5, 7, 3, 8, 4, 6, 1)

_FOLDER = "cifar10-noisy-labels"
_HUMAN = ("aggre", "random1", "random2", "random3", "worse")


@dataclass(frozen=True)
class NoisyData:
    """Data with label noise.

    Attributes:
        data: Data with the noisy labels; its name describes the noise.
        wrong: bool [N], True if the label differs from the clean label.
    """

    data: Dataset
    wrong: Tensor


def next_class(num_classes: int) -> tuple[int, ...]:
    """Return the cyclic mapping of asymmetric noise: every class becomes the next, the last the first."""
    return (*range(1, num_classes), 0)


def symmetric(data: Dataset, fraction: float, *, seed: int) -> NoisyData:
    """Give exactly ``round(fraction * N)`` examples a uniformly random other label."""
    labels = _labels(data)
    generator = torch.Generator().manual_seed(seed)
    selected = _select(len(labels), fraction, generator)
    num_classes = len(data.class_names)
    offsets = torch.randint(1, num_classes, (len(selected),), generator=generator)
    changed = labels.clone()
    changed[selected] = (labels[selected] + offsets) % num_classes
    return _noisy(data, changed, f"symmetric{fraction:g}s{seed}")


def asymmetric(data: Dataset, fraction: float, mapping: Sequence[int], *, seed: int) -> NoisyData:
    """Replace the labels of exactly ``round(fraction * N)`` random examples by ``mapping[label]``."""
    labels = _labels(data)
    classes = range(len(data.class_names))
    if len(mapping) != len(classes) or any(new == old or new not in classes for old, new in enumerate(mapping)):
        raise SettingError(
            f"The mapping must give each of {len(classes)} classes another of 0 ... {len(classes) - 1}, but is "
            f"{tuple(mapping)}."
        )
    selected = _select(len(labels), fraction, torch.Generator().manual_seed(seed))
    changed = labels.clone()
    changed[selected] = torch.tensor(mapping)[labels[selected]]
    return _noisy(data, changed, f"asymmetric{fraction:g}s{seed}")


def human(data: Dataset, kind: str) -> NoisyData:
    """Replace the labels of the 50,000 training images of CIFAR-10 by human annotations (CIFAR-10N).

    Args:
        data: The complete CIFAR-10 training data in the original order.
        kind: "aggre" (majority of three annotators, 9 % wrong), "random1" to "random3" (one annotator, 17 to 18 %) or
            "worse" (a wrong annotation if there is one, 40 %).
    """
    if kind not in _HUMAN:
        raise SettingError(f"There is no human noise '{kind}'. Choose one of {', '.join(_HUMAN)}.")
    key = f"random_label{kind[-1]}" if kind.startswith("random") else f"{kind}_label"
    return _from_file(data, "cifar10n.npz", "clean_label", key, f"human-{kind}")


def data_dependent(data: Dataset) -> NoisyData:
    """Replace the labels of the CIFAR-10 training images by noise that depends on the image, 60 % wrong."""
    prefix = "HOC_IDN_0p6_C10_0"
    clean, noisy = f"{prefix}_clean_label_train", f"{prefix}_noise_label_train"
    return _from_file(data, "hoc_idn.npz", clean, noisy, "data-dependent")


def _from_file(data: Dataset, file: str, clean: str, noisy: str, suffix: str) -> NoisyData:
    labels = _labels(data)
    expected, changed = (torch.from_numpy(read_npz(_FOLDER, file, key)).long() for key in (clean, noisy))
    if not torch.equal(expected, labels):
        raise DataError(
            f"The clean labels in '{file}' are not those of '{data.name}': the noise belongs to other images. Give the "
            "complete CIFAR-10 training set in its original order."
        )
    return _noisy(data, changed, suffix)


def _noisy(data: Dataset, changed: Tensor, suffix: str) -> NoisyData:
    return NoisyData(replace(data, name=f"{data.name}-{suffix}", labels=changed), changed != _labels(data))


def _labels(data: Dataset) -> Tensor:
    if data.labels is None:
        raise LabelError(f"'{data.name}' has no labels.")
    return data.labels


def _select(count: int, fraction: float, generator: torch.Generator) -> Tensor:
    if not 0 <= fraction <= 1:
        raise SettingError(f"The fraction of wrong labels must be in 0 ... 1, but is {fraction}.")
    return torch.randperm(count, generator=generator)[: round(fraction * count)]
