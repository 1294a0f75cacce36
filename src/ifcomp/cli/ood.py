"""``ifcomp ood``: which inputs are unlike anything the model knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from ifcomp.cli import options
from ifcomp.cli.command import command
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

#: AUROC below which another beta is worth a try, if the inputs are strange at all.
TOLD_APART = 0.8

EPILOG = "[bold]Example:[/bold] ifcomp ood run.ifcomp folder:new --reference folder:held-out"


@command
def ood(
    run: options.Run,
    data: Annotated[str, typer.Argument(metavar="DATA", help=f"Inputs to check: {options.DATA_FORM}.")],
    model: options.ModelChoice,
    reading: options.DataChoice,
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="DATA",
            help="Inputs like the training data, better not trained on, that the threshold is taken from.",
            show_default="the training data of the run",
        ),
    ] = None,
    tpr: Annotated[float, typer.Option(min=0, max=1, help="Share of the reference to accept.")] = 0.95,
    out: Annotated[
        str, typer.Option(metavar="FILE", help="All inputs, most surprising first: .csv or .parquet.")
    ] = "ood.csv",
    top: Annotated[int, typer.Option(min=0, help="Inputs to print.")] = 10,
    max_flagged: Annotated[
        int | None, typer.Option(min=0, help=f"Exit with {GATE} if more inputs than this are flagged.")
    ] = None,
    probes: options.Probes = None,
    capped: Annotated[
        float | None,
        typer.Option(metavar="ALPHA", min=0, help="Score by capped parametric complexity with this alpha instead."),
    ] = None,
    damping: options.DampingText = None,
) -> Outcome:
    """Flag inputs that are unlike the training data.

    The score is the bounded complexity in nats; with --probes or --capped it is the parametric complexity. Larger =
    more surprising. Labels of the inputs are not used.
    """
    from ifcomp.cli.run import find_run
    from ifcomp.scores import DESCRIPTIONS
    from ifcomp.tasks.ood import OOD_COLUMN, OOD_DAMPING, PARAMETRIC_COLUMN, flag_ood, ood_metrics, ood_threshold

    check_target(out, TABLE_SUFFIXES)
    ood_threshold([0.0], tpr)
    chosen = options.damping(damping)
    opened = find_run(run, model)
    source = opened.source(data, reading, labelled=False)
    familiar = opened.source(reference, reading, beside=True).unlabelled()
    ifc = opened.predictor(source, familiar)
    how: dict[str, Any] = {} if capped is None else {"capped": True, "alpha": capped}
    usual, given = (
        ifc.score(part.batches(), **how, probes=probes, damping=OOD_DAMPING if chosen is None else chosen)
        for part in (familiar, source)
    )
    column = OOD_COLUMN if probes is None and capped is None else PARAMETRIC_COLUMN
    threshold = ood_threshold(usual.column(column), tpr)
    found = flag_ood(given, threshold, column)
    score = column.replace("_", " ")
    descriptions = DESCRIPTIONS | {"is_ood": f"whether the {score} is above the threshold"}
    settings = {**given.settings, "threshold": threshold, "tpr": tpr, "reference": familiar.spec}
    write_table(out, found, descriptions, settings, source)
    flagged = int(found["is_ood"].sum())
    metrics = ood_metrics(usual.column(column), given.column(column))
    facts = {
        "run": run,
        "data": source.spec,
        "reference": familiar.spec,
        "examples": len(found),
        "flagged": flagged,
        "score": column,
        "threshold": threshold,
        "tpr": tpr,
        "separation": asdict(metrics),
        "settings": settings,
        "max_flagged": max_flagged,
        "top": records(found.head(top), source),
    }
    shown = _shown(facts, opened.is_training_data(reference), opened.class_names(source))
    written = {out: f"all {len(found):,} inputs, most surprising first"}
    next_steps = {f"ifcomp report {run} --strange {data}": "as a picture"}
    too_many = max_flagged is not None and flagged > max_flagged
    return Outcome(facts, shown, written, next_steps, GATE if too_many else 0)


def _shown(facts: Mapping[str, Any], on_training_data: bool, names: Sequence[str] | None) -> list[RenderableType]:
    score = facts["score"].replace("_", " ")
    said = (
        f"{facts['flagged']:,} of {facts['examples']:,} inputs of {facts['data']} are flagged: {score} "
        f"above {facts['threshold']:.3g} nats, which {100 * facts['tpr']:g} % of {facts['reference']} do not exceed. "
        f"AUROC between the two: {facts['separation']['auroc']:.3f}; 0.5 = alike, 1 = all inputs more surprising."
    )
    if on_training_data:
        said += " The training data looks more familiar than anything new: better take held-out data as --reference."
    if facts["separation"]["auroc"] < TOLD_APART:
        other = 0.1 if facts["settings"]["beta"] > 0.3 else 1
        said += f" If they should be told apart better, fit again with another --beta, such as {other:g}, and compare."
    columns = ("most surprising", "prediction", "confidence", "nats", "surprise")
    rows = [
        (
            row["name"],
            class_name(row["prediction"], names),
            f"{row['confidence']:.3f}",
            f"{row[facts['score']]:.3g}",
            f"{row['surprise']:.1f}",
        )
        for row in facts["top"]
    ]
    return [paragraph(said), table(columns, rows, left=2)] if rows else [paragraph(said)]
