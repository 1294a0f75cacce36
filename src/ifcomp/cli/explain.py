"""``ifcomp explain``: the training examples behind given labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from ifcomp.cli import options
from ifcomp.cli.output import TABLE_SUFFIXES, Outcome, check_target, class_name, paragraph, table, write_table
from ifcomp.errors import SettingError

if TYPE_CHECKING:
    import pandas as pd

    from ifcomp.data.sources import Source

EPILOG = "[bold]Example:[/bold] ifcomp explain run.ifcomp 17,25 --count 3"


def explain(
    path: options.RunPath,
    positions: Annotated[
        str,
        typer.Argument(metavar="A,B,C", help="Positions of the examples in DATA, as in the column index of audit.csv."),
    ],
    model: options.ModelOptions,
    reading: options.DataOptions,
    data: Annotated[
        str | None,
        typer.Argument(
            metavar="DATA",
            help=f"Labelled data of these examples: {options.DATA_FORM}.",
            show_default="the training data of the run",
        ),
    ] = None,
    train: Annotated[
        str | None,
        typer.Option(
            metavar="DATA",
            help="Labelled data that the model was trained on.",
            show_default="the training data of the run",
        ),
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="Number of supporting and of contradicting examples of each.")] = 5,
    out: Annotated[
        str, typer.Option(metavar="FILE", help="Table of the training examples: .csv or .parquet.")
    ] = "explain.csv",
    damping: options.DampingText = None,
) -> Outcome:
    """List the training examples that most support and most contradict labels.

    The effect of a training example is the increase of the codelength of the label in nats, to first order, if the
    model had been trained without it. An example of the training data is left out of its list.
    """
    from ifcomp.cli.run import check_labelled, open_run
    from ifcomp.data.selection import select_examples

    chosen = parse_positions(positions)
    chosen_damping = options.parse_damping(damping, None)
    run = open_run(path, model)
    check_target(out, TABLE_SUFFIXES, run.inputs(data, train))
    source = run.open_data(data, reading)
    training = run.open_data(train, reading, secondary=True, like=source)
    for opened in (source, training):
        check_labelled(opened)
    ifc = run.load_predictor(source, training)
    x, y = select_examples(source.batches(), chosen)
    left_out = chosen if source.spec == training.spec else None
    result = ifc.explain(x, y, training.batches(), k=count, positions=left_out, damping=chosen_damping)
    names = run.class_names(training)
    frame = result.frame.assign(query=[chosen[query] for query in result.frame["query"]])
    descriptions = {**result.descriptions, "query": "position of the explained example in its data"}
    write_table(out, frame, descriptions, result.settings, training)
    labels = dict(zip(chosen, y.tolist(), strict=True))
    facts = {
        "run": path,
        "data": source.spec,
        "train": training.spec,
        "queries": [{"index": index, "label": label} for index, label in labels.items()],
        "settings": dict(result.settings),
        "effects": frame.to_dict("records"),
    }
    note = "Effects are in nats. Positive effects support the label; negative effects contradict it."
    shown = [part for index in chosen for part in _shown(index, labels[index], frame, source, training, names)]
    return Outcome(facts, [*shown, paragraph(note)], {out: f"{len(frame):,} training examples and their effects"})


def parse_positions(text: str) -> list[int]:
    """Parse ``17,25``: different positions of at least 0."""
    try:
        positions = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise SettingError(
            f"Positions are whole numbers separated by commas, such as 17,25, but got '{text}'."
        ) from error
    if min(positions) < 0 or len(set(positions)) < len(positions):
        raise SettingError(f"Positions are at least 0, and each is given once, but got '{text}'.")
    return positions


def _shown(
    index: int, label: int, frame: pd.DataFrame, source: Source, training: Source, names: Sequence[str] | None
) -> list[RenderableType]:
    """Return the title and the table of one example."""
    rows: list[dict[str, Any]] = frame[frame["query"] == index].to_dict("records")  # type: ignore[assignment]
    cells = [
        (row["role"], _name_of(training, row["index"]), class_name(row["label"], names), f"{row['effect']:.3g}")
        for row in rows
    ]
    title = f"Example {_name_of(source, index)} with the label {class_name(label, names)}:"
    return [paragraph(title), table(("role", "training example", "its label", "effect"), cells, left=3)]


def _name_of(source: Source, index: int) -> str:
    """Return the file name or the text of an example, or its position."""
    known = source.names or source.texts
    return known[index] if known else str(index)
