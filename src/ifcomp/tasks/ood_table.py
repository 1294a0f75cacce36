"""`OODTable`: OOD scores of a data set, and the comparison with simple scores if OOD data is known."""

from __future__ import annotations

import html
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from ifcomp.tables import write_csv
from ifcomp.tasks.ood import MEMBERS, Floats, ood_metrics
from ifcomp.tasks.ood_rule import OODRule

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Names in comparisons: the joined score of the detector, and the maximum softmax probability.
JOINED, MAX_SOFTMAX = "joined", "max softmax"

#: Largest number of rows of the HTML representation.
_MAX_ROWS = 10

#: Description of every column of `OODTable.frame`.
DESCRIPTIONS = {
    "index": "position in the data",
    "name": "file name or text of the example",
    "prediction": "the model's class (argmax)",
    "confidence": "probability of that class, max softmax",
    "score": "score of the detector; larger = more surprising",
    **MEMBERS,
    "is_ood": "whether the score is above the threshold",
}


@dataclass(frozen=True, eq=False)
class OODTable:
    """OOD scores of a data set.

    Attributes:
        frame: One row per example in the order of the data; `descriptions` describes the columns.
        rule: Members, threshold and held-out scores of the detector.
        comparison: One row per score: ``score``, ``auroc`` and ``fpr95`` of the known OOD data against the data. None
            without known OOD data.
        ood_scores: Scores [M] of the known OOD data, or None.
        nearest: Positions of the nearest training examples of every input, nearest first, [n, at most 4]. They are
            among those that the fit keeps, at most 20,000. None if the score has no neighbours.
    """

    frame: pd.DataFrame
    rule: OODRule
    comparison: pd.DataFrame | None = None
    ood_scores: Floats | None = None
    nearest: np.ndarray | None = None

    @property
    def threshold(self) -> float:
        """Inputs with a larger score are flagged."""
        return self.rule.threshold

    @property
    def settings(self) -> Mapping[str, Any]:
        """Settings of fit and detector."""
        return self.rule.settings

    @property
    def ranked(self) -> pd.DataFrame:
        """All rows, most surprising first. Members order equal scores, such as those above all held-out scores."""
        members = [name for name in self.rule.members if name in self.frame.columns]
        return self.frame.sort_values(["score", *members], ascending=False, kind="stable")

    @property
    def flagged(self) -> pd.DataFrame:
        """Rows of the flagged inputs, most surprising first."""
        return self.ranked[self.ranked["is_ood"]]

    @property
    def descriptions(self) -> dict[str, str]:
        """Meaning, direction and unit of every column of `frame`."""
        return {str(name): DESCRIPTIONS[str(name)] for name in self.frame.columns}

    @property
    def best(self) -> str | None:
        """Name of the score with the largest AUROC, to 0.1 %; "joined" if equal. None without known OOD data."""
        if self.comparison is None:
            return None
        return str(self.comparison["score"][int(self.comparison["auroc"].round(3).argmax())])

    @property
    def headline(self) -> str:
        """Summary of the table."""
        text = (
            f"{len(self.flagged):,} of {len(self.frame):,} inputs are flagged: their score, {self.rule.title}, is "
            f"above {self.threshold:.3g}. The threshold accepts {self.rule.tpr:.4g} of {self.rule.size:,} held-out "
            "inputs."
        )
        if self.comparison is None or self.ood_scores is None:
            return text
        detected = float((self.ood_scores > self.threshold).mean())
        advice = "" if self.best in (JOINED, MAX_SOFTMAX) else f" score={self.best!r} uses it alone."
        return (
            f"{text} {detected:.1%} of {len(self.ood_scores):,} known OOD inputs are above it. AUROC in percent: "
            f"{self._aurocs()}. The best score is {self.best}.{advice}"
        )

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the frame as CSV. Atomic."""
        write_csv(path, self.frame)

    def plot(self) -> Figure:
        """Draw the distributions of the scores of held-out data, of the data and of known OOD data."""
        scores = {"held-out": self.rule.held_out_scores, "data": self.frame["score"].to_numpy()}
        if self.ood_scores is not None:
            scores["known OOD"] = self.ood_scores
        return draw_scores(scores, self.threshold, self.rule.title)

    def _aurocs(self) -> str:
        assert self.comparison is not None
        rows = zip(self.comparison["score"], self.comparison["auroc"], strict=True)
        return ", ".join(f"{name} {100 * value:.1f}" for name, value in rows)

    def __repr__(self) -> str:
        flagged = f"{len(self.flagged):,} of {len(self.frame):,} inputs flagged"
        if self.comparison is None:
            return f"OODTable({flagged}, {self.rule.title} above {self.threshold:.3g})"
        return f"OODTable({flagged}, best score: {self.best}, AUROC in percent: {self._aurocs()})"

    def _repr_html_(self) -> str:
        tables = [self.ranked.head(_MAX_ROWS)] if self.comparison is None else [self.comparison]
        shown = "".join(table.to_html(index=False, float_format=lambda value: f"{value:.4g}") for table in tables)
        return f"<p>{html.escape(self.headline)}</p>{shown}"


def compare_scores(inside: Mapping[str, ArrayLike], outside: Mapping[str, ArrayLike]) -> pd.DataFrame:
    """Compare scores by the separation of OOD from in-distribution inputs.

    Args:
        inside: Scores [N] of in-distribution inputs by name; larger = more surprising.
        outside: Scores [M] of OOD inputs, with the same names.

    Returns:
        One row per score with ``score``, ``auroc`` (larger is better) and ``fpr95`` (smaller is better).
    """
    metrics = {name: ood_metrics(values, outside[name]) for name, values in inside.items()}
    rows = [(name, found.auroc, found.fpr95) for name, found in metrics.items()]
    return pd.DataFrame(rows, columns=["score", "auroc", "fpr95"])


def compared_scores(rule: OODRule, frame: pd.DataFrame) -> dict[str, Floats]:
    """Return the scores to compare: the joined score, its members, energy and max softmax, each [N]."""
    joined = {} if len(rule.members) == 1 else {JOINED: rule.join({name: frame[name] for name in rule.members})}
    names: Sequence[str] = tuple(dict.fromkeys((*rule.members, "energy")))
    return {**joined, **{name: frame[name].to_numpy() for name in names}, MAX_SOFTMAX: frame["max_softmax"].to_numpy()}


def draw_scores(scores: Mapping[str, ArrayLike], threshold: float, title: str) -> Figure:
    """Draw one histogram of densities per set of scores, and the threshold.

    Args:
        scores: Scores [N] by name of the set.
        threshold: Drawn as a vertical line.
        title: Label of the horizontal axis.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.add_subplot()
    values = {name: np.asarray(found, dtype=np.float64) for name, found in scores.items()}
    edges = np.histogram_bin_edges(np.concatenate(list(values.values())), 40)
    for name, found in values.items():
        axes.hist(found, bins=list(edges), density=True, histtype="step", label=f"{name} ({len(found):,})")
    axes.axvline(threshold, color="0.4", linestyle="--", label=f"threshold {threshold:.3g}")
    axes.set(xlabel=f"score: {title}; larger = more surprising", ylabel="density")
    axes.legend()
    return figure
