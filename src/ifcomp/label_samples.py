"""Sums over labels from the most probable label and a sample of the others.

The labels are drawn with replacement, with probabilities that follow the size of their terms. The control variate is an
approximation of the influence of every label: that of the last layer, which needs no backward pass, plus that of the
other layers, which is assumed to be proportional to ``|p - e_y|^2``. The most probable label gives the constant.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ifcomp import complexity
from ifcomp.curvature.labels import chosen_cotangents, draw_labels, label_residuals, squared_residuals
from ifcomp.scoring import Microbatch

#: Largest number of classes for which all labels are evaluated.
MAX_EXACT_CLASSES = 32


@dataclass(frozen=True)
class TopLabel:
    """The most probable label of every example, and the approximation that its influence gives.

    Attributes:
        label: t, [B].
        influence: IF of t, [B, 1].
        control: Approximate influence of every label, [B, K].
    """

    label: Tensor
    influence: Tensor
    control: Tensor


def sample_size(classes: int, samples: int, exact: bool = False) -> int | None:
    """Number of labels to sample; None evaluates all labels, up to `MAX_EXACT_CLASSES` or on request."""
    return None if exact or classes <= MAX_EXACT_CLASSES else samples


def label_passes(classes: int, samples: int | None) -> int:
    """Number of backward passes: all labels, or the most probable label and the sampled ones."""
    return classes if samples is None else 1 + samples


def influence_of(microbatch: Microbatch, labels: Tensor) -> Tensor:
    """Influence of labels [B, C] of each example, [B, C]."""
    return microbatch.check_finite(microbatch.evaluator.quadratic(chosen_cotangents(microbatch.probability, labels)))


def evaluate_top(microbatch: Microbatch) -> TopLabel:
    """Evaluate the most probable label; one backward pass."""
    probability = microbatch.probability
    top = probability.argmax(1)
    index = top.unsqueeze(1)
    influence = influence_of(microbatch, index)
    last = microbatch.evaluator.last_layer(label_residuals(probability, top), top)
    sizes = squared_residuals(probability)
    rest = (influence - last.gather(1, index)).clamp_min(0) / sizes.gather(1, index)
    return TopLabel(top, influence, last + torch.nan_to_num(rest, 0.0, 0.0, 0.0) * sizes)


def evaluate_sample(
    microbatch: Microbatch, top: TopLabel, chances: Tensor, samples: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Draw labels and evaluate them. Return the most probable label and the drawn ones, and their influence.

    Args:
        microbatch: The recorded examples.
        top: The most probable label, which is evaluated already.
        chances: Probability of drawing each label, [B, K].
        samples: Number of draws m.
        seed: Seed of the draws.

    Returns:
        Labels and influence, each [B, 1 + m].
    """
    drawn = draw_labels(chances, samples, seed)
    labels = torch.cat([top.label.unsqueeze(1), drawn], 1)
    return labels, torch.cat([top.influence, influence_of(microbatch, drawn)], 1)


def sampled_expected_influence(microbatch: Microbatch, samples: int, seed: int) -> Tensor:
    """Estimate E[IF] from the most probable label and sampled labels, [B]; see `complexity.sampled_expected_influence`.

    Args:
        microbatch: The recorded examples.
        samples: Number of sampled labels.
        seed: Seed of the sample.
    """
    top, probability = evaluate_top(microbatch), microbatch.probability
    sizes = probability * top.control
    chances = complexity.label_chances(sizes, top.label, complexity.EXPECTATION_UNIFORM_SHARE)
    labels, influence = evaluate_sample(microbatch, top, chances, samples, seed)
    return complexity.sampled_expected_influence(probability, labels, influence, top.control, chances)
