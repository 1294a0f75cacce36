"""Separation of two kinds of examples by a score.

All arguments are array-like, including tensors on the CPU.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ifcomp.errors import DataError, LabelError

Floats = NDArray[np.float64]


def auroc(scores: ArrayLike, positive: ArrayLike) -> float:
    """Area under the ROC curve; 0.5 is chance, larger is better.

    This is the probability that a random positive example has a larger score than a random other example.

    Args:
        scores: Scores, [N]; larger = more surprising.
        positive: Booleans, [N]; True for the examples that should have large scores.
    """
    from sklearn.metrics import roc_auc_score  # slow import

    values, truth = np.asarray(scores, dtype=np.float64), np.asarray(positive, dtype=bool)
    if values.ndim != 1 or values.shape != truth.shape:
        raise DataError(
            f"auroc needs scores and positive of one shape [N], but got {list(values.shape)} and {list(truth.shape)}."
        )
    if truth.all() or not truth.any():
        raise DataError("auroc needs positive and negative examples, but all are of one kind.")
    return float(roc_auc_score(truth, checked_scores("scores", values)))


def checked_scores(name: str, scores: ArrayLike) -> Floats:
    """Return the scores as float64 [N]. Infinite scores are allowed, because scores are only compared.

    Raises:
        DataError: If the shape is not [N] with N > 0, or a score is NaN.
    """
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim != 1 or not values.size:
        raise DataError(f"{name} must have shape [N] with N > 0, but have {list(values.shape)}.")
    if np.isnan(values).any():
        raise DataError(f"{name} must be numbers, but {int(np.isnan(values).sum())} of {len(values)} are NaN.")
    return values


def checked_labels(labels: ArrayLike, count: int, classes: int) -> NDArray[np.int64]:
    """Return the labels as int64 [N].

    Args:
        labels: [N].
        count: N, the number of rows that the labels belong to.
        classes: K.

    Raises:
        LabelError: If the labels are not N integers in 0 ... K-1.
    """
    values = np.asarray(labels)
    if values.shape != (count,) or values.dtype.kind not in "iu":
        raise LabelError(
            f"labels must be integers of shape [{count}], but are {values.dtype} of shape {list(values.shape)}."
        )
    if values.min() < 0 or values.max() >= classes:
        raise LabelError(f"labels must be in 0 ... {classes - 1}, but go from {values.min()} to {values.max()}.")
    return values.astype(np.int64)
