"""``ifcomp ood``: find inputs that are unlike the training data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

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

#: AUROC between reference and inputs below which the message suggests another beta.
GOOD_SEPARATION = 0.8

EPILOG = "[bold]Example:[/bold] ifcomp ood run.ifcomp folder:new --reference folder:held-out"


def ood(
    path: options.RunPath,
    data: Annotated[str, typer.Argument(metavar="DATA", help=f"Inputs to check: {options.DATA_FORM}.")],
    model: options.ModelOptions,
    reading: options.DataOptions,
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="DATA",
            help="In-distribution inputs from which the threshold is computed, preferably held out.",
            show_default="the training data of the run",
        ),
    ] = None,
    tpr: Annotated[float, typer.Option(min=0, max=1, help="Share of the reference to accept.")] = 0.95,
    out: Annotated[
        str, typer.Option(metavar="FILE", help="Table of all inputs, most surprising first: .csv or .parquet.")
    ] = "ood.csv",
    top: Annotated[int, typer.Option(min=0, help="Number of inputs to print.")] = 10,
    max_flagged: Annotated[
        int | None, typer.Option(min=0, help=f"Exit with {GATE} if more inputs are flagged.")
    ] = None,
    probes: options.Probes = None,
    capped: Annotated[
        float | None,
        typer.Option(metavar="ALPHA", min=0, help="Score by capped parametric complexity with this alpha instead."),
    ] = None,
    damping: options.DampingText = None,
) -> Outcome:
    """Flag inputs that are unlike the training data.

    The score is the bounded complexity in nats, or the parametric complexity with --probes or --capped. Larger = more
    surprising. Labels are not used.
    """
    from ifcomp.cli.cache import open_cache
    from ifcomp.cli.run import open_run
    from ifcomp.scores import DESCRIPTIONS
    from ifcomp.tasks.ood import OOD_COLUMN, OOD_DAMPING, PARAMETRIC_COLUMN, flag_ood, ood_metrics, ood_threshold

    check_target(out, TABLE_SUFFIXES)
    ood_threshold([0.0], tpr)  # checks tpr before any work is done
    chosen_damping = options.parse_damping(damping, OOD_DAMPING)
    run = open_run(path, model)
    source = run.open_data(data, reading, labelled=False)
    in_distribution = run.open_data(reference, reading, secondary=True).unlabelled()
    ifc = run.load_predictor(source, in_distribution)
    form: dict[str, Any] = {} if capped is None else {"capped": True, "alpha": capped}
    form |= {} if probes is None else {"probes": probes}
    cache, settings = open_cache(run, ifc), {**form, "damping": repr(chosen_damping)}
    reference_scores, scores = (
        cache.scores(part, settings, partial(ifc.score, part.batches(), **form, damping=chosen_damping))
        for part in (in_distribution, source)
    )
    column = OOD_COLUMN if probes is None and capped is None else PARAMETRIC_COLUMN
    threshold = ood_threshold(reference_scores.column(column), tpr)
    flags = flag_ood(scores, threshold, column)
    flagged = int(flags["is_ood"].sum())
    settings = {**scores.settings, "threshold": threshold, "tpr": tpr, "reference": in_distribution.spec}
    descriptions = DESCRIPTIONS | {"is_ood": f"whether the {column.replace('_', ' ')} is above the threshold"}
    write_table(out, flags, descriptions, settings, source)
    facts = {
        "run": path,
        "data": source.spec,
        "reference": in_distribution.spec,
        "examples": len(flags),
        "flagged": flagged,
        "score": column,
        "threshold": threshold,
        "tpr": tpr,
        "separation": asdict(ood_metrics(reference_scores.column(column), scores.column(column))),
        "settings": settings,
        "max_flagged": max_flagged,
        "top": records(flags.head(top), source),
    }
    return Outcome(
        facts,
        [paragraph(_summary(facts, run.is_training_data(reference))), *_top_table(facts, run.class_names(source))],
        {out: f"all {len(flags):,} inputs, most surprising first"},
        {options.command_line("report", path, model=model, strange=data): "a histogram of both in the report"},
        GATE if max_flagged is not None and flagged > max_flagged else 0,
    )


def _summary(facts: Mapping[str, Any], is_training_data: bool) -> str:
    separation, score = facts["separation"]["auroc"], facts["score"].replace("_", " ")
    text = (
        f"{facts['flagged']:,} of {facts['examples']:,} inputs of {facts['data']} are flagged: {score} above "
        f"{facts['threshold']:.3g} nats, the {100 * facts['tpr']:g} % quantile of {facts['reference']}. AUROC "
        f"of {facts['data']} against {facts['reference']}: {separation:.3f} (0.5 = alike, "
        "1 = every input is more surprising)."
    )
    if is_training_data:
        text += " Training data is less surprising than any new data: held-out data is a better --reference."
    if separation < GOOD_SEPARATION:
        beta = 0.1 if facts["settings"]["beta"] > 0.3 else 1
        text += f" If these inputs should be out of distribution, compare a fit with another --beta, such as {beta:g}."
    return text


def _top_table(facts: Mapping[str, Any], names: Sequence[str] | None) -> list[RenderableType]:
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
    columns = ("most surprising", "prediction", "confidence", "nats", "surprise")
    return [table(columns, rows, left=2)] if rows else []
