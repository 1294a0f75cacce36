"""The results in words: what a reader takes home."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from ifcomp.report.data import Audit, ComplexityGroups, ReliabilityPair, ReportData
from ifcomp.tasks.metrics import auroc


@dataclass(frozen=True)
class Headline:
    """A number with its name and a sentence that says what it means."""

    name: str
    figure: str
    sentence: str


@dataclass(frozen=True)
class Confusion:
    """Suspects of one given label for which the model suggests one other."""

    label: int
    suggested: int
    count: int


def lead(data: ReportData) -> str:
    """The first sentence of the report."""
    if data.audit is not None:
        suspects, total = int(data.audit.frame["is_suspect"].sum()), len(data.audit.frame)
        if suspects == 0:
            return f"None of {total:,} labels looks wrong."
        return f"{suspects:,} of {total:,} labels {'looks' if suspects == 1 else 'look'} wrong."
    return headlines(data)[0].sentence


def headlines(data: ReportData) -> tuple[Headline, ...]:
    """What was found, most important first."""
    found: list[Headline] = []
    if data.audit is not None:
        found += [_noise(data.audit), _surprise(data.audit)]
    if data.calibration is not None:
        found.append(_calibration(data.calibration))
    if data.complexity is not None:
        found.append(_complexity(data.complexity))
    if data.coverage is not None:
        coverage = data.coverage
        found.append(
            Headline(
                "Coverage",
                f"{_short(100 * coverage.fraction)}%",
                f"The fit covers {coverage.covered:,} of the model's {coverage.total:,} parameters.",
            )
        )
    return tuple(found)


def confusions(audit: Audit, at_most: int = 8) -> tuple[Confusion, ...]:
    """The most frequent pairs of given and suggested label among the suspects, most frequent first."""
    suspects = audit.frame[audit.frame["is_suspect"].astype(bool)]
    pairs = Counter(zip(suspects["label"].tolist(), suspects["suggested_label"].tolist(), strict=True))
    return tuple(Confusion(*pair, count) for pair, count in pairs.most_common(at_most))


def hints(data: ReportData) -> tuple[tuple[str, str], ...]:
    """What is missing, and how to get it."""
    wanted: dict[str, tuple[object, str]] = {
        "suspicious labels": (data.audit, "audit=ifcomp.tasks.mislabel.audit_labels(ifc.score(loader))"),
        "calibration": (
            data.calibration,
            "ifcomp report --held-out DATA --calibrated RUN, or calibration=ReliabilityPair(before, after)",
        ),
        "complexity of other inputs": (
            data.complexity,
            "ifcomp report --strange DATA, or complexity=ComplexityGroups(test, {'elsewhere': other})",
        ),
        "coverage": (data.coverage, "coverage=ifc.coverage"),
        "provenance": (data.provenance, "provenance=current_provenance(seed=0)"),
    }
    if data.audit is not None:
        wanted |= {
            "names of the classes": (data.class_names, "class_names=[...]"),
            "previews of the examples": (data.previews or None, "previews={index: Preview('image', pixels)}"),
            "training examples behind a label": (
                data.explanations or None,
                "explanations={suspect: [TrainingExample(index, influence, label)]}",
            ),
        }
    return tuple((name, how) for name, (part, how) in wanted.items() if part is None)


def finite_threshold(audit: Audit) -> float | None:
    """Smallest label complexity of a suspect in nats; None if there is none."""
    return audit.threshold if audit.threshold is not None and math.isfinite(audit.threshold) else None


def _noise(audit: Audit) -> Headline:
    parts = []
    threshold = finite_threshold(audit)
    if threshold is not None:
        parts.append(f"Suspects have a label complexity of at least {_short(threshold)} nats.")
    if audit.noise_rate is not None:
        parts.append(f"The share of wrong labels is put at {_short(100 * audit.noise_rate)}%.")
    return Headline("Suspicious labels", f"{_short(100 * audit.frame['is_suspect'].mean())}%", " ".join(parts))


def _surprise(audit: Audit) -> Headline:
    surprise = audit.frame["surprise"].to_numpy(dtype=np.float64)
    suspect = audit.frame["is_suspect"].to_numpy(dtype=bool)
    sentence = "1 is like a training example; larger = more surprising."
    if suspect.any() and not suspect.all():
        sentence = f"Among the suspects it is {_short(surprise[suspect].mean())}. {sentence}"
    return Headline("Mean surprise", _short(surprise.mean()), sentence)


def _calibration(pair: ReliabilityPair) -> Headline:
    before, after = f"{float(pair.before.ece):.3f}", f"{float(pair.after.ece):.3f}"
    change = f"{'falls' if after < before else 'rises'} from {before} to {after}"
    return Headline(
        "Calibration error",
        f"{before} → {after}",
        f"The expected calibration error {f'stays at {after}' if after == before else change}; smaller is better.",
    )


def _complexity(given: ComplexityGroups) -> Headline:
    inside, *outside = given.groups.values()
    if not outside:
        median = _short(float(np.median(inside)))
        return Headline("Complexity", median, f"The median complexity is {median} nats; larger = more surprising.")
    share = separation(inside, np.concatenate(outside))
    return Headline(
        "New inputs told apart",
        f"{_short(100 * share)}%",
        "An input from elsewhere is more complex than one like the training data in "
        f"{_short(100 * share)}% of all pairs (AUROC {share:.3f}).",
    )


def _short(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < math.inf else f"{value:.3g}"


def separation(inside: np.ndarray, outside: np.ndarray) -> float:
    """AUROC: how often an input from elsewhere is more complex than one like the training data; 0.5 is chance."""
    values = np.concatenate([inside, outside])
    return auroc(values, np.arange(len(values)) >= len(inside))
