"""The results as text: headlines, confusions and hints."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from ifcomp.report.data import Audit, ComplexityGroups, ReliabilityPair, ReportData
from ifcomp.tasks.metrics import auroc


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
    if data.complexity is not None:
        result.append(_complexity(data.complexity))
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
            "ifcomp report --held-out DATA of a calibrated run, or calibration=ifc.calibrate(held_out)",
        ),
        "complexity of OOD inputs": (
            data.complexity,
            "ifcomp report --strange DATA, or ood=gate.table(new) of gate = ifc.ood_detector(held_out)",
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


def _complexity(complexity: ComplexityGroups) -> Headline:
    inside, *outside = complexity.groups.values()
    if not outside and complexity.flagged is not None:
        return Headline(
            "OOD inputs",
            f"{_short(100 * complexity.flagged / len(inside))}%",
            f"{complexity.flagged:,} of {len(inside):,} {complexity.in_distribution_name} are flagged as OOD.",
        )
    if not outside:
        median = _short(float(np.median(inside)))
        return Headline("Complexity", median, f"The median complexity is {median} nats; larger = more surprising.")
    share = separation(inside, np.concatenate(outside))
    return Headline(
        "OOD detection",
        f"{_short(100 * share)}%",
        "An OOD input is more complex than an in-distribution input in "
        f"{_short(100 * share)}% of all pairs (AUROC {share:.3f}).",
    )


def _short(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < math.inf else f"{value:.3g}"


def separation(inside: np.ndarray, outside: np.ndarray) -> float:
    """Return the AUROC of OOD against in-distribution inputs; 0.5 is chance."""
    values = np.concatenate([inside, outside])
    return auroc(values, np.arange(len(values)) >= len(inside))
