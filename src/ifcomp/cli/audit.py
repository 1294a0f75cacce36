"""``ifcomp audit``: find wrong labels."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
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
    from ifcomp.tasks.audit import LabelAudit

EPILOG = "[bold]Example:[/bold] ifcomp audit run.ifcomp --top 20 --report audit.html"

#: Largest number of characters of a name or text in the printed table.
NAME_CHARACTERS = 40

#: Largest number of layers that are listed by name.
MAX_LISTED = 6


def audit(
    model: options.ModelOptions,
    reading: options.DataOptions,
    path: options.OptionalRunPath = None,
    data: Annotated[
        str | None,
        typer.Argument(
            metavar="DATA",
            help=f"Labelled data to audit: {options.DATA_FORM}.",
            show_default="the training data of the run",
        ),
    ] = None,
    named_data: Annotated[
        str | None,
        typer.Option("--data", metavar="DATA", help="Labelled data to audit, the same as the argument DATA."),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="DATA",
            help="Labelled data on which the predictors are fitted, such as trusted labels.",
            show_default="the audited data, each example left out of its prediction",
        ),
    ] = None,
    out: Annotated[
        str, typer.Option(metavar="FILE", help="Table of all labels in the order of the data: .csv or .parquet.")
    ] = "audit.csv",
    top: Annotated[int, typer.Option(min=0, help="Number of labels to print, most suspicious first.")] = 10,
    max_suspects: Annotated[
        int | None, typer.Option(min=0, help=f"Exit with {GATE} if there are more suspects than this.")
    ] = None,
    report: Annotated[
        str | None, typer.Option(metavar="FILE", help="Also write the page of 'ifcomp report', .html.")
    ] = None,
    max_memory: options.MaxMemory = None,
    checkpoint_every: options.CheckpointEvery = 60.0,
) -> Outcome:
    """Find wrong labels from the evidence of all layers.

    No fit is needed: ifcomp audit --model net:build --weights net.safetensors --data npz:train.npz

    Predictors on up to eight layers and the input predict each label from the other examples. Layers that have
    memorised the labels get little weight. The score is log p(suggested) - log p(label) of the pooled predictions in
    nats; larger = more suspicious. With a run the table also has label complexity. The exit code is 3 if model and data
    probably do not match: wrong preprocessing, weights or order of the classes.
    """
    from ifcomp.cli.cache import open_cache
    from ifcomp.cli.report import write_report
    from ifcomp.cli.run import check_labelled, open_run, resumable
    from ifcomp.distributed import process_info

    if data is not None and named_data is not None:
        raise SettingError("Give the data once: as the argument DATA or with --data.")
    if path is None and (model.model is None or (data or named_data) is None):
        raise SettingError(
            "Give a run, or a model and data: --model package.module:factory --weights FILE --data DATA."
        )
    run = open_run(path, model)
    inputs = run.inputs(data, named_data, reference)
    check_target(out, TABLE_SUFFIXES, inputs)
    if report is not None:
        check_target(report, (".html",), inputs)
    source = run.open_data(data or named_data, reading)
    trusted = None if reference is None else run.open_data(reference, reading, secondary=True, like=source)
    sources = [source] if trusted is None else [source, trusted]
    for opened in sources:
        check_labelled(opened)
    ifc = run.load_predictor(*sources)
    base = None if trusted is None else trusted.batches()

    def compute() -> LabelAudit:
        with ExitStack() as stack:
            one = process_info().world_size == 1
            checkpoint = stack.enter_context(resumable(checkpoint_every, out)) if one else None
            return ifc.audit(source.batches(), reference=base, max_memory=max_memory, checkpoint=checkpoint)

    result = open_cache(run, ifc).audit(source, trusted, compute)
    result = result.with_names(run.class_names(source), source.names or source.texts)
    written = {out: f"all {len(result.frame):,} labels in the order of the data"}
    write_table(out, result.frame, result.descriptions, result.settings, source)
    if report is not None:
        write_report(report, run, ifc, source, result, reading, reference=trusted)
        written[report] = "the report: open it in a browser"
    rows, names, reason = records(result.ranked.head(top), source), run.class_names(source), _gate(result, max_suspects)
    headline = result.headline.replace("reference=", "--reference")
    named = {"run": path, "model": run.model, "data": source.spec, "reference": reference}
    return Outcome(
        {**named, **_facts(result, rows), "class_names": names, "max_suspects": max_suspects, "exit_reason": reason},
        [
            paragraph(headline),
            *_top_table(result, rows, names),
            *([paragraph(reason)] if reason else []),
        ],
        written,
        {} if report else {_report_command(path, data or named_data, model, reading): "the same with pictures"},
        GATE if reason else 0,
    )


def _report_command(
    path: str | None, data: str | None, model: options.ModelOptions, reading: options.DataOptions
) -> str:
    """Return the command that writes the page. Without a run it is the audit itself."""
    if path is None:
        return options.command_line("audit", model=model, reading=reading, data=data, report="audit.html")
    given = [] if data is None else [data]
    return options.command_line("report", path, *given, model=model, reading=reading)


def _gate(result: LabelAudit, max_suspects: int | None) -> str | None:
    """Return the reason for exit code `GATE`; None if model and data match and there are not too many suspects."""
    count = len(result.suspects)
    reasons = [] if result.mismatch is None else ["model and data probably do not match, see above"]
    if max_suspects is not None and count > max_suspects:
        reasons.append(f"{count:,} suspects, but --max-suspects allows {max_suspects:,}")
    return f"Exit code {GATE}: {'; '.join(reasons)}." if reasons else None


def _facts(result: LabelAudit, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "headline": result.headline,
        "examples": len(result.frame),
        "suspects": len(result.suspects),
        "noise_rate": result.noise_rate,
        "memorised": result.memorised,
        "weights": result.weights.to_dict("records"),
        "settings": dict(result.settings),
        "top": [{**row, "neighbours": result.neighbours(row["index"]).to_dict("records")} for row in rows],
    }


def _top_table(result: LabelAudit, rows: Sequence[dict[str, Any]], names: Sequence[str] | None) -> list[RenderableType]:
    if not rows:
        return []
    cells = [
        (
            _shortened(row["name"]),
            class_name(row["label"], names),
            class_name(row["suggested"], names),
            f"{row['p_label']:.3f}",
            f"{row['p_suggested']:.3f}",
            f"{row['score']:.2f}",
            _disagreement(result, row),
        )
        for row in rows
    ]
    columns = ("name", "label", "suggested", "p(label)", "p(suggested)", "nats", "neighbours that disagree")
    layers = result.neighbours(0)["layer"].tolist()
    listed = ", ".join(layers) if len(layers) <= MAX_LISTED else f"{len(layers)} layers, see --json"
    note = f"Neighbours are the nearest examples in every layer that carries the audit: {listed}."
    return [table(columns, cells, left=3), paragraph(note)]


def _disagreement(result: LabelAudit, row: dict[str, Any]) -> str:
    """Return the number of neighbours with another label, over all layers that carry the audit."""
    labels = [label for near in result.neighbours(row["index"])["neighbour_labels"] for label in near]
    return f"{sum(label != row['label'] for label in labels)} of {len(labels)}"


def _shortened(name: str) -> str:
    return name if len(name) <= NAME_CHARACTERS else f"{name[: NAME_CHARACTERS - 1]}…"
