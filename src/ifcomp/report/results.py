"""Parts of a report from results: neighbours, influential examples, curves and OOD scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from ifcomp.errors import DataError
from ifcomp.report.data import OODScores, ReliabilityPair
from ifcomp.report.examples import LayerNeighbours, Neighbour, OODExample, Preview, TrainingExample
from ifcomp.tasks.audit import MAX_EXPLAINED
from ifcomp.tasks.ood_table import OODTable

if TYPE_CHECKING:
    from ifcomp.tasks.audit import LabelAudit
    from ifcomp.tasks.calibration_result import Calibration

#: Largest number of suspicious examples with a preview.
MAX_PREVIEWS = 200

#: Largest number of layers in which a suspect has neighbours, and of neighbours per layer.
MAX_LAYERS = 3
MAX_NEIGHBOURS = 4

#: Largest number of flagged inputs per data set.
MAX_FLAGGED = 12

#: Returns the previews of examples at given positions.
ShowExamples = Callable[[Sequence[int]], Sequence[Preview]]


@dataclass(frozen=True)
class TrainingData:
    """The training data, for the nearest examples of flagged inputs.

    Attributes:
        labels: Given labels [n].
        show: Returns the previews of examples at given positions, or None.
    """

    labels: np.ndarray
    show: ShowExamples | None = None


def audit_parts(
    audit: LabelAudit, show: ShowExamples | None = None, show_reference: ShowExamples | None = None
) -> dict[str, Any]:
    """Return the arguments of `build_report` that come from an audit.

    Args:
        audit: The audit.
        show: Previews of the audited examples. None shows their names, if they have names.
        show_reference: Previews of the reference of the audit, if it has one.
    """
    show = show or _show_names(audit.frame)
    previewed = audit.ranked["index"].head(MAX_PREVIEWS).tolist()
    suspects = audit.suspects["index"].head(MAX_EXPLAINED).tolist()
    show_near = show_reference if audit.settings.get("has_reference") else show
    return {
        "audit": audit,
        "explanations": _influential_examples(audit, show),
        "neighbours": _nearest_examples(audit, suspects, show_near),
        "previews": _shown(show, previewed),
        "predictions": audit.evidence.members[-1].probabilities.argmax(1),
    }


def training_data_of(audit: LabelAudit, count: int, show: ShowExamples | None = None) -> TrainingData | None:
    """Return the audited data as training data; None if it does not have as many examples as that of the fit.

    Args:
        audit: The audit.
        count: Number of training examples.
        show: Previews of the audited examples. None shows their names, if they have names.
    """
    if len(audit.frame) != count:
        return None
    return TrainingData(audit.frame["label"].to_numpy(), show or _show_names(audit.frame))


def class_names_of(audit: LabelAudit) -> list[str] | None:
    """Return the class names of an audit, with the number of a class that does not occur. None without names."""
    frame = audit.frame
    if "label_name" not in frame.columns:
        return None
    names = dict(zip(frame["suggested"], frame["suggested_name"], strict=True))
    names |= zip(frame["label"], frame["label_name"], strict=True)
    return [str(names.get(label, label)) for label in range(audit.pred_probs.shape[1])]


def reliability_of(calibration: Calibration | ReliabilityPair) -> ReliabilityPair:
    """Return the cross-validated curves of the softmax and of the form that predictions use."""
    if isinstance(calibration, ReliabilityPair):
        return calibration
    curves = calibration.curves
    return ReliabilityPair(curves["softmax"], curves[calibration.form], "softmax", calibration.form)


def ood_scores_of(
    ood: OODTable | OODScores, show: ShowExamples | None = None, training: TrainingData | None = None
) -> OODScores:
    """Return the scores of a table of new inputs, and those of known OOD inputs if the table has them.

    Args:
        ood: The table. Scores are returned as they are.
        show: Previews of the new inputs. None shows their names, if they have names.
        training: The training data; None shows no nearest examples.
    """
    if isinstance(ood, OODScores):
        return ood
    if not isinstance(ood, OODTable):
        raise DataError(f"ood must be a table of a detector, gate.table(data), but is a {type(ood).__name__}.")
    known = {} if ood.ood_scores is None else {"known OOD inputs": ood.ood_scores}
    new = {"inputs": ood.frame["score"].to_numpy(), **known}
    examples = flagged_examples(ood, "inputs", show, training)
    return OODScores(ood.rule.held_out_scores, new, ood.threshold, ood.rule.title, examples)


def flagged_examples(
    table: OODTable, name: str, show: ShowExamples | None, training: TrainingData | None
) -> tuple[OODExample, ...]:
    """Return the most surprising flagged inputs of a table, with their nearest training examples.

    Args:
        table: The table.
        name: Name of its data.
        show: Previews of its inputs. None shows their names, if they have names.
        training: The training data; None shows no nearest examples.
    """
    rows = table.flagged.head(MAX_FLAGGED)
    previews = _shown(show or _show_names(table.frame), rows["index"].tolist())
    near: dict[int, list[int]] = {}
    if training is not None and table.nearest is not None:
        near = {index: table.nearest[index].tolist() for index in rows["index"].tolist()}
    shown = _shown(
        None if training is None else training.show, sorted({position for found in near.values() for position in found})
    )
    return tuple(
        OODExample(
            name,
            int(row["index"]),
            float(row["score"]),
            int(row["prediction"]),
            float(row["confidence"]),
            previews.get(row["index"]),
            tuple(
                Neighbour(position, int(training.labels[position]), shown.get(position))
                for position in near.get(row["index"], [])
                if training is not None
            ),
        )
        for row in rows.to_dict("records")
    )


def _show_names(frame: pd.DataFrame) -> ShowExamples | None:
    """Show the column ``name``: file names or texts."""
    if "name" not in frame.columns:
        return None
    names = frame["name"].tolist()
    return lambda indices: [Preview("text", str(names[index])) for index in indices]


def _shown(show: ShowExamples | None, indices: Sequence[int]) -> dict[int, Preview]:
    return {} if show is None else dict(zip(indices, show(indices), strict=True))


def _nearest_examples(
    audit: LabelAudit, suspects: Sequence[int], show: ShowExamples | None
) -> dict[int, tuple[LayerNeighbours, ...]]:
    """Return the nearest examples of each suspect in the layers of largest weight."""
    tables = {
        suspect: audit.neighbours(suspect).head(MAX_LAYERS).sort_index(ascending=False)  # the deepest layer first
        for suspect in suspects
    }
    near = {index for rows in tables.values() for indices in rows["neighbours"] for index in indices[:MAX_NEIGHBOURS]}
    previews: Mapping[int, Preview] = _shown(show, sorted(near))

    def examples(indices: Sequence[int], labels: Sequence[int]) -> tuple[Neighbour, ...]:
        pairs = list(zip(indices, labels, strict=True))[:MAX_NEIGHBOURS]
        return tuple(Neighbour(index, label, previews.get(index)) for index, label in pairs)

    return {
        suspect: tuple(
            LayerNeighbours(
                row["layer"],
                row["weight"],
                examples(row["neighbours"], row["neighbour_labels"]),
                tuple(row["neighbour_labels"]),
            )
            for row in rows.to_dict("records")
        )
        for suspect, rows in tables.items()
    }


def _influential_examples(audit: LabelAudit, show: ShowExamples | None) -> dict[int, tuple[TrainingExample, ...]]:
    """Return the training examples that most support and most contradict the label of each suspect, strongest first."""
    if audit.influential is None:
        return {}
    previews = _shown(show, sorted({int(index) for index in audit.influential["index"]}))
    return {
        int(rows["suspect"].iloc[0]): tuple(
            TrainingExample(row["index"], row["effect"], row["label"], previews.get(row["index"]))
            for row in rows.to_dict("records")
        )
        for _, rows in audit.influential.groupby("suspect", sort=False)
    }
