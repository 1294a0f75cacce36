"""Which training examples can be dropped: those of the lowest stochastic complexity, learnt best."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from ifcomp.curvature.factors import Relative
from ifcomp.errors import SettingError
from ifcomp.scores import ScoreTable
from ifcomp.tasks.metrics import checked_scores

Integers = NDArray[np.int64]

#: What to score with before pruning: parametric complexity still counts beside the error.
PRUNING_DAMPING = Relative(1.0)

#: So that 0.29 of 100 are 29, although the product is a little less.
_ROUNDING = 1e-9


def keep_lists(table: ScoreTable, fractions: Iterable[float], *, balanced: bool = False) -> dict[float, Integers]:
    """Positions of the examples to keep after dropping each fraction, lowest stochastic complexity first.

    The lists are nested: what a larger fraction keeps, a smaller one keeps too. Equal complexities are dropped in the
    order of the data.

    Args:
        table: Scores of the training data with labels.
        fractions: To drop, each in [0, 1); of N examples ``floor(fraction * N)`` are dropped.
        balanced: Drop the fraction of each class instead of the whole; every class keeps at least one example.

    Returns:
        For each fraction, the values of the column ``index`` to keep, increasing.
    """
    wanted = [float(fraction) for fraction in fractions]
    wrong = [fraction for fraction in wanted if not 0 <= fraction < 1]
    if wrong:
        raise SettingError(f"fractions must be in [0, 1), but {', '.join(map(str, wrong))} are not.")
    index = table.column("index")
    order = np.lexsort((index, checked_scores("stochastic complexities", table.column("stochastic_complexity"))))
    group = table.column("label")[order] if balanced else np.zeros(len(order), dtype=np.int64)
    rank, size = _ranks_within(group)
    return {fraction: np.sort(index[order[rank >= np.floor(fraction * size + _ROUNDING)]]) for fraction in wanted}


def _ranks_within(group: NDArray[np.int64]) -> tuple[Integers, Integers]:
    """For each example its position within its group, and the size of the group, [N] each."""
    rank, size = np.empty_like(group), np.empty_like(group)
    for value in np.unique(group):
        own = group == value
        rank[own], size[own] = np.arange(own.sum()), own.sum()
    return rank, size
