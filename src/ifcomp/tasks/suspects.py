"""Scores, noise rate and suspects of labels, from their probabilities."""

from __future__ import annotations

import numpy as np
import pandas as pd

#: Smallest probability in a score; smaller ones are raised to it.
_MIN_PROBABILITY = 1e-6

#: Rounding tolerance of the threshold of a class.
_TOLERANCE = 1e-6


def label_table(
    probabilities: np.ndarray, labels: np.ndarray, is_scored: np.ndarray | None = None
) -> tuple[pd.DataFrame, float]:
    """Return the table of a label audit and the estimated noise rate.

    The suspects are the labels with the largest positive scores. Their number is at most the noise rate times the
    number of scored labels. Confident learning can also select suspects itself, but it misses more wrong labels.

    Args:
        probabilities: Out-of-sample probabilities [n, K].
        labels: Given labels [n].
        is_scored: Whether each label is scored, [n]; the score of the others is NaN. None for all.
    """
    rows = np.arange(len(labels))
    is_scored = np.ones(len(labels), dtype=bool) if is_scored is None else is_scored
    others = probabilities.copy()
    others[rows, labels] = -1.0
    suggested = others.argmax(1)
    p_label, p_suggested = probabilities[rows, labels], probabilities[rows, suggested]
    score = np.log(np.maximum(p_suggested, _MIN_PROBABILITY)) - np.log(np.maximum(p_label, _MIN_PROBABILITY))
    score = np.where(is_scored, score, np.nan)
    noise_rate = estimate_noise_rate(probabilities[is_scored], labels[is_scored])
    frame = pd.DataFrame(
        {
            "index": rows,
            "label": labels,
            "suggested": suggested,
            "score": score,
            "p_label": p_label,
            "p_suggested": p_suggested,
            "is_suspect": most_suspicious(score, round(noise_rate * int(is_scored.sum()))),
        }
    )
    return frame, noise_rate


def most_suspicious(scores: np.ndarray, count: int) -> np.ndarray:
    """Whether each score is positive and among the ``count`` largest, [n]. Ties keep the order of the data."""
    order = np.argsort(-scores, kind="stable")  # NaN is last
    result = np.zeros(len(scores), dtype=bool)
    result[order[:count]] = True
    return result & (scores > 0)


def estimate_noise_rate(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """Estimate the share of wrong labels by confident learning (Northcutt, Jiang and Chuang 2021).

    The threshold of a class is the mean probability of the class over the examples with this label. The confident class
    of an example is the class that reaches its threshold; if several do, it is the most probable of all classes. The
    noise rate of a given class is the share of other confident classes among its examples that have a confident class.
    The result is the mean of these rates, weighted by class size. It is 0 without examples.

    Args:
        probabilities: Out-of-sample probabilities [n, K].
        labels: Given labels [n].
    """
    if not len(labels):
        return 0.0
    classes = probabilities.shape[1]
    sizes = np.bincount(labels, minlength=classes)
    given = np.take_along_axis(probabilities, labels[:, None], 1)[:, 0]
    sums = np.bincount(labels, given, classes)
    thresholds = np.divide(sums, sizes, out=np.full(classes, np.inf), where=sizes > 0)
    is_confident = probabilities >= thresholds - _TOLERANCE
    several = is_confident.sum(1) > 1
    confident = np.where(several, probabilities.argmax(1), is_confident.argmax(1))
    counted = is_confident.any(1)
    totals = np.bincount(labels, counted, classes)
    wrong = np.bincount(labels, counted & (confident != labels), classes)
    shares = np.divide(wrong, totals, out=np.zeros(classes), where=totals > 0)
    return float((shares * sizes).sum() / sizes.sum())
