"""Which inputs are unlike anything the model knows: thresholds, flags and metrics on scores.

Larger = more surprising, more out-of-distribution (OOD), everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from sklearn.metrics import average_precision_score, roc_auc_score

from ifcomp.curvature.factors import Relative
from ifcomp.errors import SettingError
from ifcomp.scores import ScoreTable
from ifcomp.tasks.metrics import checked_scores

#: The damping to score with for out-of-distribution detection. Small eigenvalues of the curvature carry the signal, and
#: larger damping hides it: on a MNIST LeNet at beta = 0.66, AUROC against KMNIST and notMNIST is 98.9 and 99.0 % with
#: next to no damping, 98.5 and 97.8 % with ``Relative(0.1)``; at beta = 0.1 the loss is far larger.
OOD_DAMPING = Relative(1e-4)

#: The score that is compared with the threshold, in nats. At beta = 1 it is far above parametric complexity
#: where the model is sure of strange inputs, and about as good or better elsewhere (experiments/ood_defaults/results).
OOD_COLUMN = "bounded_complexity"

#: The score in its place where scores are from probes, which do not give single labels, or capped; in nats.
PARAMETRIC_COLUMN = "parametric_complexity"


#: The columns about the input.
_COLUMNS = ("index", "prediction", "confidence", "expected_influence", OOD_COLUMN, PARAMETRIC_COLUMN, "surprise")


@dataclass(frozen=True)
class OODMetrics:
    """How well scores tell in-distribution (in) from out-of-distribution (out) inputs; all from 0 to 1.

    Attributes:
        auroc: Probability that an out input has a larger score than an in input; 0.5 is chance, larger is better.
        aupr_in: Average precision of finding in inputs by small scores; larger is better.
        aupr_out: Average precision of finding out inputs by large scores; larger is better.
        fpr95: Share of out inputs that are accepted when 95 % of in inputs are; smaller is better.
    """

    auroc: float
    aupr_in: float
    aupr_out: float
    fpr95: float


def ood_threshold(scores: ArrayLike, tpr: float = 0.95) -> float:
    """The smallest of the scores such that at least a share ``tpr`` of them is not larger, so accepted.

    Args:
        scores: Of held-out in-distribution inputs, [N]; larger = more surprising.
        tpr: True positive rate: the share of in-distribution inputs to accept, in (0, 1].
    """
    values = np.sort(checked_scores("scores", scores))
    if not 0 < tpr <= 1:
        raise SettingError(f"tpr must be in (0, 1], but is {tpr!r}.")
    return float(values[np.arange(1, len(values) + 1) / len(values) >= tpr][0])


def flag_ood(table: ScoreTable, threshold: float, column: str = OOD_COLUMN) -> pd.DataFrame:
    """Which examples of a table are out-of-distribution, most surprising first.

    Args:
        table: Scores, made with the damping and beta that the threshold was made with.
        threshold: Nats, from `ood_threshold` of the same column of in-distribution data.
        column: The score; `PARAMETRIC_COLUMN` for scores from probes, and capped ones.

    Returns:
        A frame with ``index``, the columns about the input, and ``is_ood``: whether the score is above the threshold.
    """
    if np.isnan(threshold):
        raise SettingError("threshold must be a number of nats, but is NaN.")
    is_ood = checked_scores(column, table.column(column)) > threshold
    frame = table.frame.loc[:, [name for name in table.frame.columns if name in _COLUMNS]].assign(is_ood=is_ood)
    return frame.sort_values([column, "index"], ascending=[False, True], ignore_index=True)


def ood_metrics(in_scores: ArrayLike, out_scores: ArrayLike) -> OODMetrics:
    """How well scores separate.

    Args:
        in_scores: Of in-distribution inputs, [N]; larger = more surprising.
        out_scores: Of out-of-distribution inputs, [M].
    """
    inside, outside = checked_scores("in_scores", in_scores), checked_scores("out_scores", out_scores)
    _, values = np.unique(np.concatenate([inside, outside]), return_inverse=True)  # ranks: infinite scores are fine
    is_out = np.arange(len(values)) >= len(inside)
    return OODMetrics(
        auroc=float(roc_auc_score(is_out, values)),
        aupr_in=float(average_precision_score(~is_out, -values)),
        aupr_out=float(average_precision_score(is_out, values)),
        fpr95=float((outside <= ood_threshold(inside, 0.95)).mean()),
    )
