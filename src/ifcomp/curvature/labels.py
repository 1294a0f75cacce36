"""The model's distribution at inverse temperature beta, and the label gradients that the Fisher averages over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ifcomp.curvature.factors import FitSettings
from ifcomp.precision import as_double


@dataclass(frozen=True)
class Cotangents:
    """Vectors over the logits for every example, [count, B, K], built in chunks: all K labels have B K^2 elements.

    Attributes:
        count: C.
        make: Returns the cotangents of a slice, [C', B, K].
    """

    count: int
    make: Callable[[slice], Tensor]

    @classmethod
    def of(cls, values: Tensor) -> Cotangents:
        """Wrap existing cotangents [C, B, K]."""
        return cls(len(values), values.__getitem__)

    def chunks(self, size: int) -> Iterator[Tensor]:
        """Up to ``size`` of them at a time, [C', B, K]."""
        return (self.make(slice(first, min(first + size, self.count))) for first in range(0, self.count, size))


def probabilities(logits: Tensor, beta: float) -> Tensor:
    """``softmax(beta * logits)`` in float64, [B, K]; uniform at beta = 0."""
    return torch.softmax(beta * as_double(logits.detach()), dim=1)


def label_residuals(probability: Tensor, labels: Tensor) -> Tensor:
    """``p - e_y``, the gradient of the codelength of label y at the logits over beta, [..., B, K].

    Args:
        probability: p, [B, K].
        labels: y, [..., B].
    """
    own = labels.unsqueeze(-1)
    residual = probability.expand(*labels.shape, -1).scatter(-1, own, 0.0)
    return residual.scatter_(-1, own, -residual.sum(-1, keepdim=True))  # p_y - 1 without cancellation


def all_label_residuals(probability: Tensor, labels: slice = slice(None)) -> Tensor:
    """``p - e_y`` for every label y of a slice, [C, B, K]."""
    size, classes = probability.shape
    chosen = torch.arange(classes, device=probability.device)[labels]
    return label_residuals(probability, chosen.unsqueeze(1).expand(-1, size))


def label_cotangents(probability: Tensor) -> Cotangents:
    """``p - e_y`` for every label y."""
    return Cotangents(probability.shape[1], lambda labels: all_label_residuals(probability, labels))


def chosen_cotangents(probability: Tensor, labels: Tensor) -> Cotangents:
    """``p - e_y`` for the labels y of each example, [C, B, K].

    Args:
        probability: p, [B, K].
        labels: y, [B, C].
    """
    return Cotangents(labels.shape[1], lambda chunk: label_residuals(probability, labels.T[chunk]))


def draw_labels(chances: Tensor, count: int, seed: int) -> Tensor:
    """Draw labels of every example with replacement, [B, count].

    Each draw is the largest ``log q_y + G_y`` with Gumbel noise G that depends on the seed, the number of the draw and
    the label. So the labels of an example do not depend on its batch, and rounding of q hardly ever changes them.

    Args:
        chances: Probability q of every label, [B, K].
        count: Number of draws.
        seed: Seed of the noise.
    """
    noise = np.random.default_rng(seed % 2**64).gumbel(size=(count, chances.shape[1]))
    logs = chances.log()
    return torch.stack([(logs + row).argmax(1) for row in torch.from_numpy(noise).to(chances)], 1)


def pair_cotangents(labels: Tensor, others: Tensor, classes: int) -> Cotangents:
    """``e_y - e_other`` for each example: the contrast of two labels, [1, B, K].

    Args:
        labels: y, [B].
        others: The other labels, [B].
        classes: K.
    """
    one, other = (torch.nn.functional.one_hot(names, classes).double() for names in (labels, others))
    return Cotangents.of((one - other).unsqueeze(0))


def fisher_cotangents(
    logits: Tensor, settings: FitSettings, labels: Tensor | None, first_position: int, pass_index: int
) -> Cotangents:
    """Cotangents v with ``E[v v^T] = E_y[(p - e_y)(p - e_y)^T]`` for each example, [C, B, K].

    Each is a label residual times the root of its weight: C = ``label_samples`` draws, all K labels weighted by p, or
    the one label of the data.

    Draws are importance samples. If the model is confident, a draw from p is almost always the predicted label, whose
    residual is near zero, and the variance is large. So label y is drawn with probability ``q_y = p_y |p - e_y|^2 / S``
    and its residual is scaled to length ``sqrt(S)``, ``S = E_y |p - e_y|^2``. The expectation is the same.

    Args:
        logits: [B, K].
        settings: How the Fisher is estimated.
        labels: The data's labels [B]; needed for the empirical Fisher.
        first_position: Position of the first example of the batch in the data.
        pass_index: Which pass over the data; each draws fresh labels.
    """
    p = probabilities(logits, settings.beta)
    if settings.fisher == "exact":
        return Cotangents(p.shape[1], lambda chunk: all_label_residuals(p, chunk) * p.T[chunk].sqrt().unsqueeze(-1))
    if settings.fisher == "empirical":
        assert labels is not None
        return Cotangents.of(label_residuals(p, labels.to(p.device)).unsqueeze(0))

    def draw(chunk: slice) -> Tensor:
        numbers = range(settings.label_samples)[chunk]
        return torch.stack([_draw(p, settings, pass_index, first_position, number) for number in numbers])

    return Cotangents(settings.label_samples, draw)


def directions_and_sizes(cotangents: Tensor) -> tuple[Tensor, Tensor]:
    """Split cotangents [C, B, K] into directions, whose largest absolute entry is 1, and sizes [C, B].

    Backward passes of directions do not underflow for confident models. The direction of a zero cotangent is arbitrary
    and has no zeros.
    """
    sizes = cotangents.abs().amax(-1)
    classes = cotangents.shape[-1]
    arbitrary = torch.arange(1, classes + 1, dtype=cotangents.dtype, device=cotangents.device) / classes
    wide = sizes.unsqueeze(-1)
    return torch.where(wide > 0, cotangents / wide, arbitrary), sizes


def _draw(probability: Tensor, settings: FitSettings, pass_index: int, first_position: int, draw: int) -> Tensor:
    """One importance sample of a label residual per example, over the root of their number, [B, K]."""
    sizes = squared_residuals(probability)
    masses = probability * sizes
    total = masses.sum(1, keepdim=True)  # S
    drawable = torch.where(total > 0, masses, probability)
    labels = sample_labels(drawable, settings.seed, pass_index, first_position, draw)
    size = sizes.gather(1, labels.unsqueeze(1))
    scale = torch.where(size > 0, total / size / settings.label_samples, 0.0).sqrt()
    return label_residuals(probability, labels) * scale


def squared_residuals(probability: Tensor) -> Tensor:
    """``|p - e_y|^2`` of every label without cancellation, [B, K]."""
    top = probability.argmax(1, keepdim=True)
    others = probability.scatter(1, top, 0.0)
    squares = probability.square()
    sizes = (1 - probability).square() + (squares.sum(1, keepdim=True) - squares).clamp_(min=0)
    return sizes.scatter(1, top, others.sum(1, keepdim=True).square() + others.square().sum(1, keepdim=True))


def sample_labels(probability: Tensor, seed: int, pass_index: int, first_position: int, draw: int) -> Tensor:
    """Draw one label per example from unnormalised probabilities, [B].

    The result depends only on seed, pass, draw and position, not on the batches.
    """
    positions = np.arange(first_position, first_position + len(probability), dtype=np.uint64)
    state = _mix(np.full(1, seed % 2**64, np.uint64))
    for part in (np.uint64(pass_index), np.uint64(draw), positions):
        state = _mix(state ^ _mix(part + np.uint64(1)))
    uniform = torch.from_numpy((state >> np.uint64(11)).astype(np.float64) * 2.0**-53).to(probability.device)
    cumulative = probability.cumsum(1)
    drawn = torch.searchsorted(cumulative, (uniform * cumulative[:, -1]).unsqueeze(1), right=True).squeeze(1)
    return drawn.clamp_(max=probability.shape[1] - 1)


def _mix(values: np.ndarray | np.uint64) -> np.ndarray:
    """The finaliser of splitmix64: a bijection of 64-bit integers that scatters neighbours."""
    with np.errstate(over="ignore"):
        mixed = np.asarray(values, np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(mixed ^ (mixed >> np.uint64(31)))
