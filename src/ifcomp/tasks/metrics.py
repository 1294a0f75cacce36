"""How good probabilities and scores are: pure functions, arrays in, numbers out.

Everything takes what ``numpy.asarray`` takes, tensors on the CPU included.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.metrics import roc_auc_score

from ifcomp.errors import DataError, LabelError, SettingError

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

#: How far a row of probabilities may be from a sum of 1: float32 over a thousand classes is much closer.
SUM_TOLERANCE = 1e-3


def expected_calibration_error(probabilities: ArrayLike, labels: ArrayLike, bins: int = 20) -> float:
    """Mean distance between confidence and accuracy over bins with equally many examples; smaller is better.

    Examples are sorted by confidence (the largest probability) and cut into bins whose sizes differ by at most one;
    each bin counts ``|mean confidence - accuracy|``, weighted by its size.

    Args:
        probabilities: [N, K], rows sum to 1.
        labels: [N] integers in 0 ... K-1.
        bins: Number of bins; with fewer examples than that, every example is a bin.
    """
    if bins < 1:
        raise SettingError(f"bins must be at least 1, but is {bins}.")
    values, truth = _checked(probabilities, labels)
    confidence = values.max(1)
    gap = confidence - (values.argmax(1) == truth)
    ordered = gap[np.argsort(confidence, kind="stable")]
    parts = np.array_split(ordered, min(bins, len(ordered)))
    return float(sum(abs(part.sum()) for part in parts) / len(ordered))


def negative_log_likelihood(probabilities: ArrayLike, labels: ArrayLike) -> float:
    """Mean ``-log p`` of the labels in nats; smaller is better, infinite where a label has no probability.

    Args:
        probabilities: [N, K], rows sum to 1.
        labels: [N] integers in 0 ... K-1.
    """
    values, truth = _checked(probabilities, labels)
    with np.errstate(divide="ignore"):
        return float(-np.log(values[np.arange(len(truth)), truth]).mean())


def accuracy(probabilities: ArrayLike, labels: ArrayLike) -> float:
    """Share of examples whose largest probability is the label's.

    Args:
        probabilities: [N, K], rows sum to 1.
        labels: [N] integers in 0 ... K-1.
    """
    values, truth = _checked(probabilities, labels)
    return float((values.argmax(1) == truth).mean())


def auroc(scores: ArrayLike, positive: ArrayLike) -> float:
    """Probability that a positive example has a larger score than another; 0.5 is chance, larger is better.

    Args:
        scores: [N], larger = more surprising.
        positive: [N] booleans: which examples should be surprising.
    """
    values, truth = np.asarray(scores, dtype=np.float64), np.asarray(positive, dtype=bool)
    if values.ndim != 1 or values.shape != truth.shape:
        raise DataError(
            f"auroc needs scores and positive of one shape [N], but got {list(values.shape)} and {list(truth.shape)}."
        )
    if truth.all() or not truth.any():
        raise DataError("auroc needs positive and other examples, but all are of one kind.")
    return float(roc_auc_score(truth, values))


def _checked(probabilities: ArrayLike, labels: ArrayLike) -> tuple[Floats, Integers]:
    values, truth = np.asarray(probabilities, dtype=np.float64), np.asarray(labels)
    if values.ndim != 2 or not values.size:
        raise DataError(f"probabilities must have shape [N, K] with N > 0, but have {list(values.shape)}.")
    if not (values >= 0).all() or not (abs(values.sum(1) - 1) <= SUM_TOLERANCE).all():
        raise DataError("Every row of probabilities must be at least 0 and sum to 1. For logits use softmax first.")
    if truth.shape != (len(values),) or truth.dtype.kind not in "iu":
        raise LabelError(
            f"labels must be integers of shape [{len(values)}], but are {truth.dtype} of shape {list(truth.shape)}."
        )
    if truth.min() < 0 or truth.max() >= values.shape[1]:
        raise LabelError(f"labels must be in 0 ... {values.shape[1] - 1}, but go from {truth.min()} to {truth.max()}.")
    return values, truth.astype(np.int64)
