"""``ifcomp ood``: find inputs that are unlike the training data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from ifcomp.cli import options
from ifcomp.cli.output import (
    GATE,
    TABLE_SUFFIXES,
    Outcome,
    check_target,
    class_name,
    paragraph,
    records,
    table,
    write_table,
)
from ifcomp.errors import SettingError

if TYPE_CHECKING:
    import pandas as pd

    from ifcomp import IFComp
    from ifcomp.detection import OODDetector
    from ifcomp.tasks.ood_table import OODTable

EPILOG = "[bold]Example:[/bold] ifcomp ood run.ifcomp folder:new --held-out folder:held-out"


def ood(
    path: options.RunPath,
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA", help=f"Inputs to check; in-distribution inputs with --ood: {options.DATA_FORM}."
        ),
    ],
    model: options.ModelOptions,
    reading: options.DataOptions,
    held_out: Annotated[
        str | None,
        typer.Option(
            metavar="DATA",
            help="In-distribution inputs that the model was not trained on. They set the threshold.",
            show_default="the detector that is stored in the run",
        ),
    ] = None,
    known_ood: Annotated[
        str | None,
        typer.Option("--ood", metavar="DATA", help="Known OOD inputs: compare the AUROC with max softmax and energy."),
    ] = None,
    score: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Scores to join, with --held-out: complexity, energy, neighbours; several with commas.",
            show_default="all three",
        ),
    ] = None,
    tpr: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, help="Share of the held-out inputs to accept, with --held-out.", show_default="0.95"
        ),
    ] = None,
    out: Annotated[
        str, typer.Option(metavar="FILE", help="Table of all inputs, most surprising first: .csv or .parquet.")
    ] = "ood.csv",
    top: Annotated[int, typer.Option(min=0, help="Number of inputs to print.")] = 10,
    max_flagged: Annotated[
        int | None, typer.Option(min=0, help=f"Exit with {GATE} if more inputs are flagged.")
    ] = None,
) -> Outcome:
    """Flag inputs that are unlike the training data.

    The score joins bounded complexity, energy and the distance to training examples by their p-values among held-out
    inputs. Larger = more surprising. Labels are not used. The detector is stored in the run.
    """
    from ifcomp.cli.cache import open_cache
    from ifcomp.cli.run import open_run
    from ifcomp.tasks.ood import check_members, ood_threshold

    members = None if score is None else score.split(",")
    check_members(members)  # checks settings before any work is done
    ood_threshold([0.0], 0.95 if tpr is None else tpr)
    if held_out is None and (score is not None or tpr is not None):
        raise SettingError("--score and --tpr define a new detector, which needs held-out inputs: add --held-out DATA.")
    run = open_run(path, model)
    check_target(out, TABLE_SUFFIXES, run.inputs(data, held_out, known_ood))
    if held_out is not None:
        check_target(path)
        if run.is_training_data(held_out):
            raise SettingError(
                f"The model was trained on '{held_out}', which is less surprising than new data. Give --held-out data "
                "that it was not trained on."
            )
    source = run.open_data(data, reading, labelled=False)
    others = {
        spec: run.open_data(spec, reading, labelled=False, secondary=True) for spec in (held_out, known_ood) if spec
    }
    ifc = run.load_predictor(source, *others.values())
    written = {}
    if held_out is not None:
        ifc.ood_detector(others[held_out].batches(), 0.95 if tpr is None else tpr, members)
        run.save(ifc)
        written[path] = "the run with its detector"
    detector = stored_detector(ifc, path)
    if known_ood is None:
        checked = open_cache(run, ifc).ood_table(source, detector)
    else:
        checked = detector.table(source.batches(), ood=others[known_ood].batches())
    reason = _gate(checked, max_flagged)
    write_table(out, checked.ranked, checked.descriptions, dict(checked.settings), source)
    facts = {
        "run": path,
        "data": source.spec,
        "held_out": held_out,
        "ood": known_ood,
        **_results(checked, detector),
        "max_flagged": max_flagged,
        "exit_reason": reason,
        "top": records(checked.ranked.head(top), source),
    }
    return Outcome(
        facts,
        [
            paragraph(checked.headline.replace(f"score={checked.best!r}", f"--score {checked.best}")),
            *_comparison_table(checked.comparison),
            *_top_table(facts, run.class_names(source)),
            *([paragraph(reason)] if reason else []),
        ],
        {**written, out: f"all {len(checked.frame):,} inputs, most surprising first"},
        {options.command_line("report", path, model=model, ood=data): "a histogram in the report"},
        GATE if reason else 0,
    )


def _gate(checked: OODTable, max_flagged: int | None) -> str | None:
    """Return the reason for exit code `GATE`; None if there are not too many flagged inputs."""
    count = len(checked.flagged)
    if max_flagged is None or count <= max_flagged:
        return None
    return f"Exit code {GATE}: {count:,} flagged inputs, but --max-flagged allows {max_flagged:,}."


def stored_detector(ifc: IFComp, path: str) -> OODDetector:
    """Return the detector of a run. Raises if it has none."""
    if ifc.detector is None:
        raise SettingError(
            f"'{path}' has no detector yet. Name in-distribution inputs that the model was not trained on, which set "
            f"the threshold: 'ifcomp ood {path} DATA --held-out DATA'."
        )
    return ifc.detector


def _results(checked: OODTable, detector: OODDetector) -> dict[str, Any]:
    return {
        "examples": len(checked.frame),
        "flagged": len(checked.flagged),
        "score": list(detector.members),
        "threshold": detector.threshold,
        "tpr": detector.rule.tpr,
        "comparison": None if checked.comparison is None else checked.comparison.to_dict("records"),
        "best": checked.best,
        "settings": dict(detector.settings),
    }


def _comparison_table(comparison: pd.DataFrame | None) -> list[RenderableType]:
    if comparison is None:
        return []
    rows = [
        (row["score"], f"{100 * row['auroc']:.1f}", f"{100 * row['fpr95']:.1f}")
        for row in comparison.to_dict("records")
    ]
    return [table(("score", "AUROC, %", "FPR at 95 % TPR, %"), rows)]


def _top_table(facts: Mapping[str, Any], names: Sequence[str] | None) -> list[RenderableType]:
    rows = [
        (
            row["name"],
            class_name(row["prediction"], names),
            f"{row['confidence']:.3f}",
            f"{row['score']:.3g}",
            *(f"{row[member]:.3g}" for member in facts["score"]),
        )
        for row in facts["top"]
    ]
    members = facts["score"]
    columns = ("most surprising", "prediction", "confidence", "score", *members)
    return [table(columns, rows, left=2)] if rows else []
