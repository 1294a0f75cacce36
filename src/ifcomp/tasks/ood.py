"""Out-of-distribution (OOD) detection on scores: thresholds, flags and metrics.

Larger scores = more surprising, more out-of-distribution.
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

#: Damping of the scores for OOD detection. OOD inputs stand out along low-curvature directions, which larger damping
#: suppresses: for a MNIST LeNet at beta = 0.66, the AUROC against KMNIST and notMNIST is 98.9 and 99.0 % with almost
#: no damping, and 98.5 and 97.8 % with ``Relative(0.1)``. At beta = 0.1 the difference is far larger.
OOD_DAMPING = Relative(1e-4)

#: Default score, in nats. At beta = 1 its AUROC is far above that of parametric complexity if the model is confident on
#: OOD inputs, and about equal or better otherwise (experiments/ood_defaults/results).
OOD_COLUMN = "bounded_complexity"

#: Score for tables from probes, which lack bounded complexity, and for capped scores; in nats.
PARAMETRIC_COLUMN = "parametric_complexity"

#: Columns that describe the input.
_COLUMNS = ("index", "prediction", "confidence", "expected_influence", OOD_COLUMN, PARAMETRIC_COLUMN, "surprise")


@dataclass(frozen=True)
class OODMetrics:
    """Separation of in-distribution (ID) and OOD inputs by a score; all values are in [0, 1].

    Attributes:
        auroc: Probability that an OOD input has a larger score than an ID input; 0.5 is chance, larger is better.
        aupr_in: Average precision of detecting ID inputs by small scores; larger is better.
        aupr_out: Average precision of detecting OOD inputs by large scores; larger is better.
        fpr95: Share of OOD inputs accepted at the threshold that accepts 95 % of ID inputs; smaller is better.
    """

    auroc: float
    aupr_in: float
    aupr_out: float
    fpr95: float


def ood_threshold(scores: ArrayLike, tpr: float = 0.95) -> float:
    """Return the smallest score that accepts at least the share ``tpr`` of the inputs.

    An input is accepted if its score is at most the threshold.

    Args:
        scores: Scores of held-out in-distribution inputs, [N]; larger = more surprising.
        tpr: True positive rate: share of in-distribution inputs to accept, in (0, 1].
    """
    values = np.sort(checked_scores("scores", scores))
    if not 0 < tpr <= 1:
        raise SettingError(f"tpr must be in (0, 1], but is {tpr!r}.")
    return float(values[np.arange(1, len(values) + 1) / len(values) >= tpr][0])


def flag_ood(table: ScoreTable, threshold: float, column: str = OOD_COLUMN) -> pd.DataFrame:
    """Flag the examples whose score is above the threshold.

    Args:
        table: Scores with the same damping and beta as those of the threshold.
        threshold: Threshold in nats, from `ood_threshold` of the same column on in-distribution data.
        column: Name of the score; `PARAMETRIC_COLUMN` for scores from probes and for capped scores.

    Returns:
        Frame with ``index``, the columns that describe the input, and ``is_ood``; most surprising first.
    """
    if np.isnan(threshold):
        raise SettingError("threshold must be a number of nats, but is NaN.")
    is_ood = checked_scores(column, table.column(column)) > threshold
    frame = table.frame.loc[:, [name for name in table.frame.columns if name in _COLUMNS]].assign(is_ood=is_ood)
    return frame.sort_values([column, "index"], ascending=[False, True], ignore_index=True)


def ood_metrics(in_scores: ArrayLike, out_scores: ArrayLike) -> OODMetrics:
    """Measure how well scores separate in-distribution from OOD inputs.

    Args:
        in_scores: Scores of in-distribution inputs, [N]; larger = more surprising.
        out_scores: Scores of OOD inputs, [M].
    """
    inside, outside = checked_scores("in_scores", in_scores), checked_scores("out_scores", out_scores)
    _, values = np.unique(np.concatenate([inside, outside]), return_inverse=True)  # ranks; scores may be infinite
    is_out = np.arange(len(values)) >= len(inside)
    return OODMetrics(
        auroc=float(roc_auc_score(is_out, values)),
        aupr_in=float(average_precision_score(~is_out, -values)),
        aupr_out=float(average_precision_score(is_out, values)),
        fpr95=float((outside <= ood_threshold(inside, 0.95)).mean()),
    )
