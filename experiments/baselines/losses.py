"""Scores of given labels from one forward pass: loss, probability margin and EL2N. Larger = more suspicious.

| baseline | what it needs | forward passes per example |
|---|---|---|
| `loss` | the trained model | 1 |
| `margin` | the trained model | 1 |
| `el2n` | the trained model; as published, several networks of a few epochs | 1 for each network |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from experiments.baselines.features import run_data
from ifcomp.complexity import codelength
from ifcomp.curvature.labels import label_residuals, probabilities
from ifcomp.errors import DataError, SettingError


def loss_scores(model: nn.Module, data: Iterable[Any], *, progress: bool | None = None) -> dict[str, NDArray[Any]]:
    """`loss`, `margin` and `el2n` of one network by name, all from the same forward pass, each [N].

    Args:
        model: The classifier.
        data: Batches with labels.
        progress: Show a progress bar; None shows it on terminals.
    """
    outputs = run_data(model, data, progress=progress)
    logits, labels = outputs.logits.double(), outputs.labels
    assert labels is not None
    p = probabilities(logits, 1.0)
    found = {
        "loss": codelength(torch.log_softmax(logits, 1), labels),
        "margin": _margin(p, labels),
        "el2n": label_residuals(p, labels).norm(dim=1),
    }
    return {name: np.asarray(value) for name, value in found.items()}


def loss(model: nn.Module, data: Iterable[Any], *, progress: bool | None = None) -> NDArray[Any]:
    """``-log p_y`` of the given label in nats, [N]. Larger = more suspicious."""
    return loss_scores(model, data, progress=progress)["loss"]


def margin(model: nn.Module, data: Iterable[Any], *, progress: bool | None = None) -> NDArray[Any]:
    """``max_{k != y} p_k - p_y``, between -1 and 1, [N]. Larger = more suspicious."""
    return loss_scores(model, data, progress=progress)["margin"]


def el2n(models: nn.Module | Sequence[nn.Module], data: Iterable[Any], *, progress: bool | None = None) -> NDArray[Any]:
    """EL2N: the norm of the error ``||p - e_y||_2``, averaged over networks, [N]. Larger = more suspicious.

    The paper's code takes the squared norm. For one network the order of examples is the same; a mean over several
    networks weighs large errors more when they are squared.

    Args:
        models: One network, or several that differ in their seed.
        data: Batches with labels; with several networks it is iterated several times.
        progress: Show a progress bar; None shows it on terminals.
    """
    networks = as_networks(models, data)
    return np.asarray(np.mean([loss_scores(model, data, progress=progress)["el2n"] for model in networks], 0))


def as_networks(models: nn.Module | Sequence[nn.Module], data: Iterable[Any]) -> list[nn.Module]:
    """One network or several as a list.

    Raises:
        SettingError: If there is none.
        DataError: If there are several and the data can be iterated only once.
    """
    networks = [models] if isinstance(models, nn.Module) else list(models)
    if not networks:
        raise SettingError("At least one network is needed, but the list of networks is empty.")
    if len(networks) > 1:
        check_repeatable(data)
    return networks


def check_repeatable(data: Iterable[Any]) -> None:
    """Raise DataError if the data is an iterator, which a second pass over it would find exhausted."""
    if isinstance(data, Iterator):
        raise DataError(
            "The data is gone over several times, but is an iterator that is exhausted after one pass. "
            "Give a DataLoader, a list of batches, or an object whose __iter__ starts anew."
        )


def _margin(probability: Tensor, labels: Tensor) -> Tensor:
    own = labels.unsqueeze(1)
    others = probability.scatter(1, own, -1.0)
    return others.max(1).values - probability.gather(1, own).squeeze(1)
