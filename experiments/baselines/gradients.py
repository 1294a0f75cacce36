"""Scores from norms of per-example gradients: GraNd, GradNorm and TracIn.

The squared norm of the gradient ``g_y = J^T (p - e_y)`` is the influence of label y with the identity as curvature,

    ``||g_y||^2 = g_y^T I^-1 g_y``,

so that `IFComp` evaluates it without forming gradients of the whole network. Norms are over all covered parameters,
see ``IFComp.coverage``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from experiments.baselines.inference import as_models, check_repeatable, model_inputs
from experiments.baselines.interface import check_not_negative
from ifcomp import IFComp
from ifcomp.data.batches import Batch, as_batches
from ifcomp.data.checks import check_data, check_labels
from ifcomp.errors import EmptyDataError, SettingError
from ifcomp.progress import track


def grand(
    models: nn.Module | Sequence[nn.Module], data: Iterable[Any], *, progress: bool | None = None
) -> NDArray[Any]:
    """GraNd: return ``||g_y||`` of the given label, averaged over networks, [N]. Larger = more suspicious.

    Cost: 1 + 2K forward passes per network.

    Args:
        models: One network, or several that differ in their seed.
        data: Batches with labels. With several networks it is iterated several times.
        progress: Show a progress bar; None shows it on terminals.
    """
    norms = [np.sqrt(_label_norms(model, data, progress)) for model in as_models(models, data)]
    return np.mean(norms, 0)


def gradnorm(model: nn.Module, data: Iterable[Any], *, progress: bool | None = None) -> NDArray[Any]:
    """GradNorm: return ``1/K sum_y ||g_y||^2``, [N]. Larger = more surprising.

    Cost: 1 + 2K forward passes.

    Args:
        model: The classifier.
        data: Batches; labels are ignored.
        progress: Show a progress bar; None shows it on terminals.
    """
    return _joined(norms.mean(1) for _, norms in _squared_norms(model, data, progress))


def tracin(
    checkpoints: Iterable[tuple[nn.Module, float]], data: Iterable[Any], *, progress: bool | None = None
) -> NDArray[Any]:
    """TracIn self-influence: return ``sum_t eta_t ||g_y(theta_t)||^2`` of the given label, [N].

    Larger = more suspicious. Cost: 1 + 2K forward passes per checkpoint.

    Args:
        checkpoints: Networks with their learning rates eta_t. May be a generator that loads one state after the other
            into the same network.
        data: Batches with labels; iterated once per checkpoint.
        progress: Show a progress bar; None shows it on terminals.
    """
    check_repeatable(data)
    terms = []
    for model, learning_rate in checkpoints:
        check_not_negative("learning rate", learning_rate)
        terms.append(learning_rate * _label_norms(model, data, progress))
    if not terms:
        raise SettingError("TracIn needs at least one checkpoint, but there is none.")
    return np.sum(terms, 0)


def identity_curvature(model: nn.Module, x: Any) -> IFComp:
    """Return a predictor whose curvature is the identity: its influence is the squared norm of the gradient, [B, K].

    A fit provides the shapes. Its eigenbases Q stay: with second moments of 1 the curvature is ``Q Q^T = I``.

    Args:
        model: The classifier.
        x: A few inputs [B, ...], or a dict of keyword inputs.
    """
    factors = IFComp(model).fit([x], progress=False).factors
    assert factors is not None
    blocks = {
        name: replace(block, second_moments=torch.ones_like(block.second_moments))
        for name, block in factors.blocks.items()
    }
    return IFComp.from_factors(model, replace(factors, blocks=blocks), damping=0.0)


def _label_norms(model: nn.Module, data: Iterable[Any], progress: bool | None) -> NDArray[Any]:
    """Return ``||g_y||^2`` of the given label, [N]."""

    def gather(batch: Batch, norms: Tensor) -> Tensor:
        labels = check_labels(batch, norms.shape[1]).to(norms.device)
        return norms.gather(1, labels.unsqueeze(1)).squeeze(1)

    return _joined(gather(batch, norms) for batch, norms in _squared_norms(model, data, progress))


def _squared_norms(model: nn.Module, data: Iterable[Any], progress: bool | None) -> Iterator[tuple[Batch, Tensor]]:
    """Yield every batch with ``||g_y||^2`` of all labels, [B, K]."""
    check_data(data)
    batches = as_batches(track(data, "gradient norms", progress))
    first = next(batches, None)
    if first is None:
        raise EmptyDataError("There is no example: the data is empty.")
    ifc = identity_curvature(model, model_inputs(first.select(slice(0, 1))))
    for batch in itertools.chain([first], batches):
        yield batch, ifc.influence(model_inputs(batch))


def _joined(parts: Iterable[Tensor]) -> NDArray[Any]:
    return torch.cat(list(parts)).cpu().numpy()
