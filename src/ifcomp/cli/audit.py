"""``ifcomp audit``: which training labels are wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

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

if TYPE_CHECKING:
    from ifcomp.data.sources import Source
    from ifcomp.tasks.mislabel import LabelAudit

EPILOG = "[bold]Example:[/bold] ifcomp audit run.ifcomp --out audit.csv --top 20"


@command
def audit(
    run: options.Run,
    model: options.ModelChoice,
    reading: options.DataChoice,
    data: options.TrainingData = None,
    out: Annotated[
        str, typer.Option(metavar="FILE", help="All labels, most suspicious first: .csv or .parquet.")
    ] = "audit.csv",
    noise_rate: options.NoiseRate = None,
    fraction: options.Fraction = None,
    top: Annotated[int, typer.Option(min=0, help="Labels to print.")] = 10,
    max_suspects: Annotated[
        int | None, typer.Option(min=0, help=f"Exit with {GATE} if there are more suspects than this.")
    ] = None,
    report: Annotated[
        str | None, typer.Option(metavar="FILE", help="Also write what 'ifcomp report' writes, .html.")
    ] = None,
    damping: options.DampingText = None,
    checkpoint_every: options.CheckpointEvery = 60.0,
) -> Outcome:
    """Sort training labels by suspicion and say which are probably wrong.

    Suspicion is the stochastic complexity of the given label where the suggested one is the only other choice, in nats;
    larger = more suspicious. The plain loss (error) and the usual stochastic complexity are in the table beside it.
    """
    from ifcomp.cli.auditing import audit_damping, audit_run, check_shares, write_report
    from ifcomp.cli.opened import check_labelled, find_run
    from ifcomp.cli.resuming import resumable

    check_target(out, TABLE_SUFFIXES)
    if report is not None:
        check_target(report, (".html",))
    check_shares(fraction, noise_rate)
    chosen_damping = audit_damping(damping)
    opened = find_run(run, model)
    with resumable(checkpoint_every, out, *([report] if report else [])) as checkpoint:
        source = opened.source(data, reading)
        check_labelled(source)
        ifc = opened.predictor(source)
        found = audit_run(ifc, source, chosen_damping, fraction, noise_rate, checkpoint)
        written = {out: f"all {len(found.frame):,} labels, most suspicious first"}
        if report is not None:
            write_report(report, opened, ifc, source, found, chosen_damping)
            written[report] = "the report: open it in a browser"
        write_table(out, found.frame, found.descriptions, found.settings, source)
    suspects = len(found.suspects)
    too_many = max_suspects is not None and suspects > max_suspects
    names = opened.class_names(source)
    facts = {
        "run": run,
        "data": source.spec,
        "examples": len(found.frame),
        "suspects": suspects,
        "noise_rate": found.noise_rate,
        "threshold": found.threshold,
        "settings": dict(found.settings),
        "class_names": names,
        "max_suspects": max_suspects,
        "top": records(found.frame.head(top), source),
    }
    return Outcome(
        facts,
        _shown(found, source, names, top),
        written,
        {} if report else {f"ifcomp report {run}": "the same with pictures, to look through in a browser"},
        GATE if too_many else 0,
    )


def _shown(found: LabelAudit, source: Source, names: Sequence[str] | None, top: int) -> list[RenderableType]:
    from ifcomp.tasks.mislabel import AUDIT_BETA, EVEN_ODDS

    suspects = len(found.suspects)
    estimated = found.settings["noise_rate_estimated"]
    said = f"{suspects:,} of {len(found.frame):,} labels of {source.spec} are suspects"
    if suspects and estimated and found.settings["fraction"] is None:
        said += f": the model finds another label more likely (label complexity above {EVEN_ODDS:.2f} nats)."
    else:
        said += f": label complexity of at least {found.threshold:.3g} nats." if suspects else "."
    if estimated:
        said += f" An estimated {100 * found.noise_rate:.1f} % of the labels are wrong, more if the model has"
        said += " memorised some."
    if found.settings["beta"] != AUDIT_BETA:
        said += f" The run was fitted at beta {found.settings['beta']:g}; audits work best at {AUDIT_BETA:g}."
    if not suspects:
        said += " The first of the list are worth a look all the same, above all if the model has memorised its labels."
    rows = [
        (
            row["name"],
            class_name(row["label"], names),
            class_name(row["suggested_label"], names),
            f"{row['label_probability']:.3f}",
            f"{row['suggested_probability']:.3f}",
            f"{row['label_complexity']:.2f}",
        )
        for row in records(found.frame.head(top), source)
    ]
    columns = ("most suspicious", "label", "suggested", "p(label)", "p(suggested)", "nats")
    return [paragraph(said), table(columns, rows, left=3)] if rows else [paragraph(said)]
