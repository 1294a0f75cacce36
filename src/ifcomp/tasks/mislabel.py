"""Which labels are wrong: a table of scores, sorted and cut.

Labels are sorted by label complexity: the stochastic complexity of the given label where the suggested one is the only
other choice.
Larger = more suspicious; codelengths in nats.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from ifcomp.curvature.factors import Relative
from ifcomp.errors import SettingError
from ifcomp.scores import DESCRIPTIONS, ScoreTable, write_csv, write_parquet
from ifcomp.tasks.metrics import checked_scores

#: What to fit, score and sort with for an audit: at or above the plain loss at every stage of training, where
#: stochastic complexity loses several points on asymmetric noise that is not memorised yet
#: (experiments/audit_defaults/results).
AUDIT_BETA = 1.0
AUDIT_DAMPING = Relative(10.0)
AUDIT_COLUMN = "label_complexity"

#: Label complexity in nats above which the model finds the suggested label more likely than the given one.
EVEN_ODDS = math.log(2)

_OWN_DESCRIPTIONS = {
    "rank": "1 = the most suspicious label",
    "is_suspect": "whether the label is among the suspects; they are worth a look, not certainly wrong",
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
    """Labels from the most to the least suspicious.

    Attributes:
        frame: All examples, the largest label complexity first; see `descriptions` for the columns.
        threshold: Label complexity of the last suspect in nats; infinite if there is none.
        noise_rate: Share of wrong labels, as given or as estimated.
        settings: How the scores were made and the suspects chosen.
    """

    frame: pd.DataFrame
    threshold: float
    noise_rate: float
    settings: Mapping[str, Any]

    @property
    def suspects(self) -> pd.DataFrame:
        """The rows of suspects, most suspicious first."""
        return self.frame[self.frame["is_suspect"]]

    @property
    def descriptions(self) -> dict[str, str]:
        """Meaning, direction and unit of every column."""
        known = DESCRIPTIONS | _OWN_DESCRIPTIONS
        return {str(name): known[str(name)] for name in self.frame.columns}

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write all rows as CSV, most suspicious first. Atomic."""
        write_csv(path, self.frame)

    def to_parquet(self, path: str | os.PathLike[str]) -> None:
        """Write all rows; settings and column descriptions are in the file's metadata. Atomic."""
        write_parquet(path, self.frame, self.descriptions, self.settings)


def audit_labels(table: ScoreTable, *, fraction: float | None = None, noise_rate: float | None = None) -> LabelAudit:
    """Sort labels by label complexity and cut off the suspects; equal ones stay in the order of the data.

    Unless their share is given, suspects are the labels that the model contradicts: those of a label complexity above
    `EVEN_ODDS`. That holds up while wrong labels are being memorised, when their estimated share (`noise_rate` of the
    result, see `estimate_noise_rate`) falls to 0 long before they are no longer found. Of labels that are hard but
    right it names more.

    Args:
        table: Scores of the training data with labels.
        fraction: Share of the examples to call suspects.
        noise_rate: Share of wrong labels, if it is known: as many are called suspects. With
            ``estimate_noise_rate(table)`` they are fewer and surer.

    Raises:
        DataError: If the table has no labels.
        SettingError: If both are given, or one is outside 0 ... 1.
    """
    if fraction is not None and noise_rate is not None:
        raise SettingError("Give fraction or noise_rate, not both: each says how many labels are suspects.")
    for name, share in (("fraction", fraction), ("noise_rate", noise_rate)):
        if share is not None and not 0 <= share <= 1:
            raise SettingError(f"{name} must be in 0 ... 1, but is {share!r}.")
    complexity = checked_scores("label complexities", table.column(AUDIT_COLUMN))
    rate = estimate_noise_rate(table) if noise_rate is None else float(noise_rate)
    share = noise_rate if fraction is None else fraction
    flagged = int((complexity > EVEN_ODDS).sum()) if share is None else round(share * len(table))
    order = np.lexsort((table.column("index"), -complexity))
    rank = np.arange(1, len(order) + 1)
    frame = table.frame.iloc[order].assign(rank=rank, is_suspect=rank <= flagged).reset_index(drop=True)
    threshold = float(complexity[order[flagged - 1]]) if flagged else math.inf
    settings = {
        **table.settings,
        "fraction": fraction,
        "noise_rate": rate,
        "noise_rate_estimated": noise_rate is None,
    }
    return LabelAudit(frame.loc[:, list(_COLUMNS)], threshold, rate, settings)


def estimate_noise_rate(table: ScoreTable) -> float:
    """Share of wrong labels, counted where the model is confident.

    A class is confident of an example if it gives it at least the mean probability that it gives to the examples that
    carry its label. Examples whose suggested class is confident, and more probable than their label, count as wrong;
    of the others, those whose label is confident count as right; the rest is not counted. The share of wrong ones is
    taken within each given class, and averaged over the examples.

    The model has seen the labels, so the estimate falls short as it memorises them: read it as a lower bound. Means
    over small networks on digits with 5, 20 and 40 % of the labels replaced by random ones: 5.1, 19.3 and 39.3 %
    while less than 2 % of those are memorised (0.2 % on clean labels), 3.1, 14.7 and 37.3 % when 2 to 6 % are, and 0
    when nearly all are. A network that still underfits errs to the other side, by up to two points.

    Args:
        table: Scores of the training data with labels.
    """
    label, own = table.column("label"), table.column("label_probability")
    suggested, other = table.column("suggested_label"), table.column("suggested_probability")
    classes = int(max(label.max(), suggested.max())) + 1
    size = np.bincount(label, minlength=classes)
    typical = np.divide(np.bincount(label, own, classes), size, out=np.full(classes, np.inf), where=size > 0)
    wrong = (other >= typical[suggested]) & (other > own)
    right = ~wrong & (own >= typical[label])
    counted = np.bincount(label, wrong | right, classes)
    share = np.divide(np.bincount(label, wrong, classes), counted, out=np.zeros(classes), where=counted > 0)
    return float((share * size).sum() / size.sum())
