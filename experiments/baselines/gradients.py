"""Scores from per-example gradient norms: GraNd, GradNorm and TracIn. Larger = more suspicious, more surprising.

Norms are over all covered parameters (every trainable one, see ``IFComp.coverage``) and come from the same captured
inputs and output gradients as the influence, without materialised gradients of the whole network.

| baseline | what it needs | forward passes per example |
|---|---|---|
| `grand` | the trained model; as published, several networks of a few epochs | 3 for each network |
| `gradnorm` | the trained model | 1 + 2K |
| `expected_gradnorm` | the trained model | 1 + 2K |
| `tracin` | extra checkpoints of the training run with their learning rates | 3 for each checkpoint |
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from experiments.baselines.losses import as_networks, check_repeatable
from ifcomp.curvature.factors import check_number
from ifcomp.curvature.labels import all_label_residuals, label_residuals, probabilities
from ifcomp.data.batches import Batch, as_batches
from ifcomp.data.checks import check_data
from ifcomp.errors import EmptyDataError, SettingError
from ifcomp.influence.norms import squared_gradient_norms
from ifcomp.layers.registry import Selection
from ifcomp.layers.session import Session
from ifcomp.layers.wrappers import unwrapped
from ifcomp.progress import track


def grand(
    models: nn.Module | Sequence[nn.Module], data: Iterable[Any], *, progress: bool | None = None
) -> NDArray[Any]:
    """GraNd: the norm of the gradient of the given label's loss, averaged over networks, [N].

    Larger = more suspicious.

    Args:
        models: One network, or several that differ in their seed.
        data: Batches with labels; with several networks it is iterated several times.
        progress: Show a progress bar; None shows it on terminals.
    """
    networks = as_networks(models, data)
    return np.asarray(np.mean([np.sqrt(_own_norms(model, data, progress)) for model in networks], 0))


def gradnorm(model: nn.Module, data: Iterable[Any], *, progress: bool | None = None) -> NDArray[Any]:
    """GradNorm: mean over all K labels of the squared norm of the label's gradient, [N]; needs no labels.

    ``1/K sum_y ||g_y||^2``. Larger = more surprising.

    Args:
        model: The classifier.
        data: Batches; labels are not looked at.
        progress: Show a progress bar; None shows it on terminals.
    """
    return _all_norms(model, data, lambda _, norms: norms.mean(1), progress)


def expected_gradnorm(model: nn.Module, data: Iterable[Any], *, progress: bool | None = None) -> NDArray[Any]:
    """GradNorm weighted by the model: ``E_{y~p} ||g_y||^2``, [N]; the expected influence without curvature.

    Larger = more surprising. Arguments as `gradnorm`.
    """
    return _all_norms(model, data, lambda p, norms: (p * norms).sum(1), progress)


def tracin(
    checkpoints: Iterable[tuple[nn.Module, float]], data: Iterable[Any], *, progress: bool | None = None
) -> NDArray[Any]:
    """TracIn self-influence: sum over checkpoints of learning rate times squared gradient norm, [N].

    ``sum_t eta_t ||g_y(theta_t)||^2`` of the given label. Larger = more suspicious.

    Args:
        checkpoints: Networks with the learning rate at that time. May be a generator that loads one state after the
            other into the same network.
        data: Batches with labels; iterated once for each checkpoint.
        progress: Show a progress bar; None shows it on terminals.
    """
    check_repeatable(data)
    total: NDArray[Any] | None = None
    for model, learning_rate in checkpoints:
        check_number("learning rate", learning_rate)
        term = learning_rate * _own_norms(model, data, progress)
        total = term if total is None else total + term
    if total is None:
        raise SettingError("TracIn needs at least one checkpoint, but there is none.")
    return total


def _own_norms(model: nn.Module, data: Iterable[Any], progress: bool | None) -> NDArray[Any]:
    """``||g_y||^2`` of the given label, [N]."""
    parts = []
    for piece, p, norms in _recordings(model, data, True, progress):
        assert piece.labels is not None
        parts.append(norms(label_residuals(p, piece.labels.to(p.device)).unsqueeze(0)).squeeze(1))
    return torch.cat(parts).cpu().numpy()


def _all_norms(
    model: nn.Module, data: Iterable[Any], combine: Callable[[Tensor, Tensor], Tensor], progress: bool | None
) -> NDArray[Any]:
    """``combine(p, norms)`` of the squared norms [B, K] of all labels, [N]."""
    parts = [combine(p, norms(all_label_residuals(p))) for _, p, norms in _recordings(model, data, False, progress)]
    return torch.cat(parts).cpu().numpy()


def _recordings(
    model: nn.Module, data: Iterable[Any], labelled: bool, progress: bool | None
) -> Iterator[tuple[Batch, Tensor, Callable[[Tensor], Tensor]]]:
    """Every piece of the data, p [B, K], and what turns cotangents [C, B, K] into squared gradient norms [B, C]."""
    check_data(data)
    batches = as_batches(track(data, "gradient norms", progress))
    if not labelled:
        batches = (replace(batch, labels=None) for batch in batches)
    first = next(batches, None)
    if first is None:
        raise EmptyDataError("There is no example: the data is empty.")
    with torch.inference_mode(False):
        session = Session(unwrapped(model), Selection(sua=False), first)
    cotangents = 1 if labelled else session.num_classes
    everything = itertools.chain([first], batches)
    with session.attached():
        for piece, _ in session.pieces(everything, cotangents, "needed" if labelled else "unused"):
            recording = session.record(piece)
            p = probabilities(recording.logits, 1.0)
            yield piece, p, partial(squared_gradient_norms, session, recording, piece)
