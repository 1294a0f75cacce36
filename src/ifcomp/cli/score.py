"""``ifcomp score``: a table of all scores, one row per example."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType

from ifcomp.cli import options
from ifcomp.cli.output import TABLE_SUFFIXES, Outcome, check_target, paragraph, table, write_table

if TYPE_CHECKING:
    from ifcomp import ScoreTable

EPILOG = "[bold]Example:[/bold] ifcomp score run.ifcomp npz:new.npz --out scores.csv"

#: Columns that are summarised on the terminal.
SUMMARISED = ("confidence", "parametric_complexity", "bounded_complexity", "error", "stochastic_complexity")


def score(
    path: options.RunPath,
    model: options.ModelOptions,
    reading: options.DataOptions,
    data: Annotated[
        str | None,
        typer.Argument(
            metavar="DATA",
            help=f"Data to score: {options.DATA_FORM}.",
            show_default="the training data of the run",
        ),
    ] = None,
    out: Annotated[str, typer.Option(metavar="FILE", help="Table of scores: .csv or .parquet.")] = "scores.csv",
    seen: Annotated[
        bool | None,
        typer.Option(
            "--seen/--unseen",
            help="Whether the model was trained on these labels.",
            show_default="seen for the training data of the run",
        ),
    ] = None,
    alpha: options.Alpha = 1.0,
    probes: options.Probes = None,
    linearized: Annotated[
        bool,
        typer.Option("--linearized", help="Compute complexity to first order, as in the paper; same ranking."),
    ] = False,
    damping: options.DampingText = None,
    max_memory: options.MaxMemory = None,
    checkpoint_every: options.CheckpointEvery = 60.0,
) -> Outcome:
    """Score data: prediction, confidence and complexity; error and regret if there are labels.

    Larger = more surprising, more suspicious. Codelengths are in nats.
    """
    from ifcomp.cli.run import open_run, resumable
    from ifcomp.scoring import ScoreOptions

    chosen_damping = options.parse_damping(damping, None)
    run = open_run(path, model)
    check_target(out, TABLE_SUFFIXES, run.inputs(data))
    was_seen = run.is_training_data(data) if seen is None else seen
    ScoreOptions(was_seen, alpha, linearized, probes)  # checks the settings before any work is done
    with resumable(checkpoint_every, out) as checkpoint:
        source = run.open_data(data, reading)
        scores = run.load_predictor(source).score(
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
    facts = {
        "run": path,
        "data": source.spec,
        "examples": len(scores),
        "settings": dict(scores.settings),
        "summary": summary(scores),
    }
    given = [] if data is None else [data]
    next_steps = {options.command_line("audit", path, *given, model=model, reading=reading): "find wrong labels"}
    if not was_seen and data is not None:
        command = options.command_line("ood", path, data, held_out="DATA", model=model, reading=reading)
        next_steps = {command: "find unfamiliar inputs"}
    return Outcome(facts, _shown(scores, source.spec), {out: f"{len(scores):,} rows"}, next_steps)


def summary(scores: ScoreTable) -> dict[str, dict[str, float]]:
    """Return median, 95th percentile and maximum of the columns in `SUMMARISED`."""
    frame = scores.frame[[name for name in SUMMARISED if name in scores.frame]]
    quantiles = frame.quantile([0.5, 0.95, 1.0])
    return {str(name): dict(zip(("median", "p95", "largest"), quantiles[name], strict=True)) for name in quantiles}


def _shown(scores: ScoreTable, spec: str) -> list[RenderableType]:
    rows = [(name, *(f"{value:.4g}" for value in values.values())) for name, values in summary(scores).items()]
    return [
        paragraph(f"Scored {len(scores):,} examples of {spec}. Larger = more surprising; codelengths in nats."),
        table(("column", "median", "95 %", "largest"), rows),
    ]
