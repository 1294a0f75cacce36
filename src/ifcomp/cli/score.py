"""``ifcomp score``: a table with one row an example."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ifcomp.cli import options
from ifcomp.cli.command import command
from ifcomp.cli.output import TABLE_SUFFIXES, Outcome, check_target, paragraph, table, write_table

if TYPE_CHECKING:
    from ifcomp import ScoreTable

EPILOG = "[bold]Example:[/bold] ifcomp score run.ifcomp npz:new.npz --out scores.parquet"

#: Columns that are summed up on the terminal.
SUMMARISED = ("confidence", "surprise", "parametric_complexity", "error", "stochastic_complexity")


@command
def score(
    run: options.Run,
    model: options.ModelChoice,
    reading: options.DataChoice,
    data: Annotated[
        str | None,
        typer.Argument(metavar="DATA", help=f"What to score: {options.DATA_FORM}.", show_default="the training data"),
    ] = None,
    out: Annotated[str, typer.Option(metavar="FILE", help="Table, .parquet or .csv.")] = "scores.parquet",
    seen: Annotated[
        bool | None,
        typer.Option(
            "--seen/--unseen",
            help="Whether the model was trained on these labels.",
            show_default="seen if it is the training data of the run",
        ),
    ] = None,
    alpha: options.Alpha = 1.0,
    probes: options.Probes = None,
    linearized: Annotated[
        bool, typer.Option("--linearized", help="Complexity to first order, as in the paper; the order is the same.")
    ] = False,
    damping: options.DampingText = None,
    max_memory: options.MaxMemory = None,
    checkpoint_every: options.CheckpointEvery = 60.0,
) -> Outcome:
    """Score data: prediction, confidence, surprise, complexity, and of labels error and regret.

    Larger = more surprising, more suspicious; codelengths are in nats.
    """
    from ifcomp.cli.run import find_run, resumable
    from ifcomp.scoring import ScoreOptions

    check_target(out, TABLE_SUFFIXES)
    chosen_damping = options.damping(damping)
    opened = find_run(run, model)
    was_seen = opened.is_training_data(data) if seen is None else seen
    ScoreOptions(was_seen, alpha, linearized, probes)
    with resumable(checkpoint_every, out) as checkpoint:
        source = opened.source(data, reading)
        scores = opened.predictor(source).score(
            source.batches(),
            seen=was_seen,
            alpha=alpha,
            linearized=linearized,
            probes=probes,
            damping=chosen_damping,
            max_memory=max_memory,
            checkpoint=checkpoint,
        )
        write_table(out, scores.frame, scores.descriptions, scores.settings, source)
    facts = {"run": run, "data": source.spec, "examples": len(scores), "settings": dict(scores.settings)}
    facts |= {"summary": summary(scores)}
    next_steps = {f"ifcomp audit {run}": "which training labels are wrong"}
    if not was_seen:
        next_steps = {f"ifcomp ood {run} {data}": "which of these inputs are unlike the training data"}
    return Outcome(facts, _shown(scores, source.spec), {out: f"{len(scores):,} rows"}, next_steps)


def summary(scores: ScoreTable) -> dict[str, dict[str, Any]]:
    """Median, 95th percentile and largest value of the main columns."""
    frame = scores.frame[[name for name in SUMMARISED if name in scores.frame]]
    found = frame.quantile([0.5, 0.95, 1.0])
    return {str(name): dict(zip(("median", "p95", "largest"), found[name], strict=True)) for name in found}


def _shown(scores: ScoreTable, spec: str) -> list[Any]:
    rows = [(name, *(f"{value:.4g}" for value in values.values())) for name, values in summary(scores).items()]
    return [
        paragraph(f"Scored {len(scores):,} examples of {spec}. Larger = more surprising; codelengths in nats."),
        table(("column", "median", "95 %", "largest"), rows),
    ]
