"""``ifcomp audit``: find wrong training labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

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

if TYPE_CHECKING:
    from ifcomp.data.sources import Source
    from ifcomp.tasks.mislabel import LabelAudit

EPILOG = "[bold]Example:[/bold] ifcomp audit run.ifcomp --out audit.csv --top 20"


def audit(
    path: options.RunPath,
    model: options.ModelOptions,
    reading: options.DataOptions,
    suspects: options.SuspectOptions,
    data: options.TrainingData = None,
    out: Annotated[
        str, typer.Option(metavar="FILE", help="Table of all labels, most suspicious first: .csv or .parquet.")
    ] = "audit.csv",
    top: Annotated[int, typer.Option(min=0, help="Number of labels to print.")] = 10,
    max_suspects: Annotated[
        int | None, typer.Option(min=0, help=f"Exit with {GATE} if there are more suspects.")
    ] = None,
    report: Annotated[
        str | None, typer.Option(metavar="FILE", help="Also write the page of 'ifcomp report', .html.")
    ] = None,
    damping: options.DampingText = None,
    checkpoint_every: options.CheckpointEvery = 60.0,
) -> Outcome:
    """Rank training labels by suspicion and flag those that are probably wrong.

    Labels are ranked by label complexity: the stochastic complexity of the given label if the suggested label is the
    only alternative, in nats. Larger = more suspicious. The table also has the loss (error) and the stochastic
    complexity over all labels.
    """
    from ifcomp.cli.report import write_report
    from ifcomp.cli.run import check_labelled, open_run, resumable
    from ifcomp.tasks.mislabel import AUDIT_DAMPING, audit_labels

    check_target(out, TABLE_SUFFIXES)
    if report is not None:
        check_target(report, (".html",))
    chosen_damping = options.parse_damping(damping, AUDIT_DAMPING)
    run = open_run(path, model)
    with resumable(checkpoint_every, out, *([report] if report else [])) as checkpoint:
        source = run.open_data(data, reading)
        check_labelled(source)
        ifc = run.load_predictor(source)
        scores = ifc.score(source.batches(), damping=chosen_damping, checkpoint=checkpoint)
        result = audit_labels(scores, fraction=suspects.fraction, noise_rate=suspects.noise_rate)
        written = {out: f"all {len(result.frame):,} labels, most suspicious first"}
        if report is not None:
            write_report(report, run, ifc, source, result, chosen_damping)
            written[report] = "the report: open it in a browser"
        write_table(out, result.frame, result.descriptions, result.settings, source)
    count, names = len(result.suspects), run.class_names(source)
    facts = {
        "run": path,
        "data": source.spec,
        "examples": len(result.frame),
        "suspects": count,
        "noise_rate": result.noise_rate,
        "threshold": result.threshold,
        "settings": dict(result.settings),
        "class_names": names,
        "max_suspects": max_suspects,
        "top": records(result.frame.head(top), source),
    }
    return Outcome(
        facts,
        [paragraph(_summary(result, source)), *_top_table(result, source, names, top)],
        written,
        {} if report else {f"ifcomp report {path}": "the same with pictures, in a browser"},
        GATE if max_suspects is not None and count > max_suspects else 0,
    )


def _summary(result: LabelAudit, source: Source) -> str:
    from ifcomp.tasks.mislabel import AUDIT_BETA, EVEN_ODDS

    suspects, settings = len(result.suspects), result.settings
    text = f"{suspects:,} of {len(result.frame):,} labels of {source.spec} are suspects"
    if not suspects:
        text += "."
    elif settings["noise_rate_estimated"] and settings["fraction"] is None:
        text += f": the model finds another label more likely (label complexity above {EVEN_ODDS:.2f} nats)."
    else:
        text += f": label complexity of at least {result.threshold:.3g} nats."
    if settings["noise_rate_estimated"]:
        text += f" An estimated {100 * result.noise_rate:.1f} % of the labels are wrong, more if the model has"
        text += " memorised wrong labels."
    if settings["beta"] != AUDIT_BETA:
        text += f" The run was fitted at beta {settings['beta']:g}; audits work best at {AUDIT_BETA:g}."
    if not suspects:
        text += " The first labels of the table are still worth checking if the model has memorised its labels."
    return text


def _top_table(result: LabelAudit, source: Source, names: Sequence[str] | None, top: int) -> list[RenderableType]:
    rows = [
        (
            row["name"],
            class_name(row["label"], names),
            class_name(row["suggested_label"], names),
            f"{row['label_probability']:.3f}",
            f"{row['suggested_probability']:.3f}",
            f"{row['label_complexity']:.2f}",
        )
        for row in records(result.frame.head(top), source)
    ]
    columns = ("most suspicious", "label", "suggested", "p(label)", "p(suggested)", "nats")
    return [table(columns, rows, left=3)] if rows else []
