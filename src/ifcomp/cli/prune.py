"""``ifcomp prune``: choose training examples to drop."""

from __future__ import annotations

from typing import Annotated

import typer

from ifcomp.cli import options
from ifcomp.cli.output import TABLE_SUFFIXES, Outcome, check_target, paragraph, table, write_table
from ifcomp.errors import SettingError

EPILOG = "[bold]Example:[/bold] ifcomp prune run.ifcomp --drop 0.1,0.3 --balanced --out keep.csv"


def prune(
    path: options.RunPath,
    model: options.ModelOptions,
    reading: options.DataOptions,
    data: options.TrainingData = None,
    drop: Annotated[
        str, typer.Option(metavar="A,B,C", help="Shares of the examples to drop, each below 1.")
    ] = "0.1,0.3,0.5",
    balanced: Annotated[bool, typer.Option("--balanced", help="Drop these shares of every class.")] = False,
    out: Annotated[
        str, typer.Option(metavar="FILE", help="Table with one row per example: .csv or .parquet.")
    ] = "keep.csv",
    damping: options.DampingText = None,
) -> Outcome:
    """List the training examples to keep when a share of them is dropped.

    Examples with the smallest stochastic complexity, in nats, are dropped first. The table has one column per share,
    such as keep_0.3, which is true for the examples to keep.
    """
    import numpy as np

    from ifcomp.cli.run import check_labelled, open_run
    from ifcomp.scores import DESCRIPTIONS
    from ifcomp.tasks.pruning import PRUNING_DAMPING, keep_lists, warn_of_large_fractions

    chosen_damping = options.parse_damping(damping, PRUNING_DAMPING)
    fractions = options.parse_numbers("--drop", drop) or ()
    if not all(0 <= fraction < 1 for fraction in fractions):
        raise SettingError(f"--drop takes shares of at least 0 and below 1, but got '{drop}'.")
    warn_of_large_fractions(fractions)
    run = open_run(path, model)
    check_target(out, TABLE_SUFFIXES, run.inputs(data))
    source = run.open_data(data, reading)
    check_labelled(source)
    scores = run.load_predictor(source).score(source.batches(), damping=chosen_damping)
    kept = keep_lists(scores, fractions, balanced=balanced)
    frame = scores.frame[["index", "label", "stochastic_complexity"]].copy()
    columns = {f"keep_{fraction:g}": np.isin(frame["index"], indices) for fraction, indices in kept.items()}
    descriptions = {name: f"whether to keep the example if a share of {name[5:]} is dropped" for name in columns}
    settings = {**scores.settings, "balanced": balanced}
    write_table(out, frame.assign(**columns), DESCRIPTIONS | descriptions, settings, source)
    lists = [
        {"drop": fraction, "kept": len(indices), "dropped": len(scores) - len(indices)}
        for fraction, indices in kept.items()
    ]
    rows = [(f"{row['drop']:g}", f"{row['dropped']:,}", f"{row['kept']:,}") for row in lists]
    summary = (
        f"Ranked {len(scores):,} examples of {source.spec}; those of smallest complexity are dropped first. Train "
        "again on the others. They include wrong labels, which are learnt last: run 'ifcomp audit' first."
    )
    return Outcome(
        {"run": path, "data": source.spec, "examples": len(scores), "balanced": balanced, "lists": lists},
        [paragraph(summary), table(("share to drop", "dropped", "kept"), rows, left=0)],
        {out: f"{len(scores):,} rows; columns {', '.join(columns)}"},
    )
