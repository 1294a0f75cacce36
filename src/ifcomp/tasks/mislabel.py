"""Label audits: sort the examples of a score table by suspicion and select the suspects.

The score is label complexity: the stochastic complexity of the given label if the suggested label is the only
alternative. Larger = more suspicious; codelengths are in nats.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from ifcomp.errors import SettingError
from ifcomp.scores import DESCRIPTIONS, ScoreTable, write_csv, write_parquet
from ifcomp.tasks.audit import AUDIT_DAMPING as AUDIT_DAMPING
from ifcomp.tasks.metrics import checked_scores

#: Beta and score of audits. Their AUROC is at or above that of the plain loss at every stage of training.
#: Stochastic complexity loses several points before asymmetric noise is memorised
#: (experiments/audit_defaults/results).
AUDIT_BETA = 1.0
AUDIT_COLUMN = "label_complexity"

#: Label complexity in nats above which the suggested label is more probable than the given one.
EVEN_ODDS = math.log(2)

_AUDIT_DESCRIPTIONS = {
    "rank": "1 = the most suspicious label",
    "is_suspect": "whether the label is a suspect; suspects deserve a look, but are not certainly wrong",
}
_COLUMNS = (
    "rank",
    "index",
    "label",
    "suggested_label",
    "label_probability",
    "suggested_probability",
    "error",
    "parametric_complexity",
    "stochastic_complexity",
    "label_complexity",
    "surprise",
    "is_suspect",
)


@dataclass(frozen=True, eq=False)
class LabelAudit:
    """Result of a label audit.

    Attributes:
        frame: All examples, largest label complexity first; see `descriptions` for the columns.
        threshold: Label complexity of the last suspect in nats; infinite without suspects.
        noise_rate: Share of wrong labels, given or estimated.
        settings: Settings of the scores and of the selection of suspects.
    """

    frame: pd.DataFrame
    threshold: float
    noise_rate: float
    settings: Mapping[str, Any]

    @property
    def suspects(self) -> pd.DataFrame:
        """Rows of the suspects, most suspicious first."""
        return self.frame[self.frame["is_suspect"]]

    @property
    def descriptions(self) -> dict[str, str]:
        """Meaning, direction and unit of every column."""
        known = DESCRIPTIONS | _AUDIT_DESCRIPTIONS
        return {str(name): known[str(name)] for name in self.frame.columns}

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write all rows as CSV, most suspicious first. Atomic."""
        write_csv(path, self.frame)

    def to_parquet(self, path: str | os.PathLike[str]) -> None:
        """Write all rows as Parquet, with settings and column descriptions in the metadata. Atomic."""
        write_parquet(path, self.frame, self.descriptions, self.settings)


def audit_labels(table: ScoreTable, *, fraction: float | None = None, noise_rate: float | None = None) -> LabelAudit:
    """Sort examples by label complexity and select the suspects; ties stay in the order of the data.

    By default the suspects are the labels with a label complexity above `EVEN_ODDS`, which the model contradicts. This
    rule still works while wrong labels are being memorised, when the estimated noise rate is already near 0. It also
    selects more correct but difficult labels.

    Args:
        table: Scores of the training data with labels.
        fraction: Share of the examples to select.
        noise_rate: Known share of wrong labels; this share is selected. ``estimate_noise_rate(table)`` selects fewer
            suspects at higher precision than the default.

    Raises:
        DataError: If the table has no labels.
        SettingError: If both shares are given, or one is outside [0, 1].
    """
    if fraction is not None and noise_rate is not None:
        raise SettingError("Give fraction or noise_rate, not both: each sets the number of suspects.")
    for name, share in (("fraction", fraction), ("noise_rate", noise_rate)):
        if share is not None and not 0 <= share <= 1:
            raise SettingError(f"{name} must be in 0 ... 1, but is {share!r}.")
    complexity = checked_scores("label complexities", table.column(AUDIT_COLUMN))
    rate = estimate_noise_rate(table) if noise_rate is None else float(noise_rate)
    share = noise_rate if fraction is None else fraction
    num_suspects = int((complexity > EVEN_ODDS).sum()) if share is None else round(share * len(table))
    order = np.lexsort((table.column("index"), -complexity))
    rank = np.arange(1, len(order) + 1)
    frame = table.frame.iloc[order].assign(rank=rank, is_suspect=rank <= num_suspects).reset_index(drop=True)
    threshold = float(complexity[order[num_suspects - 1]]) if num_suspects else math.inf
    settings = {
        **table.settings,
        "fraction": fraction,
        "noise_rate": rate,
        "noise_rate_estimated": noise_rate is None,
    }
    return LabelAudit(frame.loc[:, list(_COLUMNS)], threshold, rate, settings)


def estimate_noise_rate(table: ScoreTable) -> float:
    """Estimate the share of wrong labels by confident learning.

    The threshold of a class is the mean probability that the model assigns to it over the examples with this label. A
    label counts as wrong if the probability of the suggested class is at least its threshold and larger than that of
    the label. Otherwise it counts as right if the probability of the label is at least its threshold. Other examples
    are not counted. The share of wrong labels is taken per given class, then averaged over the examples.

    The model was trained on the labels, so the estimate is a lower bound: it falls as the model memorises them. Means
    over small networks on digits with 5, 20 and 40 % random labels: 5.1, 19.3 and 39.3 % if less than 2 % of the random
    labels are memorised (0.2 % on clean labels), 3.1, 14.7 and 37.3 % if 2 to 6 % are, and 0 if nearly all are. The
    estimate of an underfitted network is up to two points too high.

    Args:
        table: Scores of the training data with labels.
    """
    label, label_p = table.column("label"), table.column("label_probability")
    suggested, suggested_p = table.column("suggested_label"), table.column("suggested_probability")
    classes = int(max(label.max(), suggested.max())) + 1
    size = np.bincount(label, minlength=classes)
    threshold = np.divide(np.bincount(label, label_p, classes), size, out=np.full(classes, np.inf), where=size > 0)
    wrong = (suggested_p >= threshold[suggested]) & (suggested_p > label_p)
    right = ~wrong & (label_p >= threshold[label])
    counted = np.bincount(label, wrong | right, classes)
    share = np.divide(np.bincount(label, wrong, classes), counted, out=np.zeros(classes), where=counted > 0)
    return float((share * size).sum() / size.sum())
