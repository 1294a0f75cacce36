"""Label audits: a table of labels from the pooled evidence of all layers, with suspects and noise rate."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from ifcomp.curvature.factors import Relative
from ifcomp.errors import DataError, IfcompWarning, SettingError
from ifcomp.evidence.members import MODEL, Evidence
from ifcomp.evidence.pool import mix, pool_weights
from ifcomp.tables import TableResult
from ifcomp.tasks.suspects import label_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Damping of label complexity in audits. With it the mean AUROC of wrong labels is at least that of the plain loss at
#: every stage of training (experiments/audit_defaults/results).
AUDIT_DAMPING = Relative(10.0)

#: Largest number of suspects with influential examples, and number of supporting and of contradicting examples of each.
MAX_EXPLAINED, EXAMPLES_PER_SIDE = 50, 4

#: Smallest probability in a likelihood.
_MIN_PROBABILITY = 1e-6

#: Smallest weight of the members that carry the pool. The largest weight is 1.
_CARRYING = 0.1

#: Number of members that carry the pool below which there is a warning.
_MIN_CARRYING = 3

#: `LabelAudit.memorised` above which the headline mentions memorised labels.
_MEMORISED = 0.05

#: Echo of the softmax above which the model has memorised labels. Otherwise it may only be more accurate than its
#: layers.
_CLEAR_ECHO = 0.5

#: Share of labels that both the layers and the output contradict above which preprocessing, weights or order of the
#: classes are probably wrong. A model that predicts the labels was trained on them with this preprocessing.
_MOSTLY_CONTRADICTED = 0.5

#: `LabelAudit.memorised` below which they are probably wrong, too: the layers are more accurate than the output.
_LESS_THAN_LAYERS = -0.2

#: Noise rate above which the headline mentions that hard classes may be the reason.
_LARGE_NOISE_RATE = 0.2

#: Number of contradicted labels that are no suspects, relative to the suspects, above which the headline mentions them.
_FURTHER = 0.5

#: Description of every column of `LabelAudit.frame`.
DESCRIPTIONS = {
    "index": "position in the data",
    "name": "file name or text of the example",
    "label": "given label",
    "label_name": "name of the given label",
    "suggested": "most probable label other than the given one",
    "suggested_name": "name of the suggested label",
    "score": "log p(suggested) - log p(label) of the pool in nats; larger = more suspicious",
    "p_label": "pooled probability of the given label",
    "p_suggested": "pooled probability of the suggested label",
    "is_suspect": "whether the label is a suspect: a positive score among the largest; the noise rate sets their limit",
    "label_complexity": "stochastic complexity in nats, against the most probable other label of the model alone",
}


@dataclass(frozen=True, eq=False, repr=False)
class LabelAudit(TableResult):
    """Result of a label audit.

    Attributes:
        frame: One row per example in the order of the data; `descriptions` describes the columns.
        pred_probs: Pooled distributions [n, K]. Each example is left out of the predictors of its label, but not of the
            training of the model.
        noise_rate: Share of wrong labels estimated by confident learning, which assumes out-of-sample probabilities.
        memorised: Accuracy of the model minus accuracy of the pool, both on the given labels.
        weights: One row per member of the pool: layer, predictor, ``weight`` (the largest is 1), ``support`` and
            ``echo``. These two are the shares of labels that the member predicts, among the labels that the other
            members support and among those that they contradict.
        evidence: Distributions of all members, and nearest neighbours per layer.
        settings: Settings of the audit.
        influential: Training examples that most support and most contradict the labels of the first 50 suspects, as
            in `IFComp.explain`: suspect, role, rank, index, label and effect. None without a fit on as many examples,
            without suspects, in several processes, and for inputs of different shapes.
    """

    frame: pd.DataFrame
    pred_probs: np.ndarray
    noise_rate: float
    memorised: float
    weights: pd.DataFrame
    evidence: Evidence
    settings: Mapping[str, Any]
    influential: pd.DataFrame | None = None

    @property
    def suspects(self) -> pd.DataFrame:
        """Rows of the suspects, most suspicious first."""
        return self.frame[self.frame["is_suspect"]].sort_values("score", ascending=False, kind="stable")

    @property
    def ranked(self) -> pd.DataFrame:
        """All rows, most suspicious first. Labels that are not scored come last."""
        return self.frame.sort_values("score", ascending=False, kind="stable")

    @property
    def descriptions(self) -> dict[str, str]:
        """Meaning, direction and unit of every column of `frame`."""
        return {str(name): DESCRIPTIONS[str(name)] for name in self.frame.columns}

    @property
    def headline(self) -> str:
        """Summary of the audit; warnings about its reliability come first."""
        sentences = [] if self.mismatch is None else [self.mismatch]
        if self.memorised > _MEMORISED:
            verb = "has" if self.weights["echo"].iloc[-1] > _CLEAR_ECHO else "may have"
            sentences.append(
                f"The model {verb} memorised labels: its accuracy on them is {100 * self.memorised:.0f} points above "
                f"that of its layers. The audit relies on {_carrying_layers(self.weights)}."
            )
        if self._is_input_uninformative:
            sentences.append(
                "The input alone predicts the labels no better than the class frequencies, so the audit cannot "
                "distinguish learnt labels from memorised ones: give reference= with labels that you trust."
            )
        count, total = len(self.suspects), len(self.frame)
        sentences.append(
            f"{count:,} of {total:,} labels are suspects; the estimated noise rate is {self.noise_rate:.1%}."
        )
        if self.noise_rate > _LARGE_NOISE_RATE:
            sentences.append(
                f"The layers predict {1 - self._contradicted:.0%} of the labels. If the classes are hard to "
                "distinguish, the noise rate is too high and many suspects are correct labels: inspect the most "
                "suspicious ones first."
            )
        further = int((self.frame["score"] > 0).sum()) - count
        if further > _FURTHER * count:
            sentences.append(
                f"The layers contradict {further:,} more labels, with smaller scores: hard examples, or further wrong "
                "labels."
            )
        if not count:
            sentences.append(
                "An audit does not find wrong labels that every layer has memorised: inspect the most suspicious "
                "labels anyway, or give reference= with labels that you trust."
            )
        return " ".join(sentences)

    @property
    def mismatch(self) -> str | None:
        """Why model and data probably do not match, with advice; None if nothing indicates it.

        Either the layers and the output of the model each contradict more than half of the labels, or the model is less
        accurate than its layers by more than 20 points.
        """
        advice = "check the preprocessing, the weights of the model and the order of the classes"
        sentences = []
        if min(self._contradicted, 1 - self._model_accuracy) > _MOSTLY_CONTRADICTED:
            sentences.append(f"The layers contradict {self._contradicted:.0%} of the labels: {advice} first.")
        if self.memorised < _LESS_THAN_LAYERS:
            sentences.append(
                f"The accuracy of the model on these labels is {-100 * self.memorised:.0f} points below that of its "
                f"layers: {advice}."
            )
        return " ".join(sentences) or None

    @property
    def _contradicted(self) -> float:
        """Share of labels with a positive score."""
        return float((self.frame["score"] > 0).mean())

    @property
    def _model_accuracy(self) -> float:
        """Accuracy of the model on the given labels."""
        return _accuracy(self.evidence.members[-1].probabilities, self.frame["label"].to_numpy())

    @property
    def _is_input_uninformative(self) -> bool:
        """Whether no predictor on untrained features has a larger likelihood than the frequencies it was fitted on."""
        labels, fitted = self.frame["label"].to_numpy(), self.evidence.reference_labels
        frequencies = np.bincount(fitted, minlength=self.pred_probs.shape[1]) / len(fitted)
        untrained = [member.probabilities for member in self.evidence.members if not member.is_trained]
        baseline = np.log(np.maximum(frequencies[labels], _MIN_PROBABILITY)).mean()
        rows = np.arange(len(labels))
        return bool(untrained) and all(
            np.log(np.maximum(found[rows, labels], _MIN_PROBABILITY)).mean() <= baseline for found in untrained
        )

    def why(self, index: int) -> pd.DataFrame:
        """Return the evidence of every predictor about one label, in the order of the layers.

        Columns: layer, predictor, weight, ``p_label``, ``p_suggested``, ``neighbours`` and ``neighbour_labels``.
        ``neighbours`` are positions in the reference, by default the audited data, nearest first. Only rows of votes
        have neighbours.

        Args:
            index: Position in the data.
        """
        if not 0 <= index < len(self.frame):
            raise SettingError(f"index must be in 0 ... {len(self.frame) - 1}, but is {index}.")
        label, suggested = (int(self.frame[name].iloc[index]) for name in ("label", "suggested"))
        rows = []
        for member, weight in zip(self.evidence.members, self.weights["weight"], strict=True):
            has_neighbours = member.predictor == "votes"
            near = self.evidence.neighbours[member.layer][index] if has_neighbours else np.zeros(0, dtype=int)
            rows.append(
                {
                    "layer": member.layer,
                    "predictor": member.predictor,
                    "weight": weight,
                    "p_label": member.probabilities[index, label],
                    "p_suggested": member.probabilities[index, suggested],
                    "neighbours": near.tolist(),
                    "neighbour_labels": self.evidence.reference_labels[near].tolist(),
                }
            )
        return pd.DataFrame(rows)

    def neighbours(self, index: int) -> pd.DataFrame:
        """Return the nearest examples of one example in the layers that carry the audit, largest weight first.

        A layer carries the audit if the weight of its votes is at least 0.1. All layers are returned if none does.
        Columns: layer, weight, ``neighbours`` and ``neighbour_labels``, as in `why`.

        Args:
            index: Position in the data.
        """
        rows = self.why(index)
        rows = rows[rows["neighbours"].map(len) > 0].sort_values("weight", ascending=False, kind="stable")
        carrying = rows[rows["weight"] >= _CARRYING]
        return (rows if carrying.empty else carrying)[["layer", "weight", "neighbours", "neighbour_labels"]]

    def with_names(self, classes: Sequence[str] | None = None, examples: Sequence[str] | None = None) -> LabelAudit:
        """Return the same audit with names in its table: ``label_name``, ``suggested_name`` and ``name``.

        Names that the data knows are replaced.

        Args:
            classes: Names of the classes 0 ... K-1.
            examples: File names or texts of the examples, in the order of the data.
        """
        frame = self.frame.copy()
        if examples is not None:
            if len(examples) != len(frame):
                raise DataError(
                    f"There are {len(examples):,} names of examples, but {len(frame):,} examples. Give one per example."
                )
            _insert_after(frame, "index", "name", list(examples))
        if classes is not None:
            if len(classes) != self.pred_probs.shape[1]:
                raise DataError(
                    f"There are {len(classes)} class names, but {self.pred_probs.shape[1]} classes. Give one per class."
                )
            for name in ("label", "suggested"):
                _insert_after(frame, name, f"{name}_name", [classes[label] for label in frame[name]])
        return replace(self, frame=frame)

    def plot(self) -> Figure:
        """Draw weight and echo of every member, layer by layer."""
        return plot_weights(self.weights)

    @property
    def answer(self) -> str:
        """Number of suspects, noise rate and `memorised`, at least 0."""
        return (
            f"{len(self.suspects):,} suspects among {len(self.frame):,} labels, noise rate {self.noise_rate:.1%}, "
            f"memorised {max(0.0, self.memorised):.1%}"
        )

    @property
    def shown(self) -> pd.DataFrame:
        """The suspects; all rows, most suspicious first, if there are none."""
        return self.suspects if len(self.suspects) else self.ranked


def audit_evidence(evidence: Evidence, settings: Mapping[str, Any], *, seed: int = 0) -> LabelAudit:
    """Return the audit of evidence: pool the members and choose the suspects.

    Args:
        evidence: Distributions of all members.
        settings: Settings to store in the result.
        seed: Seed of the sample from which weights are computed.
    """
    labels = evidence.labels
    fitted = None if evidence.is_left_out else evidence.reference_labels
    weights = pool_weights(evidence.members, labels, fitted, seed=seed)
    pooled = mix([member.probabilities for member in evidence.members], weights.weight)
    table = pd.DataFrame(
        {
            "layer": [member.layer for member in evidence.members],
            "predictor": [member.predictor for member in evidence.members],
            "weight": weights.weight,
            "support": weights.support,
            "echo": weights.echo,
        }
    )
    _warn_of_few_members(table)
    sizes = np.bincount(evidence.reference_labels, minlength=pooled.shape[1])
    frame, noise_rate = label_table(pooled, labels, sizes[labels] > (1 if evidence.is_left_out else 0))
    memorised = _accuracy(evidence.members[-1].probabilities, labels) - _accuracy(pooled, labels)
    return LabelAudit(frame, pooled, noise_rate, memorised, table, evidence, settings)


def _insert_after(frame: pd.DataFrame, column: str, name: str, values: Sequence[str]) -> None:
    """Insert a column, or replace it."""
    if name in frame:
        frame[name] = values
        return
    frame.insert(frame.columns.tolist().index(column) + 1, name, values)


def _accuracy(probabilities: np.ndarray, labels: np.ndarray) -> float:
    return float((probabilities.argmax(1) == labels).mean())


def _warn_of_few_members(table: pd.DataFrame) -> None:
    carrying = table[table["weight"] >= _CARRYING]
    if len(carrying) < _MIN_CARRYING:
        names = ", ".join(f"{row.layer} ({row.predictor})" for row in carrying.itertuples())
        warnings.warn(
            f"The audit relies on only {len(carrying)} of {len(table)} predictors: {names}. The others have a weight "
            f"below {_CARRYING} (see audit.weights). Review the suspects, or give reference= with labels that you "
            "trust.",
            IfcompWarning,
            stacklevel=5,
        )


def _carrying_layers(weights: pd.DataFrame) -> str:
    """Return the number and the names of the layers that carry the pool."""
    layers = weights.groupby("layer", sort=False)["weight"].max()
    inner = layers.drop(MODEL)
    names = list(inner[inner >= _CARRYING].index)
    text = ", ".join(names) if len(names) <= 3 else f"{names[0]} to {names[-1]}"
    return f"{len(names)} of {len(inner)} layers ({text})" if names else "the output of the model alone"


def plot_weights(weights: pd.DataFrame) -> Figure:
    """Draw weight and echo of every member as bars, layer by layer.

    Args:
        weights: `LabelAudit.weights`.
    """
    from matplotlib.figure import Figure

    layers = list(dict.fromkeys(weights["layer"]))
    figure = Figure(figsize=(7, 0.6 + 0.3 * len(layers)), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    offsets = {"votes": -0.2, "readout": 0.2, MODEL: 0.0}
    for column, title, axis in (("weight", "weight in the pool", axes[0]), ("echo", "echo of given labels", axes[1])):
        for predictor, rows in weights.groupby("predictor", sort=False):
            places = [layers.index(name) + offsets[str(predictor)] for name in rows["layer"]]
            axis.barh(places, rows[column], height=0.38, label=str(predictor))
        axis.set_title(title, fontsize=10)
        axis.set_xlim(0, 1)
    axes[0].set_yticks(range(len(layers)), layers)
    axes[0].invert_yaxis()
    axes[1].legend(fontsize=8)
    return figure
