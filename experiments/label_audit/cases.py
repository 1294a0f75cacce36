"""A trained network with the data to audit, and tensors that are computed once and cached."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from experiments.runs import cache_folder
from ifcomp.io.files import atomic_write

FOLDS = 5
BATCH = 250

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Case:
    """A network and the labels to audit.

    Attributes:
        model: Network in eval mode.
        x: Inputs, [N, ...].
        labels: Given labels, int64 [N].
        wrong: bool [N], True for a wrong label.
        classes: Number of classes K.
        raw: Inputs as vectors for neighbours, [N, D].
        epoch: Number of epochs of training.
        complexity_examples: Number of examples with label complexity, which is slow on large networks.
    """

    model: nn.Module
    x: Tensor
    labels: Tensor
    wrong: Tensor
    classes: int
    raw: Tensor
    epoch: int
    complexity_examples: int | None = None

    @property
    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """Batches ``(x, y)`` in the order of the data."""
        return list(zip(self.x.split(BATCH), self.labels.split(BATCH), strict=True))


@dataclass(frozen=True)
class Labelled:
    """Inputs with given labels.

    Attributes:
        x: Inputs, [N, ...].
        labels: Given labels, int64 [N].
        wrong: bool [N], True for a wrong label.
    """

    x: Tensor
    labels: Tensor
    wrong: Tensor


def corrupt(labels: Tensor, kind: str, fraction: float, classes: int, seed: int) -> Tensor:
    """Return labels [N] of which exactly ``round(fraction * N)`` are wrong.

    Args:
        labels: Clean labels, [N].
        kind: "symmetric" (a random other class) or "asymmetric" (the next class).
        fraction: Share of wrong labels.
        classes: Number of classes K.
        seed: Seed of the examples and classes.
    """
    generator = torch.Generator().manual_seed(seed)
    selected = torch.randperm(len(labels), generator=generator)[: round(fraction * len(labels))]
    offsets = torch.randint(1, classes, (len(selected),), generator=generator)
    if kind == "asymmetric":
        offsets = torch.ones_like(offsets)
    changed = labels.clone()
    changed[selected] = (labels[selected] + offsets) % classes
    return changed


def cached(name: str, compute: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return tensors from the cache folder, or compute and store them."""
    path = cache_folder() / "label_audit" / f"{name}.safetensors"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {key: value.contiguous() for key, value in compute().items()}
        with atomic_write(path) as scratch:
            save_file(tensors, scratch)
    stored: dict[str, Tensor] = load_file(path)
    return stored


def is_cached(name: str) -> bool:
    """Return whether tensors of this name are in the cache folder."""
    return (cache_folder() / "label_audit" / f"{name}.safetensors").exists()


def fold_indices(count: int, fold: int) -> tuple[Tensor, Tensor]:
    """Return the indices outside and inside one of five folds."""
    folds = torch.arange(count) % FOLDS
    return (folds != fold).nonzero().flatten(), (folds == fold).nonzero().flatten()


def probabilities(model: nn.Module, x: Tensor) -> Tensor:
    """Return the softmax of the model in eval mode, float64 [N, K]."""
    model.eval()
    with torch.no_grad():
        return torch.cat([model(part).double() for part in x.split(BATCH)]).softmax(1)
