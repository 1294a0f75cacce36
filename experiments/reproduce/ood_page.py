"""Table, figure and claims of the study of OOD detection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.bootstrap import Interval
from experiments.reproduce.ood_scores import BOUNDED, CAPPED, INSIDE, PARAMETRIC
from experiments.reproduce.paper import OOD as PAPER_NUMBERS
from experiments.reproduce.paper import OPENOOD
from experiments.reproduce.publish import markdown
from experiments.reproduce.study import Claim, Record, Results

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Names of detectors in the paper that differ from pytorch-ood.
PAPER_NAMES = {"MaxLogit": "MLS", "RMD": "RMDS", "ViM": "VIM"}
#: Our methods.
AS_PAPER, JOIN, DETECTOR = (
    "IF-COMP, the paper's beta and damping",
    "bounded IF-COMP, energy and neighbours, rank sum",
    "ood_detector, default",
)
TUNED = {PARAMETRIC: "IF-COMP, tuned", CAPPED: "IF-COMP, capped, tuned", BOUNDED: "IF-COMP, bounded, tuned"}
OURS = (AS_PAPER, *TUNED.values(), JOIN, DETECTOR)
#: Data sets of the paper.
PAPER_SETS = {
    "mnist": "The paper's near sets are Fashion-MNIST and notMNIST, its far sets CIFAR-10, TinyImageNet, textures and "
    "places.",
    "cifar10": "Published numbers are those of the paper and of OpenOOD v1.5, with ResNet-18. "
    "The paper's near sets are CIFAR-100 and TinyImageNet, its far sets MNIST, SVHN, textures and places: "
    "means over other sets are not comparable, single sets are.",
}


def percents_of(results: Results, near: Sequence[str], far: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return the AUROC of every method in percent: means over near and far sets, and of every set."""
    prefix = "detector "
    methods = dict(results.get("ifcomp", {}))
    methods |= {name.removeprefix(prefix): row for name, row in results.items() if name.startswith(prefix)}
    percents = {}
    for name, row in methods.items():
        aurocs = {key: 100 * metrics["auroc"] for key, metrics in row["sets"].items()}
        means = {key: float(np.mean([aurocs[one] for one in sets])) for key, sets in (("near", near), ("far", far))}
        percents[name] = means | aurocs
    return percents


def summary(record: Record) -> dict[str, dict[str, float]]:
    """Return the AUROC of every method in percent: means over near and far sets, and of every set."""
    return percents_of(record.results, record.settings["near"], record.settings["far"])


def _paper(record: Record, method: str) -> tuple[float, float] | None:
    """Return published near and far AUROC of a method, or None."""
    data = record.settings["subject"]["data"]
    known = PAPER_NUMBERS.get(data, {}) | OPENOOD.get(data, {})
    return known.get("IF-COMP" if method in OURS and method != DETECTOR else PAPER_NAMES.get(method, method))


def _setting(row: Mapping[str, Any]) -> str:
    alpha = "" if row["alpha"] is None else f", alpha {row['alpha']:g}"
    return f"beta {row['beta']:g}, damping {row['damping']:g} times the mean{alpha}"


def _sizes(record: Record) -> str:
    """Describe the number of images of all sets."""
    sets = (INSIDE, *record.settings["near"], *record.settings["far"])
    counts = {name: record.results[f"influence, {name}"]["images"] for name in sets}
    largest = max(counts.values())
    fewer = [f"{count:,} of {name}" for name, count in counts.items() if count < largest]
    return f"{largest:,} images per set" + (f" ({', '.join(fewer)})" if fewer else "")


def table(record: Record) -> str:
    """Format the AUROC of all methods with intervals, sorted by the mean of near and far."""
    settings, tuned = record.settings, record.results["tuning"]
    columns = ["near", "far", *settings["near"], *settings["far"]]
    intervals, accuracy = record.results["comparison"]["intervals"], record.results["network"]["test_accuracy"]
    methods = sorted(intervals.items(), key=lambda item: -(item[1]["near"][0] + item[1]["far"][0]))
    best = {column: max(row[column][0] for row in intervals.values()) for column in columns}
    rows = []
    for name, values in methods:
        cells = [_cell(values[column], best[column]) for column in columns]
        published = _paper(record, name)
        label = f"*{name}*" if name in OURS else name
        rows.append([label, *cells, f"{published[0]:.2f} / {published[1]:.2f}" if published else ""])
    text = (
        f"AUROC in percent with 95 % intervals by bootstrap over images, {_sizes(record)}; best in bold, our methods "
        f"in italics. Near: {', '.join(settings['near'])}; far: {', '.join(settings['far'])}. Network: "
        f"{settings['subject']['model']}, test accuracy {100 * accuracy:.2f} %. Curvature of "
        f"{record.results['curvature']['examples']:,} training images; feature detectors use all. Settings were tuned "
        f"on validation images against {', '.join(settings['tuning_near'])} (near) and "
        f"{', '.join(settings['tuning_far'])} (far), which are not reported: "
        + "; ".join(f"{form}: {_setting(row)}" for form, row in tuned.items())
        + ". Detectors use the default parameters of pytorch-ood. Intervals treat images as independent; squares of "
        "textures and photographs are cut from few pictures. "
        f"{PAPER_SETS.get(settings['subject']['data'], '')}\n\n"
    )
    return text + markdown(["method", *columns, "published, near / far"], rows)


def _cell(values: Sequence[float], best: float) -> str:
    estimate, low, high = values
    text = f"**{estimate:.2f}**" if estimate == best else f"{estimate:.2f}"
    return f"{text} ({low:.1f} to {high:.1f})"


def draw(record: Record, figure: Figure) -> None:
    """Plot 100 % minus near and far AUROC of every method on a logarithmic axis, best method on top."""
    methods = sorted(summary(record).items(), key=lambda item: item[1]["near"] + item[1]["far"])
    figure.set_size_inches(8, 1.5 + 0.22 * len(methods))
    axes, positions = figure.add_subplot(), np.arange(len(methods))
    for index, (split, colour) in enumerate((("near", "tab:blue"), ("far", "tab:orange"))):
        axes.plot([100 - values[split] for _, values in methods], positions, "o", color=colour, label=split)
        published = {position: _paper(record, name) for position, (name, _) in enumerate(methods)}
        known = {position: 100 - numbers[index] for position, numbers in published.items() if numbers}
        axes.plot(list(known.values()), list(known), "x", color=colour, label=f"{split}, paper")
    axes.set_yticks(positions, [name for name, _ in methods])
    for label, (name, _) in zip(axes.get_yticklabels(), methods, strict=True):
        label.set_fontweight("bold" if name in OURS else "normal")
    axes.set(xscale="log", xlabel="100 - AUROC (%), smaller is better", ylim=(-0.7, len(methods) - 0.3))
    axes.grid(axis="y", color="0.9")
    figure.legend(loc="outside lower center", ncols=4)


def claims(record: Record) -> list[Claim]:
    """Compare our methods with the best detector of pytorch-ood, for near and far sets."""
    differences, data = record.results["comparison"]["differences"], record.settings["subject"]["data"]
    model = record.settings["subject"]["model"]
    published, percents, statements = _paper(record, AS_PAPER), summary(record), []
    for index, split in enumerate(("near", "far")):
        number = f"{published[index]:.2f}; best of 20 others is lower" if published else "no number"
        for method in OURS:
            row = differences[method][split]
            statements.append(
                Claim(
                    f"{data}, {model}, {split}: {method} is better than every other detector",
                    number,
                    f"{percents[method][split]:.2f}; best of {len(record.settings['detectors'])} others: "
                    f"{row['rival']} {percents[row['rival']][split]:.2f}",
                    f"{_sizes(record)}, {len(record.settings[split])} sets",
                    Interval(*row["lead"]),
                )
            )
    return statements
