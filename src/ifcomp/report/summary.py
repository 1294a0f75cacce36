"""The results as text: headlines, confusions and hints."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from ifcomp.report.data import Audit, OODScores, ReliabilityPair, ReportData


@dataclass(frozen=True)
class Headline:
    """A number with its name and a sentence that explains it."""

    name: str
    figure: str
    sentence: str


@dataclass(frozen=True)
class Confusion:
    """Number of suspects with one given and one suggested label."""

    label: int
    suggested: int
    count: int


def lead(data: ReportData) -> str:
    """Return the first sentences of the report: the headline of the audit, if any."""
    return headlines(data)[0].sentence if data.audit is None else data.audit.headline


def headlines(data: ReportData) -> tuple[Headline, ...]:
    """Return the main results, most important first."""
    result: list[Headline] = []
    if data.audit is not None:
        result.append(_noise(data.audit))
    if data.calibration is not None:
        result.append(_calibration(data.calibration))
    if data.ood is not None:
        result.append(_ood(data.ood))
    if data.coverage is not None:
        coverage = data.coverage
        result.append(
            Headline(
                "Coverage",
                f"{_short(100 * coverage.fraction)}%",
                f"The fit covers {coverage.covered:,} of the model's {coverage.total:,} parameters.",
            )
        )
    return tuple(result)


def confusions(audit: Audit, at_most: int = 8) -> tuple[Confusion, ...]:
    """Return the most frequent pairs of given and suggested label among the suspects, most frequent first."""
    suspects = audit.frame[audit.frame["is_suspect"].astype(bool)]
    pairs = Counter(zip(suspects["label"].tolist(), suspects["suggested"].tolist(), strict=True))
    return tuple(Confusion(*pair, count) for pair, count in pairs.most_common(at_most))


def hints(data: ReportData) -> tuple[tuple[str, str], ...]:
    """Return the missing parts, each with the option or argument that adds it."""
    parts: dict[str, tuple[object, str]] = {
        "suspicious labels": (data.audit, "audit=ifc.audit(loader)"),
        "calibration": (
            data.calibration,
            "ifcomp calibrate RUN DATA before ifcomp report, or calibration=ifc.calibrate(held_out)",
        ),
        "OOD inputs": (
            data.ood,
            "ifcomp report --ood DATA after ifcomp ood, or ood=gate.table(new) of gate = ifc.ood_detector(held_out)",
        ),
        "coverage": (data.coverage, "coverage=ifc.coverage"),
        "provenance": (data.provenance, "provenance=current_provenance(seed=0)"),
    }
    if data.audit is not None:
        parts |= {
            "names of the classes": (data.class_names, "class_names=[...]"),
            "previews of the examples": (data.previews or None, "previews={index: Preview('image', pixels)}"),
            "training examples behind a label": (
                data.explanations or None,
                "explanations={suspect: [TrainingExample(index, influence, label)]}",
            ),
            "neighbours of the suspects": (
                data.neighbours or None,
                "neighbours={suspect: [LayerNeighbours(layer, weight, (Neighbour(index, label),))]}",
            ),
        }
    return tuple((name, how) for name, (part, how) in parts.items() if part is None)


def _noise(audit: Audit) -> Headline:
    return Headline(
        "Suspicious labels",
        f"{_short(100 * audit.frame['is_suspect'].mean())}%",
        f"The estimated noise rate, the share of wrong labels, is {_short(100 * audit.noise_rate)}%.",
    )


def _calibration(pair: ReliabilityPair) -> Headline:
    before, after = f"{float(pair.before.ece):.3f}", f"{float(pair.after.ece):.3f}"
    change = f"{'falls' if after < before else 'rises'} from {before} to {after}"
    return Headline(
        "Calibration error",
        f"{before} → {after}",
        f"The expected calibration error {f'stays at {after}' if after == before else change}; smaller is better.",
    )


def _ood(ood: OODScores) -> Headline:
    held_out, *new = ood.groups.values()
    scores = np.concatenate(new)
    flagged, accepted = int((scores > ood.threshold).sum()), float((held_out <= ood.threshold).mean())
    return Headline(
        "OOD inputs",
        f"{_short(100 * flagged / len(scores))}%",
        f"{flagged:,} of {len(scores):,} inputs are above the threshold, which accepts {_short(100 * accepted)}% of "
        "the held-out inputs.",
    )


def _short(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < math.inf else f"{value:.3g}"
