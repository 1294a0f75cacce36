"""Bounded complexity of a recorded model: from all labels, or from a sample of labels if there are many."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ifcomp import complexity
from ifcomp.curvature.labels import chosen_cotangents, draw_labels, label_residuals, squared_residuals
from ifcomp.data.batches import Batch
from ifcomp.prediction import MAX_EXACT_CLASSES
from ifcomp.scoring import Evaluation, Microbatch, evaluate, label_influence

#: Number of labels that are sampled beside the most probable one: 17 backward passes, worth 35 forward passes.
SAMPLED_LABELS = 16


@dataclass(frozen=True)
class BoundedComplexity:
    """Bounded complexity of examples.

    Attributes:
        value: In nats, from 0 to log K, [B]; larger = more surprising.
        error: Standard error of the value in nats, [B]; 0 if all labels were evaluated.
    """

    value: Tensor
    error: Tensor


def sampled_labels(classes: int, exact: bool = False) -> int | None:
    """Number of labels to sample; None evaluates all labels, up to `MAX_EXACT_CLASSES` or on request."""
    return None if exact or classes <= MAX_EXACT_CLASSES else SAMPLED_LABELS


def bounded_cotangents(classes: int, samples: int | None) -> int:
    """Number of backward passes of `bounded_complexity`."""
    return classes if samples is None else 1 + samples


def evaluate_bounded(evaluation: Evaluation, batches: Iterable[Batch], samples: int | None) -> BoundedComplexity:
    """Bounded complexity of every example; see `bounded_complexity`.

    Args:
        evaluation: The recorded model and its curvature.
        batches: Inputs.
        samples: Number of sampled labels; None evaluates all labels.
    """

    def step(microbatch: Microbatch) -> BoundedComplexity:
        return bounded_complexity(evaluation, microbatch, samples)

    cotangents = bounded_cotangents(evaluation.factors.num_classes, samples)
    parts = list(evaluate(evaluation, batches, cotangents, step, work="bounded complexity"))
    return BoundedComplexity(*(torch.cat([getattr(part, name) for part in parts]) for name in ("value", "error")))


def bounded_complexity(evaluation: Evaluation, microbatch: Microbatch, samples: int | None) -> BoundedComplexity:
    """Bounded complexity of a microbatch from all labels, or from the most probable label and sampled labels.

    A sample gives an unbiased estimate of ``S = sum_y sigmoid(h_y)`` (`ifcomp.complexity.sampled_excess`). The value is
    ``log max(S, 1)``, and its error is the standard error of S divided by ``max(S, 1)``. The draws use the same random
    numbers, given by the seed of the fit, for every example. So an example has the same value in every batch, and the
    errors of similar examples are not independent.

    The control variate takes the influence of the last layer for every label, and assumes that the influence of the
    other layers is proportional to ``|p - e_y|^2``. The most probable label gives the constant.

    Args:
        evaluation: The recorded model and its curvature.
        microbatch: The recorded examples.
        samples: Number of sampled labels, at least two; None evaluates all labels.
    """
    log_probability = torch.log_softmax(evaluation.beta * microbatch.logits, 1)
    mean_influence = evaluation.effective_parameters or 1.0
    if samples is None:
        influence = label_influence(microbatch)
        value = complexity.bounded_complexity(log_probability, influence, mean_influence)
        return BoundedComplexity(value, torch.zeros_like(value))
    probability, top = microbatch.probability, log_probability.argmax(1)
    of_top = _influence(microbatch, top.unsqueeze(1))
    control = _approximate_influence(microbatch, top, of_top[:, 0])
    approximate = complexity.approximate_hindsight(log_probability, control, mean_influence)
    drawn = draw_labels(complexity.label_chances(approximate, top), samples, evaluation.factors.settings.seed)
    labels = torch.cat([top.unsqueeze(1), drawn], 1)
    influence = torch.cat([of_top, _influence(microbatch, drawn)], 1)
    excess, error = complexity.sampled_excess(log_probability, labels, influence, approximate, mean_influence)
    excess = excess.clamp_min(0)
    return BoundedComplexity(excess.log1p(), error / (1 + excess))


def _influence(microbatch: Microbatch, labels: Tensor) -> Tensor:
    """Influence of labels [B, C] of each example, [B, C]."""
    return microbatch.check_finite(microbatch.evaluator.quadratic(chosen_cotangents(microbatch.probability, labels)))


def _approximate_influence(microbatch: Microbatch, top: Tensor, influence_of_top: Tensor) -> Tensor:
    """Influence of every label from that of the last layer and of the most probable label, [B, K]."""
    probability, index = microbatch.probability, top.unsqueeze(1)
    last = microbatch.evaluator.last_layer(label_residuals(probability, top), top)
    sizes = squared_residuals(probability)
    rest = (influence_of_top.unsqueeze(1) - last.gather(1, index)).clamp_min(0) / sizes.gather(1, index)
    return last + torch.nan_to_num(rest, 0.0, 0.0, 0.0) * sizes
