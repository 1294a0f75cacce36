"""Prediction sets by split conformal prediction.

The score of a label is that of regularised adaptive prediction sets (RAPS), in a variant without random numbers:

    ``s(x, y) = sum of p_k over the labels k ranked before y + penalty * max(0, rank(y) - free_ranks)``.

Labels are ranked by probability from rank 1; equal probabilities by their number. A set has all labels whose score is
at most the ``ceil((n + 1) coverage)``-th smallest score of n conformal examples, up to rounding. The first label has
score 0, so no set is empty. If the conformal examples and a new example are exchangeable, the set contains the label
with probability of at least ``coverage``, on average over conformal and new examples. Under shift this is not
guaranteed.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ifcomp.errors import IfcompWarning, SettingError
from ifcomp.tasks.calibration import checked_probabilities

Floats = NDArray[np.float64]

#: Coverage at which the penalty is chosen. Sets of any other coverage are valid, too.
CHOICE_COVERAGE = 0.95

#: Penalties per rank and numbers of ranks without penalty that are compared.
PENALTIES = (0.001, 0.01, 0.1, 1.0)
FREE_RANKS = (1, 2, 5)

#: Smallest share by which a penalty must reduce the mean size of sets to be used.
MIN_REDUCTION = 0.02

#: Largest number of examples from which penalties are compared. More are sampled.
_MAX_EXAMPLES = 5_000

#: Rounding tolerance of ``(n + 1) coverage``.
_ROUNDING = 1e-9

#: Rounding error of a score. The probabilities of equal inputs differ by rounding between batches. Without a tolerance,
#: equal inputs of conformal and new examples would not be exchangeable.
_SCORE_ROUNDING = 1e-6


@dataclass(frozen=True, eq=False)
class SetRule:
    """Regularisation and conformal scores of prediction sets.

    Attributes:
        scores: Scores of the labels of the conformal examples, [n], increasing.
        penalty: Penalty per rank.
        free_ranks: Number of ranks without penalty, at least 1.
    """

    scores: Floats
    penalty: float
    free_ranks: int

    def threshold(self, coverage: float) -> float:
        """The ``ceil((n + 1) coverage)``-th smallest score; infinite if there are fewer scores.

        Args:
            coverage: Probability that a set contains the label, between 0 and 1.
        """
        if isinstance(coverage, bool) or not isinstance(coverage, int | float) or not 0 < coverage < 1:
            raise SettingError(f"coverage must be a number between 0 and 1, such as 0.95, but is {coverage!r}.")
        rank = max(1, math.ceil((len(self.scores) + 1) * coverage - _ROUNDING))
        return float(self.scores[rank - 1]) if rank <= len(self.scores) else math.inf

    def warn_if_too_few(self, coverage: float) -> None:
        """Warn if the coverage needs more conformal examples than there are, so that every set has all labels."""
        if self.threshold(coverage) == math.inf:
            warnings.warn(
                f"Coverage {coverage:g} needs more than {len(self.scores)} conformal examples, so every set has all "
                "labels. Calibrate with more held-out data, or choose a smaller coverage.",
                IfcompWarning,
                stacklevel=3,
            )

    def sets(self, probability: ArrayLike, coverage: float) -> NDArray[np.bool_]:
        """Prediction set of each example, [N, K] booleans; at least one label per example.

        Args:
            probability: Probabilities, [N, K], from the same distribution as those of the rule.
            coverage: As for `threshold`.
        """
        return label_scores(probability, self.penalty, self.free_ranks) <= self.threshold(coverage) + _SCORE_ROUNDING


def label_scores(probability: ArrayLike, penalty: float, free_ranks: int) -> Floats:
    """Score ``s(x, y)`` of every label, [N, K]; 0 for the most probable label, larger for less probable ones.

    Args:
        probability: Probabilities, [N, K].
        penalty: Penalty per rank.
        free_ranks: Number of ranks without penalty.
    """
    values = np.asarray(probability, dtype=np.float64)
    order = np.argsort(-values, axis=1, kind="stable")
    ranked = _mass_before(np.take_along_axis(values, order, 1)) + _penalties(values.shape[1], penalty, free_ranks)
    scores = np.empty_like(values)
    np.put_along_axis(scores, order, ranked, 1)
    return scores


def fit_set_rule(
    probability: ArrayLike, label: ArrayLike, conformal_probability: ArrayLike, conformal_label: ArrayLike
) -> SetRule:
    """Choose the penalty with the smallest sets on the tuning examples, then score the conformal examples.

    Args:
        probability: Probabilities of the tuning examples, [N, K].
        label: Their labels, [N].
        conformal_probability: Probabilities of the conformal examples, [n, K].
        conformal_label: Their labels, [n].
    """
    penalty, free_ranks = choose_penalty(probability, label)
    values, truth = checked_probabilities(conformal_probability, conformal_label)
    scores = label_scores(values, penalty, free_ranks)[np.arange(len(truth)), truth]
    return SetRule(np.sort(scores), penalty, free_ranks)


def choose_penalty(probability: ArrayLike, label: ArrayLike) -> tuple[float, int]:
    """Penalty and number of free ranks with the smallest mean size of sets at `CHOICE_COVERAGE`.

    Threshold and sizes are those of the same examples. A penalty that reduces the mean size by less than
    `MIN_REDUCTION` is not used.

    Args:
        probability: Probabilities, [N, K].
        label: Labels, [N].
    """
    values, truth = checked_probabilities(probability, label)
    chosen = np.random.default_rng(0).permutation(len(truth))[:_MAX_EXAMPLES]  # the data may be sorted by class
    values, truth = values[chosen], truth[chosen]
    order = np.argsort(-values, axis=1, kind="stable")
    mass = _mass_before(np.take_along_axis(values, order, 1))
    place = (order == truth[:, np.newaxis]).argmax(1)
    best, smallest = (0.0, 1), math.inf
    for penalty, free_ranks in [best, *((penalty, free) for free in FREE_RANKS for penalty in PENALTIES)]:
        scores = mass + _penalties(values.shape[1], penalty, free_ranks)
        rule = SetRule(np.sort(scores[np.arange(len(truth)), place]), penalty, free_ranks)
        size = float((scores <= rule.threshold(CHOICE_COVERAGE)).sum(1).mean())
        if size < smallest:
            best, smallest = (penalty, free_ranks), size if penalty else (1 - MIN_REDUCTION) * size
    return best


def _mass_before(ranked: Floats) -> Floats:
    """Sum of the probabilities before each rank, for probabilities sorted by rank, [N, K]."""
    mass = np.zeros_like(ranked)
    np.cumsum(ranked[:, :-1], axis=1, out=mass[:, 1:])
    return mass


def _penalties(classes: int, penalty: float, free_ranks: int) -> Floats:
    """Penalty of each rank, [K]."""
    return penalty * np.maximum(0.0, np.arange(1, classes + 1) - free_ranks)
