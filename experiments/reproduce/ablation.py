"""Accuracy and ECE over alpha and beta (ablation figures of the paper).

The scale of alpha depends on the number of parameters and on the damping, so alphas are multiples of the tuned one. The
alphas of the paper are given as multiples of its tuned alpha, 0.15.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from experiments.reproduce import calibration
from experiments.reproduce.calibration import IFCOMP, TOGETHER, corrupted, influences
from experiments.reproduce.paper import ECE_ALPHA, PAPER_ALPHA
from experiments.reproduce.publish import markdown
from experiments.reproduce.study import Claim, Record, Results, Step, Study
from ifcomp.tasks.calibration import pnml_grid

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Quartiles over corruptions, and the value of all corruptions as one set.
_SUMMARIES = ("low", "median", "high", TOGETHER)
#: Alphas of the paper as multiples of its tuned alpha.
MULTIPLES = tuple(alpha / PAPER_ALPHA for alpha in (0.0, 0.05, 0.1, 0.15, 0.3, 0.5, 1.0))


@dataclass(frozen=True)
class Settings:
    """Settings of the study: those of `calibration`, and betas besides the tuned one."""

    calibration: calibration.Settings
    betas: tuple[float, ...]


PRESETS = {
    name: Settings(preset, (1.0,) if name == "digits" or name.startswith("cifar10") else (1.25, 1.0, 0.66, 0.1))
    for name, preset in calibration.PRESETS.items()
}


def _beta(settings: Settings, beta: float | None, results: Results) -> dict[str, Any]:
    """Return the metrics for every alpha and severity at a beta; None is the tuned beta.

    The metrics are quartiles over corruptions, and those of all corruptions as one set.
    """
    shared, tuned = settings.calibration, results["tuning"][IFCOMP]
    used_beta = tuned["beta"] if beta is None else beta
    alphas = [multiple * (tuned["alpha"] or PAPER_ALPHA) for multiple in MULTIPLES]
    by_severity: dict[str, Any] = {}
    for severity in shared.severities[1:]:
        parts, count = [], 0
        for kind in shared.corruptions:
            probability, influence, count = influences(shared, used_beta, kind, severity)
            parts.append((probability, influence, corrupted(shared, kind, severity).labels))
        whole = [torch.cat(column) for column in zip(*parts, strict=True)]
        grids = [pnml_grid(*part, count, alphas) for part in (*parts, whole)]
        metrics = np.stack([grid[~grid["keep_argmax"]][["ece", "accuracy"]] for grid in grids])
        low, middle, high = np.percentile(metrics[:-1], (25, 50, 75), axis=0)
        rows = np.stack((low, middle, high, metrics[-1]), axis=2).round(5).tolist()
        by_severity[str(severity)] = {
            metric: [dict(zip(_SUMMARIES, row[column], strict=True)) for row in rows]
            for column, metric in enumerate(("ece", "accuracy"))
        }
    return {"beta": used_beta, "alphas": alphas, "severities": by_severity}


def steps(settings: Settings) -> dict[str, Step]:
    """Tune as in the study of calibration, then evaluate every beta."""
    named: dict[str, Step] = {"tuning": partial(calibration.tuning, settings.calibration)}
    named["tuned beta"] = partial(_beta, settings, None)
    return named | {f"beta {beta:g}": partial(_beta, settings, beta) for beta in settings.betas}


def _betas(record: Record) -> dict[str, Any]:
    return {name: row for name, row in record.results.items() if name != "tuning"}


def _values(row: Any, metric: str, index: int) -> list[float]:
    """Return a metric of all corruptions as one set by severity; the median over corruptions in older results."""
    cells = [values[metric][index] for values in row["severities"].values()]
    return [cell.get(TOGETHER, cell["median"]) for cell in cells]


def table(record: Record) -> str:
    """Format ECE / accuracy by alpha at the tuned beta, then by beta at the tuned alpha."""
    tuned, rows, tuned_index = record.results["tuned beta"], [], MULTIPLES.index(1.0)
    severities = list(tuned["severities"])

    def cells(row: Any, index: int) -> list[str]:
        pairs = zip(_values(row, "ece", index), _values(row, "accuracy", index), strict=True)
        return [f"{ece:.3f} / {100 * right:.1f}" for ece, right in pairs]

    for index, multiple in enumerate(MULTIPLES):
        paper = ECE_ALPHA.get(round(multiple * PAPER_ALPHA, 3))
        published = " / ".join(f"{value:.3f}" for value in paper) if paper else ""
        rows.append([f"alpha {tuned['alphas'][index]:.3g} ({multiple:.2g} x tuned)", *cells(tuned, index), published])
    for name, row in _betas(record).items():
        rows.append([f"{name} ({row['beta']:g}), no alpha", *cells(row, 0), ""])
        rows.append([f"{name} ({row['beta']:g}), tuned alpha", *cells(row, tuned_index), ""])
    shared = record.settings["calibration"]
    statistic = "of all" if TOGETHER in tuned["severities"][severities[0]]["ece"][0] else "median over"
    text = (
        f"ECE / accuracy in percent, {statistic} {len(shared['corruptions'])} corruptions, {shared['images']} images "
        f"per corruption ({shared['subject']['data']}, {shared['subject']['model']}), by severity.\n\n"
    )
    return text + markdown(["setting", *(f"severity {s}" for s in severities), "paper, ECE 1 to 5"], rows)


def draw(record: Record, figure: Figure) -> None:
    """Plot accuracy (top) and ECE (bottom) over severity, by alpha (left) and by beta (right)."""
    figure.set_size_inches(10, 7)
    panels = figure.subplots(2, 2, sharex=True)
    tuned, tuned_index = record.results["tuned beta"], MULTIPLES.index(1.0)
    severities = [int(severity) for severity in tuned["severities"]]
    for row, metric in enumerate(("accuracy", "ece")):
        for index, multiple in enumerate(MULTIPLES):
            values = _values(tuned, metric, index)
            panels[row, 0].plot(severities, values, marker="o", label=f"alpha {multiple:.2g} x tuned")
        for index, (name, results) in enumerate(_betas(record).items()):
            without, with_alpha = (_values(results, metric, alpha) for alpha in (0, tuned_index))
            panels[row, 1].plot(severities, without, "--", color=f"C{index}", label=f"{name}, no alpha")
            panels[row, 1].plot(severities, with_alpha, "o-", color=f"C{index}", label=name)
        panels[row, 0].set_ylabel(metric)
    for axes in panels[1]:
        axes.set_xlabel("corruption severity")
    for axes in panels[1]:
        axes.legend(fontsize=7)


def claims(record: Record) -> list[Claim]:
    """Compare the claims that alpha barely changes accuracy and lowers ECE at every beta."""
    tuned, tuned_index = record.results["tuned beta"], MULTIPLES.index(1.0)
    change = min(np.subtract(_values(tuned, "accuracy", tuned_index), _values(tuned, "accuracy", 0)))
    rows, data = _betas(record).values(), record.settings["calibration"]["subject"]["data"]
    better = [np.subtract(_values(row, "ece", tuned_index), _values(row, "ece", 0)).max() for row in rows]
    size = f"{record.settings['calibration']['images']:,} images with every corruption"
    return [
        Claim(
            f"{data}: the tuned alpha barely changes accuracy at any severity",
            "at most -0.0001",
            f"at worst {100 * change:+.2f} points",
            size,
            None,
        ),
        Claim(
            f"{data}, at every beta and severity: the tuned alpha lowers ECE",
            "yes",
            f"largest change of ECE {max(better):+.4f}",
            size,
            None,
        ),
    ]


STUDY = Study(
    "ablation",
    "Ablation of alpha and beta",
    PRESETS,
    lambda settings: calibration.needs(settings.calibration),
    steps,
    table,
    draw,
    claims,
)
