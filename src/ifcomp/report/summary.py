"""The results as text: answers, the model's accuracy, confusions and missing parts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ifcomp.report.data import Audit, Curve, Integers, OODScores, ReliabilityPair, ReportData
from ifcomp.tasks.audit import LARGE_NOISE_RATE

#: Largest number of classes of a confusion matrix on the page.
MAX_MATRIX = 20

#: Number of shades of a confusion matrix.
SHADES = 5

#: Quantile of the normal distribution for intervals of 95 %.
_Z = 1.959964


@dataclass(frozen=True)
class Answer:
    """The answer to one question of the user.

    Attributes:
        name: Subject of the question.
        text: The answer in a few words; empty if the question was not run.
        sentence: Figures behind the answer, or how to get one.
        anchor: Section of the page with the details.
    """

    name: str
    text: str
    sentence: str
    anchor: str


@dataclass(frozen=True)
class Confusion:
    """Number of suspects with one given and one suggested label."""

    label: int
    suggested: int
    count: int


@dataclass(frozen=True)
class Matrix:
    """A confusion matrix: counts [K, K], given label by row, and shades from 0 to `SHADES` of their cells."""

    counts: Integers
    shades: Integers


def answers(data: ReportData) -> tuple[Answer, ...]:
    """Return the answers to the questions about labels, inputs, trust and accuracy, in this order."""
    missing = dict(hints(data))

    def not_run(name: str, part: str, anchor: str) -> Answer:
        return Answer(name, "", f"Add {missing[part]}.", anchor)

    labels, inputs, trust = ("Wrong labels", "labels"), ("Unfamiliar inputs", "inputs"), ("Confidence", "trust")
    result = [
        not_run(labels[0], "label audit", "missing") if data.audit is None else _labels(data.audit, *labels),
        not_run(inputs[0], "OOD inputs", "missing") if data.ood is None else _inputs(data.ood, *inputs),
        not_run(trust[0], "calibration", "missing") if data.calibration is None else _trust(data.calibration, *trust),
    ]
    if data.audit is not None and data.predictions is not None:
        result.append(_accuracy(data.audit, data.predictions, data.calibration))
    return tuple(result)


def confusions(audit: Audit, at_most: int = 8) -> tuple[Confusion, ...]:
    """Return the most frequent pairs of given and suggested label among the suspects, most frequent first."""
    suspects = audit.frame[audit.frame["is_suspect"].astype(bool)]
    pairs = Counter(zip(suspects["label"].tolist(), suspects["suggested"].tolist(), strict=True))
    return tuple(Confusion(*pair, count) for pair, count in pairs.most_common(at_most))


def matrix(given: Sequence[int], other: Sequence[int], classes: int) -> Matrix | None:
    """Return the confusion matrix of two sequences of labels; None beyond `MAX_MATRIX` classes.

    The shade of a cell is proportional to its count relative to the largest count off the diagonal. The diagonal has
    no shade.
    """
    if classes > MAX_MATRIX:
        return None
    counts = np.zeros((classes, classes), dtype=np.int64)
    np.add.at(counts, (np.asarray(given, dtype=np.int64), np.asarray(other, dtype=np.int64)), 1)
    off_diagonal = counts * (1 - np.eye(classes, dtype=np.int64))
    largest = max(1, int(off_diagonal.max()))
    return Matrix(counts, np.ceil(SHADES * off_diagonal / largest).astype(np.int64))


def interval(share: float, count: int) -> tuple[float, float]:
    """Return the 95 % interval of a share of ``count`` examples (Wilson 1927)."""
    spread = _Z * math.sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2))
    centre, scale = share + _Z**2 / (2 * count), 1 + _Z**2 / count
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def hints(data: ReportData) -> tuple[tuple[str, str], ...]:
    """Return the missing parts, each with the option or argument that adds it."""
    parts: dict[str, tuple[object, str]] = {
        "label audit": (data.audit, "audit=ifc.audit(loader)"),
        "OOD inputs": (
            data.ood,
            "ifcomp report --ood DATA after ifcomp ood, or ood=gate.table(new) of gate = ifc.ood_detector(held_out)",
        ),
        "calibration": (
            data.calibration,
            "ifcomp calibrate RUN DATA before ifcomp report, or calibration=ifc.calibrate(held_out)",
        ),
        "coverage of the fit": (data.coverage, "coverage=ifc.coverage"),
        "provenance": (data.provenance, "provenance=current_provenance(seed=0)"),
    }
    if data.audit is not None:
        parts |= {
            "accuracy and confusion matrix of the model": (data.predictions, "predictions=logits.argmax(1)"),
            "names of the classes": (data.class_names, "class_names=[...]"),
            "previews of the examples": (data.previews or None, "previews={index: Preview('image', pixels)}"),
            "neighbours of the suspects": (
                data.neighbours or None,
                "neighbours={suspect: [LayerNeighbours(layer, weight, (Neighbour(index, label),))]}",
            ),
            "influential training examples": (
                data.explanations or None,
                "an audit of the training data after fit, or explanations={suspect: [TrainingExample(...)]}",
            ),
        }
    if data.ood is not None and not any(example.nearest for example in data.ood.examples):
        parts["nearest training examples of flagged inputs"] = (None, "an audit of the training data to the report")
    return tuple((name, how) for name, (part, how) in parts.items() if part is None)


def _labels(audit: Audit, name: str, anchor: str) -> Answer:
    suspects = audit.frame[audit.frame["is_suspect"].astype(bool)]
    caution = ", too high if the classes are hard to distinguish" if audit.noise_rate > LARGE_NOISE_RATE else ""
    total, noise = len(audit.frame), f"The estimated noise rate is {audit.noise_rate:.1%}{caution}."
    if suspects.empty:
        return Answer(name, "No suspects", f"None of {total:,} labels is a suspect. {noise}", anchor)
    return Answer(
        name,
        f"{_count(len(suspects), 'label')} to check",
        f"Suspects among {total:,} labels. {noise} Hard examples are among the suspects, so look before you decide.",
        anchor,
    )


def _inputs(ood: OODScores, name: str, anchor: str) -> Answer:
    held_out, *new = ood.groups.values()
    scores = np.concatenate(new)
    flagged, share = int((scores > ood.threshold).sum()), float((held_out > ood.threshold).mean())
    return Answer(
        name,
        f"{_count(flagged, 'input')} the model does not know",
        f"{flagged:,} of {len(scores):,} inputs are above the threshold. So are {_percent(share)} of the held-out "
        f"inputs: about {round(share * len(scores)):,} of {len(scores):,} familiar inputs would be flagged too.",
        anchor,
    )


def _trust(pair: ReliabilityPair, name: str, anchor: str) -> Answer:
    confidence, accuracy, count = overall(pair.before)
    low, high = interval(accuracy, count)
    before, after = f"{float(pair.before.ece):.3f}", f"{float(pair.after.ece):.3f}"
    if pair.before_name == pair.after_name:
        change = f"Calibration has no gain, so the {pair.before_name} is kept; its calibration error is {before}."
    elif before == after:
        change = f"The calibration error stays at {after}."
    else:
        change = f"Calibration: error {'falls' if after < before else 'rises'} from {before} to {after}."
    return Answer(
        name,
        f"Trust {accuracy:.2f} when it says {confidence:.2f}",
        f"Mean accuracy (95% interval {low:.2f} to {high:.2f}) and mean confidence of {count:,} examples. {change}",
        anchor,
    )


def _accuracy(audit: Audit, predictions: Integers, pair: ReliabilityPair | None) -> Answer:
    correct, total = int((audit.frame["label"].to_numpy() == predictions).sum()), len(predictions)
    other = ""
    if pair is not None:
        _, accuracy, count = overall(pair.before)
        other = f" On the {count:,} examples of the calibration its accuracy is {_percent(accuracy)}."
    return Answer(
        "Model",
        f"{_percent(correct / total)} of these labels predicted",
        f"The model predicts {correct:,} of the {total:,} given labels; memorised labels count too.{other}",
        "model",
    )


def overall(curve: Curve) -> tuple[float, float, int]:
    """Return mean confidence, accuracy and number of examples of a reliability curve."""
    confidence, accuracy, count = (
        np.asarray(part, dtype=np.float64) for part in (curve.confidence, curve.accuracy, curve.count)
    )
    used = count > 0  # empty bins may have no mean
    means = [float(np.average(part[used], weights=count[used])) for part in (confidence, accuracy)]
    return means[0], means[1], int(count.sum())


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"
