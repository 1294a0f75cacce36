"""Output of the commands: messages, tables, JSON and files."""

from __future__ import annotations

import json
import math
import os
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from ifcomp.errors import SettingError, StorageError
from ifcomp.io.files import check_kind
from ifcomp.optional import requires_package

if TYPE_CHECKING:
    import pandas as pd

    from ifcomp.data.sources import Source

#: Exit code of a command whose gate was exceeded, such as ``--max-suspects``, and of a fit with an accuracy near
#: chance.
GATE = 3

#: Exit code of a self-test with a wrong result.
FAILED = 1

#: Ending of the names of runs. A fit replaces no other files.
RUN_SUFFIX = ".ifcomp"

#: File formats of tables.
TABLE_SUFFIXES = (".csv", ".parquet")

#: File formats of figures that data in folders have too.
IMAGE_SUFFIXES = (".png",)

#: Largest width to which names of files and commands are padded.
MAX_ALIGNED = 72

#: Metrics of probabilities that are printed.
METRICS = ("accuracy", "nll", "ece", "brier")


@dataclass(frozen=True)
class Outcome:
    """Result of a command.

    Attributes:
        facts: Content of the JSON object. Values that are not finite become null.
        shown: Text and tables for the terminal.
        written: Description of each file that was written, by path.
        next_steps: Description of each command to run next.
        exit_code: 0, `GATE` if a gate was exceeded or a fit is near chance, `FAILED` if a self-test failed.
    """

    facts: Mapping[str, Any]
    shown: Sequence[RenderableType] = ()
    written: Mapping[str, str] = field(default_factory=dict)
    next_steps: Mapping[str, str] = field(default_factory=dict)
    exit_code: int = 0

    def as_json(self, command: str) -> str:
        """Return the outcome as a JSON object."""
        content = {"command": command, **self.facts, "written": list(self.written), "exit_code": self.exit_code}
        return json.dumps(_json_value(content), indent=2, allow_nan=False)

    def show(self, console: Console, *, quiet: bool = False) -> None:
        """Print results, and unless quiet, written files and next steps."""
        for part in self.shown:
            if isinstance(part, Table):
                _fit_width(part, console)
            console.print(part)
            console.print()
        for title, items in () if quiet else (("Wrote", self.written), ("Next", self.next_steps)):
            for line in _described_items(title, items):
                console.print(line, soft_wrap=True)


def _described_items(title: str, items: Mapping[str, str]) -> list[Text]:
    """Return one line per file or command with its description. Lines are not broken, so commands can be copied."""
    names = {one_line(name): one_line(description) for name, description in items.items()}
    width = min(MAX_ALIGNED, max(map(len, names), default=0))
    return [
        Text.assemble((f"{title:5}", "bold"), "  ", (name.ljust(width), "cyan"), "  ", description)
        for name, description in names.items()
    ]


def error_json(command: str | None, error: BaseException, message: str, exit_code: int) -> str:
    """Return an error as a JSON object."""
    content = {"type": type(error).__name__, "message": message}
    return json.dumps({"command": command, "error": content, "exit_code": exit_code}, indent=2)


def _json_value(value: Any) -> Any:
    """Convert mappings, sequences and NumPy scalars to JSON types; NaN and infinity become None."""
    if isinstance(value, Mapping):
        return {str(key): _json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(item) for item in value]
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


# Messages and tables on the terminal ---------------------------------------------------------------------------------


def print_message(title: str, style: str, message: str) -> None:
    """Print a message on standard error."""
    Console(stderr=True, soft_wrap=True).print(Text.assemble((f"{title} ", style), escape_control(message)))


def escape_control(text: str) -> str:
    """Escape control, formatting and surrogate characters, which could steer the terminal or reverse the text.

    Line feeds and tabs are kept, other line breaks are escaped.
    """
    return "".join(
        character.encode("unicode_escape").decode()
        if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") and character not in "\n\t"
        else character
        for character in text
    )


def one_line(text: str) -> str:
    """Escape as `escape_control` does, line breaks and tabs included."""
    return escape_control(text).replace("\n", "\\n").replace("\t", "\\t")


def paragraph(text: str) -> Text:
    """Return text without markup and control characters."""
    return Text(escape_control(text))


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, left: int = 1) -> Table:
    """Return a table whose first ``left`` columns are aligned to the left, the others to the right.

    Cells are broken on narrow terminals. Words of the column names are broken only if there is no other way.
    """
    result = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for position, name in enumerate(columns):
        width = max(map(len, name.split()), default=0)
        result.add_column(
            paragraph(name), justify="left" if position < left else "right", overflow="fold", min_width=width
        )
    for row in rows:
        result.add_row(*(Text(one_line(str(cell))) for cell in row))
    return result


def _fit_width(shown: Table, console: Console) -> None:
    """Set the widths of the columns if the table is wider than the terminal.

    Cells of the columns that are aligned to the left are broken, widest first. If the terminal is narrower than that,
    words of the column names and numbers are broken, too.
    """
    columns = shown.columns
    available = console.width - 3 * len(columns) + 1  # a cell has a space on both sides, columns have one between
    cells = [max((cell_len(str(cell)) for cell in column.cells), default=0) for column in columns]
    if sum(max(width, cell_len(str(column.header))) for width, column in zip(cells, columns, strict=True)) <= available:
        return
    least = [column.min_width or 0 for column in columns]
    widths = [max(pair) for pair in zip(cells, least, strict=True)]
    while sum(widths) > available:
        broken = [
            place for place, column in enumerate(columns) if column.justify == "left" and widths[place] > least[place]
        ]
        if not broken:
            for column in columns:
                column.min_width = None
            return
        widths[max(broken, key=lambda place: widths[place])] -= 1
    for column, width in zip(columns, widths, strict=True):
        column.width = width


def metric_table(title: str, metrics: Mapping[str, Mapping[str, float]]) -> Table:
    """Return a table with one row per predictor and one column per metric of `METRICS`."""
    rows = [(name, *(f"{values[metric]:.4f}" for metric in METRICS)) for name, values in metrics.items()]
    return table((title, *METRICS), rows)


def class_name(label: int, names: Sequence[str] | None) -> str:
    """Return the name of a class, or its number if there are no names."""
    return names[label] if names and label < len(names) else str(label)


def records(frame: pd.DataFrame, source: Source) -> list[dict[str, Any]]:
    """Return the rows as dicts. The key ``name`` is the name of the example, or its index if it has none."""
    rows: list[dict[str, Any]] = [{str(key): value for key, value in row.items()} for row in frame.to_dict("records")]
    return [{"name": source.names[row["index"]] if source.names else str(row["index"]), **row} for row in rows]


# Files ---------------------------------------------------------------------------------------------------------------


def check_target(path: str, suffixes: Sequence[str] = (), inputs: Iterable[str | None] = ()) -> None:
    """Raise an error if the file cannot be written. Commands call this before any work is done.

    Args:
        path: The file.
        suffixes: Suffixes that it may have; empty allows all.
        inputs: Names of what the command reads: files and data. None stands for an input that is not given.

    Raises:
        SettingError: If the file has none of the suffixes, or is an input.
        StorageError: If the file cannot be created.
        MissingPackageError: If the file is a Parquet file and pyarrow is not installed.
    """
    target = Path(path)
    check_kind(target)
    if suffixes and target.suffix not in suffixes:
        raise SettingError(f"The name of '{path}' must end in {' or '.join(suffixes)}.")
    for name in inputs:
        if name is not None and _is_same_file(path, name):
            raise SettingError(
                f"'{path}' is an input of the command, '{name}', and would be lost. Choose another file."
            )
    if not os.path.isdir(target.parent):
        raise StorageError(f"Cannot write '{path}': there is no folder '{target.parent}'.")
    if not os.access(target.parent, os.W_OK):
        raise StorageError(f"Cannot write '{path}': the folder '{target.parent}' is not writable.")
    if target.suffix == ".parquet":
        with requires_package("pyarrow", "parquet"):
            import pyarrow.parquet  # noqa: F401


def _is_same_file(path: str, name: str) -> bool:
    """Whether a file is an input: a path, or data such as ``npz:FILE``. Data in a folder are all files below it."""
    for file in (name, os.path.expanduser(name.partition(":")[2])):
        with suppress(OSError, ValueError):
            if os.path.samefile(path, file):
                return True
            if os.path.isdir(file) and Path(path).suffix in IMAGE_SUFFIXES and os.path.exists(path):
                return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(file))
    return False


def write_table(
    path: str, frame: pd.DataFrame, descriptions: Mapping[str, str], settings: Mapping[str, Any], source: Source
) -> None:
    """Write a table as CSV or Parquet, depending on the suffix of the path. Atomic.

    Args:
        path: File to write.
        frame: The table, with a column ``index``. A column ``name`` is inserted after it if the examples have names
            and the table has no such column.
        descriptions: Meaning of each column, stored in Parquet files.
        settings: Settings that the table was computed with, stored in Parquet files.
        source: The data that the rows belong to.
    """
    from ifcomp.tables import write_csv, write_parquet

    if source.names is not None and "name" not in frame.columns:
        names = [source.names[index] for index in frame["index"]]
        frame = frame.copy()
        frame.insert(frame.columns.tolist().index("index") + 1, "name", names)
        descriptions = {**descriptions, "name": "name of the example in the data, such as its file"}
    if path.endswith(".csv"):
        write_csv(path, frame)
    else:
        write_parquet(path, frame, descriptions, settings)
