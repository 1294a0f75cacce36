"""Write the page and the figure of the study from the results.

python -m experiments.label_audit.page
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.label_audit.run import RESULTS

DOCS = Path(__file__).parents[2] / "docs"
PAGE, FIGURE = DOCS / "results" / "label-audit.md", DOCS / "assets" / "audit-epochs.png"
SCORES = (
    "loss",
    "margin",
    "el2n",
    "label complexity",
    "raw neighbours",
    "penultimate neighbours",
    "in-sample cleanlab",
)
COLUMNS = (*SCORES, "5-fold cleanlab", "audit")
INTRODUCTION = """# Label audits of memorised networks

AUROC of wrong labels in percent, means over seeds; the best of a row is bold. *Memorised* is the share of wrong labels
that the network predicts. A dash means: not run. 5-fold cleanlab trains five more networks. Label complexity of
ResNets and of pairs is measured on the first 2,000 examples. The commands are `python -m experiments.label_audit.run`
and `python -m experiments.label_audit.page`.
"""

Row = dict[str, float | None]


def read(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """Return all complete results."""
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("*_s*_*.json"))]
    return [result for result in results if "audit" in result]


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the known values, or None without any."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def aurocs(result: Mapping[str, Any]) -> Row:
    """Return the AUROC of every column."""
    row: Row = {name: result["scores"]["auroc"].get(name) for name in SCORES}
    row["5-fold cleanlab"] = result.get("folds", {}).get("auroc")
    row["audit"] = result["audit"]["auroc"]
    return row


def averaged(results: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], dict[str, float | None]]:
    """Return the means over seeds of all columns, by task and stage.

    Five-fold columns and the audit are compared on equal seeds: a mean is None if a seed is missing.
    """
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for result in results:
        groups[result["task"], result["stage"]].append(result)
    return {key: _means(group) for key, group in groups.items()}


def _means(group: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    rows = [{**aurocs(result), **_extras(result)} for result in group]
    return {
        name: None if any(row[name] is None for row in rows) else mean(row[name] for row in rows) for name in rows[0]
    }


def _extras(result: Mapping[str, Any]) -> Row:
    folds, scores, audit = result.get("folds", {}), result["scores"], result["audit"]
    inside = scores["in-sample cleanlab"]
    return {
        "wrong": result["wrong"],
        "memorised wrong": scores["memorised_wrong"],
        "seeds": 1.0,
        "audit f1": audit["f1"],
        "folds f1": folds.get("f1"),
        "inside f1": inside["f1"],
        "audit flagged": audit["flagged"],
        "folds flagged": folds.get("flagged"),
        "inside flagged": inside["flagged"],
        "audit noise": audit["noise_rate"],
        "folds noise": folds.get("noise_rate"),
        "audit memorised": audit["memorised"],
        "folds memorised": folds.get("memorised"),
    }


def must(task: str, stage: str, row: Mapping[str, float | None]) -> tuple[str, bool | None]:
    """Return the requirement of a task and whether it is met; None if a figure is missing."""
    audit, loss, folds = (100 * _number(row[name]) for name in ("audit", "loss", "5-fold cleanlab"))
    memorised = (row["memorised wrong"] or 0) >= 0.95
    if task.endswith("-clean"):
        audit, folds = (100 * _number(row[f"{name} flagged"]) for name in ("audit", "folds"))
        return "flagged ≤ 5-fold + 1", _known(audit - folds, lambda gap: gap <= 1)
    if stage == "held-out":
        return "≥ loss - 0.5", _known(audit - loss, lambda gap: gap >= -0.5)
    if task.startswith(("mnist", "fashion")):
        best = float(np.max([loss, 100 * _number(row["margin"]), folds]))
        return "≥ best - 0.5", _known(audit - best, lambda gap: gap >= -0.5)
    if task.startswith("cifar10"):
        floor = 83.0 if any(kind in task for kind in ("random1", "worse")) else 0.0
        gain = 15.0 if memorised else -0.5
        text = f"≥ loss {'+ 15' if memorised else '- 0.5'}" + (", ≥ 83" if floor else "")
        return text, _known(min(audit - loss - gain, audit - floor), lambda gap: gap >= 0)
    if task.startswith("text"):
        return "≥ loss + 20", _known(audit - loss, lambda gap: gap >= 20)
    if task.startswith("pairs"):
        return "≥ loss + 15", _known(audit - loss, lambda gap: gap >= 15)
    return "", None


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def _known(gap: float, test: Any) -> bool | None:
    return None if np.isnan(gap) else bool(test(gap))


def _percent(value: float | None, bold: bool = False) -> str:
    if value is None or np.isnan(value):
        return "-"
    return f"**{100 * value:.1f}**" if bold else f"{100 * value:.1f}"


def _met(value: bool | None) -> str:
    return {True: "met", False: "not met", None: "open"}[value]


def auroc_table(rows: Mapping[tuple[str, str], Mapping[str, float | None]]) -> list[str]:
    """Return the table of AUROC with the requirement of every row."""
    lines = [f"| task | stage | memorised | {' | '.join(COLUMNS)} | must |", "|" + "---|" * (len(COLUMNS) + 4)]
    for (task, stage), row in rows.items():
        known = [value for name in COLUMNS if (value := row[name]) is not None]
        cells = [_percent(row[name], bool(known) and row[name] == max(known)) for name in COLUMNS]
        text, is_met = must(task, stage, row)
        requirement = f"{text}: {_met(is_met)}" if text else ""
        lines.append(f"| {task} | {stage} | {_percent(row['memorised wrong'])} | {' | '.join(cells)} | {requirement} |")
    return lines


def flag_table(rows: Mapping[tuple[str, str], Mapping[str, float | None]]) -> list[str]:
    """Return the table of flags, noise rates and memorisation."""
    names = [f"{who} {what}" for what in ("f1", "flagged") for who in ("audit", "folds", "inside")]
    names += ["wrong", "audit noise", "folds noise", "audit memorised", "folds memorised"]
    titles = [name.replace("folds", "5-fold").replace("inside", "in-sample").replace("f1", "F1") for name in names]
    lines = [f"| task | stage | {' | '.join(titles)} |", "|" + "---|" * (len(names) + 2)]
    for (task, stage), row in rows.items():
        lines.append(f"| {task} | {stage} | {' | '.join(_percent(row[name]) for name in names)} |")
    return lines


def tables_mean(rows: Mapping[tuple[str, str], Mapping[str, float | None]]) -> list[str]:
    """Return the mean over noisy tables and whether the audit reaches five-fold cleanlab."""
    chosen = [row for (task, stage), row in rows.items() if task.startswith("table") and stage == "last"]
    chosen = [row for row in chosen if row["audit"] is not None and row["5-fold cleanlab"] is not None]
    if not chosen:
        return []
    means = {name: mean(row[name] for row in chosen) for name in COLUMNS}
    is_met = (means["audit"] or 0) >= (means["5-fold cleanlab"] or 0)
    parts = ", ".join(f"{name} {_percent(value)}" for name, value in means.items())
    return ["", f"Mean over {len(chosen)} noisy tables: {parts}. Must be ≥ 5-fold cleanlab: {_met(is_met)}."]


def build(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the page."""
    lines = [INTRODUCTION]
    for title, development in (("Evidence tasks", False), ("Development tasks", True)):
        rows = averaged([result for result in results if result["development"] == development])
        if rows:
            noisy = {key: row for key, row in rows.items() if not key[0].endswith("-clean")}
            clean = {key: row for key, row in rows.items() if key[0].endswith("-clean")}
            lines += [f"## {title}", "", *auroc_table(noisy), *tables_mean(noisy)]
            lines += ["", "Flags, noise rate and memorisation in percent:", "", *flag_table(noisy), ""]
            lines += _clean_section(clean)
    return "\n".join([*lines, "![AUROC over epochs](../assets/audit-epochs.png)", ""])


def _clean_section(rows: Mapping[tuple[str, str], Mapping[str, float | None]]) -> list[str]:
    if not rows:
        return []
    lines = [
        "Clean data, flagged labels in percent:",
        "",
        "| task | audit | 5-fold | in-sample | must |",
        "|" + "---|" * 5,
    ]
    for (task, stage), row in rows.items():
        text, is_met = must(task, stage, row)
        cells = " | ".join(_percent(row[f"{who} flagged"]) for who in ("audit", "folds", "inside"))
        lines.append(f"| {task} | {cells} | {text}: {_met(is_met)} |")
    return [*lines, ""]


def draw(folder: Path, path: Path) -> bool:
    """Draw AUROC over epochs, one panel per task. Return whether there was anything to draw."""
    files = sorted(folder.glob("epochs_*.json"))
    if not files:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(files), figsize=(5 * len(files), 3.5), squeeze=False, layout="constrained")
    for axis, file in zip(axes[0], files, strict=True):
        rows = json.loads(file.read_text())
        for name in ("loss", "label complexity", "audit"):
            points = [(int(epoch), 100 * row[name]) for epoch, row in rows.items() if row.get(name) is not None]
            axis.plot(*zip(*points, strict=True), label=name, marker="." if name == "label complexity" else None)
        memorised = [100 * row["memorised_wrong"] for row in rows.values()]
        axis.plot([int(epoch) for epoch in rows], memorised, color="0.7", linestyle=":", label="memorised wrong labels")
        axis.set(title=file.stem.removeprefix("epochs_"), xlabel="epoch", ylabel="AUROC, %")
    axes[0][0].legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return True


def main() -> None:
    """Write the page and the figure."""
    PAGE.write_text(build(read()), encoding="utf-8")
    draw(RESULTS, FIGURE)


if __name__ == "__main__":
    main()
