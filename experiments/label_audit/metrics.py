"""Quality of a ranking and of flags of wrong labels."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from ifcomp.tasks.metrics import auroc


def ranking(scores: ArrayLike, wrong: ArrayLike) -> float | None:
    """Return the AUROC of wrong labels, or None if all labels are of one kind."""
    truth = np.asarray(wrong, dtype=bool)
    return None if truth.all() or not truth.any() else auroc(scores, truth)


def f1(flags: ArrayLike, wrong: ArrayLike) -> float | None:
    """Return the F1 of flags, ``2 TP / (flags + wrong)``, or None without wrong labels."""
    flagged, truth = np.asarray(flags, dtype=bool), np.asarray(wrong, dtype=bool)
    if not truth.any():
        return None
    return float(2 * (flagged & truth).sum() / (flagged.sum() + truth.sum()))
