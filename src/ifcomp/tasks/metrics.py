"""How well scores separate two kinds of examples: pure functions, arrays in, numbers out.

Everything takes what ``numpy.asarray`` takes, tensors on the CPU included.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.metrics import roc_auc_score

from ifcomp.errors import DataError

Floats = NDArray[np.float64]


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
    return float(roc_auc_score(truth, checked_scores("scores", values)))


def checked_scores(name: str, scores: ArrayLike) -> Floats:
    """The scores as float64 [N]; infinite ones are allowed, they are only compared.

    Raises:
        DataError: If they are not of shape [N] with N > 0, or one is NaN.
    """
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim != 1 or not values.size:
        raise DataError(f"{name} must have shape [N] with N > 0, but have {list(values.shape)}.")
    if np.isnan(values).any():
        raise DataError(f"{name} must be numbers, but {int(np.isnan(values).sum())} of {len(values)} are NaN.")
    return values
