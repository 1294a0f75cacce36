"""Reliability diagrams under pixelation: accuracy over confidence (reliability figure of the paper)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.reproduce import calibration
from experiments.reproduce.calibration import LAPLACE, METHODS, Settings, corrupted, methods, not_run, probabilities
from experiments.reproduce.publish import markdown
from experiments.reproduce.study import Claim, Record, Results, Step, Study
from ifcomp.tasks.calibration import ReliabilityCurve, plot_reliability, reliability_curve

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Settings and networks of the study of calibration.
PRESETS = {
    name: replace(preset, corruptions=("pixelate",), severities=(1, 5) if name == "digits" else (1, 3, 5))
    for name, preset in calibration.PRESETS.items()
}
PRESETS |= {name: replace(PRESETS[name], images=120) for name in ("cifar10", "cifar10-resnet56")}


def _method(settings: Settings, name: str, results: Results) -> dict[str, Any]:
    predict, by_severity = probabilities(settings, name, results), {}
    for severity in settings.severities:
        kind = settings.corruptions[0]
        curve = reliability_curve(predict(kind, severity), corrupted(settings, kind, severity).labels)
        by_severity[str(severity)] = {key: np.round(value, 5).tolist() for key, value in vars(curve).items()}
    return by_severity


def steps(settings: Settings) -> dict[str, Step]:
    """Tune as in the study of calibration, then evaluate one method after the other."""
    named: dict[str, Step] = {"tuning": partial(calibration.tuning, settings)}
    return named | {name: partial(_method, settings, name) for name in methods(settings)}


def curves(record: Record, severity: int) -> dict[str, ReliabilityCurve]:
    """Return the curves of all evaluated methods."""
    rows = {name: record.results[name][str(severity)] for name in METHODS if name in record.results}
    return {name: ReliabilityCurve(**{key: np.array(v) for key, v in row.items()}) for name, row in rows.items()}


def table(record: Record) -> str:
    """Format ECE by severity."""
    severities = record.settings["severities"]
    by_severity = {severity: curves(record, severity) for severity in severities}
    rows = [[name, *(f"{by_severity[s][name].ece:.3f}" for s in severities)] for name in by_severity[severities[0]]]
    text = f"ECE of {record.settings['images']} pixelated test images ({record.settings['subject']['data']})."
    return f"{text}{not_run(record)}\n\n" + markdown(
        ["method", *(f"pixelate {severity}" for severity in severities)], rows
    )


def draw(record: Record, figure: Figure) -> None:
    """Plot one diagram per severity."""
    severities = record.settings["severities"]
    figure.set_size_inches(5 * len(severities), 5)
    for axes, severity in zip(figure.subplots(1, len(severities)), severities, strict=True):
        plot_reliability(curves(record, severity), axes)
        axes.set_title(f"pixelate {severity}")
        axes.legend(loc="upper left", fontsize=6)


def claims(record: Record) -> list[Claim]:
    """Compare the calibration with ACNML, or with the Laplace approximation, at the strongest pixelation."""
    last_curves = curves(record, record.settings["severities"][-1])
    rival, name = ("ACNML + SWAG-D", "ACNML") if "ACNML + SWAG-D" in last_curves else (LAPLACE, "a last-layer Laplace")
    ours, theirs = last_curves[calibration.IFCOMP].ece, last_curves[rival].ece
    data, size = record.settings["subject"]["data"], f"{record.settings['images']:,} images"
    claim = f"{data}, pixelate 5: IF-COMP is better calibrated than {name}"
    return [Claim(claim, "figure only", f"ECE {ours:.3f} and {theirs:.3f}", size, None)]


STUDY = Study("reliability", "Reliability under pixelation", PRESETS, calibration.needs, steps, table, draw, claims)
