"""Bounded complexity of a recorded model: from all labels, or from a sample of labels if there are many."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ifcomp import complexity
from ifcomp.data.batches import Batch
from ifcomp.label_samples import evaluate_sample, evaluate_top, label_passes
from ifcomp.scoring import Evaluation, Microbatch, evaluate, label_influence

#: Number of labels that are sampled in addition to the most probable one: 17 backward passes, worth 35 forward passes.
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


def evaluate_bounded(evaluation: Evaluation, batches: Iterable[Batch], samples: int | None) -> BoundedComplexity:
    """Bounded complexity of every example; see `bounded_complexity`.

    Args:
        evaluation: The recorded model and its curvature.
        batches: Inputs.
        samples: Number of sampled labels; None evaluates all labels.
    """

    def step(microbatch: Microbatch) -> BoundedComplexity:
        return bounded_complexity(evaluation, microbatch, samples)

    cotangents = label_passes(evaluation.factors.num_classes, samples)
    parts = list(evaluate(evaluation, batches, cotangents, step, work="bounded complexity"))
    return BoundedComplexity(*(torch.cat([getattr(part, name) for part in parts]) for name in ("value", "error")))


def bounded_complexity(evaluation: Evaluation, microbatch: Microbatch, samples: int | None) -> BoundedComplexity:
    """Bounded complexity of a microbatch from all labels, or from the most probable label and sampled labels.

    A sample gives an unbiased estimate of ``S = sum_y sigmoid(h_y)`` (`ifcomp.complexity.sampled_excess`). The value is
    ``log max(S, 1)``, and its error is the standard error of S divided by ``max(S, 1)``. The draws use the same random
    numbers, given by the seed of the fit, for every example. So an example has the same value in every batch, and the
    errors of similar examples are not independent.

    Half of the draws are uniform. In the others, the probability of a label grows with ``sqrt(c (1 - c))`` for its
    approximate hindsight probability c: the approximation has the largest error between 0 and 1.

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
    top = evaluate_top(microbatch)
    approximate = complexity.approximate_hindsight(log_probability, top.control, mean_influence)
    sizes = (approximate * (1 - approximate)).sqrt()
    chances = complexity.label_chances(sizes, top.label, complexity.BOUNDED_UNIFORM_SHARE)
    labels, influence = evaluate_sample(microbatch, top, chances, samples, evaluation.factors.settings.seed)
    excess, error = complexity.sampled_excess(log_probability, labels, influence, approximate, chances, mean_influence)
    excess = excess.clamp_min(0)
    return BoundedComplexity(excess.log1p(), error / (1 + excess))
