"""``ifcomp prune``: which training examples can be dropped."""

from __future__ import annotations

from typing import Annotated

import typer

from ifcomp.cli import options
from ifcomp.cli.command import command
from ifcomp.cli.output import TABLE_SUFFIXES, Outcome, check_target, paragraph, table, write_table
from ifcomp.errors import SettingError

EPILOG = "[bold]Example:[/bold] ifcomp prune run.ifcomp --drop 0.1,0.3 --balanced --out keep.csv"


@command
def prune(
    run: options.Run,
    model: options.ModelChoice,
    reading: options.DataChoice,
    data: options.TrainingData = None,
    drop: Annotated[
        str, typer.Option(metavar="A,B,C", help="Shares of the examples to drop, each below 1.")
    ] = "0.1,0.3,0.5",
    balanced: Annotated[bool, typer.Option("--balanced", help="Drop these shares of each class.")] = False,
    out: Annotated[str, typer.Option(metavar="FILE", help="A row an example: .csv or .parquet.")] = "keep.csv",
    damping: options.DampingText = None,
) -> Outcome:
    """Say which training examples to keep when some are dropped, the best learnt first.

    Dropped first are those of the smallest stochastic complexity, in nats. The table has a column for each share, such
    as keep_0.3, that is true for what to keep.
    """
    import numpy as np

    from ifcomp.cli.run import check_labelled, find_run
    from ifcomp.scores import DESCRIPTIONS
    from ifcomp.tasks.pruning import PRUNING_DAMPING, keep_lists

    check_target(out, TABLE_SUFFIXES)
    chosen = options.damping(damping)
    fractions = options.numbers("--drop", drop) or ()
    if not all(0 <= fraction < 1 for fraction in fractions):
        raise SettingError(f"--drop takes shares of at least 0 and below 1, but got '{drop}'.")
    opened = find_run(run, model)
    source = opened.source(data, reading)
    check_labelled(source)
    scores = opened.predictor(source).score(source.batches(), damping=PRUNING_DAMPING if chosen is None else chosen)
    kept = keep_lists(scores, fractions, balanced=balanced)
    frame = scores.frame[["index", "label", "stochastic_complexity"]].copy()
    columns = {f"keep_{fraction:g}": np.isin(frame["index"], rows) for fraction, rows in kept.items()}
    described = {name: f"whether to keep it when a share of {name[5:]} is dropped" for name in columns}
    settings = {**scores.settings, "balanced": balanced}
    write_table(out, frame.assign(**columns), DESCRIPTIONS | described, settings, source)
    counts = [
        {"drop": fraction, "kept": len(rows), "dropped": len(scores) - len(rows)} for fraction, rows in kept.items()
    ]
    facts = {"run": run, "data": source.spec, "examples": len(scores), "balanced": balanced, "lists": counts}
    rows = [(f"{row['drop']:g}", f"{row['dropped']:,}", f"{row['kept']:,}") for row in counts]
    said = (
        f"Of {len(scores):,} examples of {source.spec}, the best learnt are dropped first. Train again on the others. "
        "Wrong labels are learnt last, so they are among these: look through 'ifcomp audit' before."
    )
    return Outcome(
        facts,
        [paragraph(said), table(("share to drop", "dropped", "kept"), rows, left=0)],
        {out: f"{len(scores):,} rows; columns {', '.join(columns)}"},
    )
