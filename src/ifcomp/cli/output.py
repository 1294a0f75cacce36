"""What a command leaves behind: for people on the terminal, or one JSON object for machines."""

from __future__ import annotations

import json
import math
import os
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from ifcomp.errors import SettingError, StorageError

if TYPE_CHECKING:
    import pandas as pd

    from ifcomp.data.sources import Source

#: Exit code of a command whose result is beyond what the user allowed.
GATE = 3

#: Formats of tables, by the end of the file's name.
TABLE_SUFFIXES = (".csv", ".parquet")


@dataclass(frozen=True)
class Outcome:
    """The end of a command.

    Attributes:
        facts: What it found, as JSON shows it; numbers that JSON has no word for become null.
        shown: What people see of it.
        written: Files, with what is in them.
        next_steps: Commands that come naturally now, with what they do.
        exit_code: 0, or what a gate of the command says.
    """

    facts: Mapping[str, Any]
    shown: Sequence[RenderableType] = ()
    written: Mapping[str, str] = field(default_factory=dict)
    next_steps: Mapping[str, str] = field(default_factory=dict)
    exit_code: int = 0

    def as_json(self, command: str) -> str:
        """One object."""
        content = {"command": command, **self.facts, "written": list(self.written), "exit_code": self.exit_code}
        return json.dumps(_plain(content), indent=2, allow_nan=False)

    def show(self, console: Console) -> None:
        """For people: what was found, what was written, what to do next."""
        for part in self.shown:
            console.print(part)
            console.print()
        for title, lines in (("Wrote", self.written), ("Next", self.next_steps)):
            if lines:
                console.print(_lines(title, lines))


def _lines(title: str, lines: Mapping[str, str]) -> Table:
    """A file or command and what it is, a line each; names are not broken, so that they can be copied."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column()
    grid.add_column(no_wrap=True, overflow="fold")
    grid.add_column()
    for name, what in lines.items():
        grid.add_row(Text(f"{title:5}", "bold"), Text(visible(name), "cyan"), Text(visible(what)))
    return grid


def visible(words: str) -> str:
    """Words with every character that would steer a terminal, or turn the order of what is read, as an escape."""
    return "".join(map(_escaped, words))


def _escaped(character: str) -> str:
    steers = unicodedata.category(character) in ("Cc", "Cf", "Cs") and character not in "\n\t"
    return character.encode("unicode_escape").decode() if steers else character


def paragraph(words: str) -> Text:
    """Plain words, whatever brackets are in them."""
    return Text(visible(words))


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, left: int = 1) -> Table:
    """A table with its first ``left`` columns to the left and numbers to the right."""
    made = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for number, name in enumerate(columns):
        made.add_column(Text(visible(name)), justify="left" if number < left else "right", overflow="fold")
    for row in rows:
        made.add_row(*(Text(visible(str(cell))) for cell in row))
    return made


def class_name(label: int, names: Sequence[str] | None) -> str:
    """The name of a class, or its number."""
    return names[label] if names and label < len(names) else str(label)


def check_target(path: str, suffixes: Sequence[str] = ()) -> str:
    """The path of a file that is to be written, or an error before any work is done."""
    target = Path(path)
    if suffixes and target.suffix not in suffixes:
        raise SettingError(f"The name of '{path}' must end in {' or '.join(suffixes)}.")
    if os.path.isdir(target):
        raise StorageError(f"Cannot write '{path}': it is a folder. Name a file in it.")
    if not os.path.isdir(target.parent):
        raise StorageError(f"Cannot write '{path}': there is no folder '{target.parent}'.")
    if not os.access(target.parent, os.W_OK):
        raise StorageError(f"Cannot write '{path}': the folder '{target.parent}' is not writable.")
    return path


def write_table(
    path: str, frame: pd.DataFrame, descriptions: Mapping[str, str], settings: Mapping[str, Any], source: Source
) -> None:
    """In the format that the file's name says, with what the examples are called where the data knows. Atomic."""
    from ifcomp.scores import write_csv, write_parquet

    if source.names is not None:
        frame = frame.copy()
        frame.insert(
            frame.columns.tolist().index("index") + 1, "name", [source.names[index] for index in frame["index"]]
        )
        descriptions = {**descriptions, "name": "what the example is called in the data"}
    if path.endswith(".csv"):
        write_csv(path, frame)
    else:
        write_parquet(path, frame, descriptions, settings)


def records(frame: pd.DataFrame, source: Source) -> list[dict[str, Any]]:
    """Rows as dicts, each with what its example is called."""
    rows: list[dict[str, Any]] = [{str(key): value for key, value in row.items()} for row in frame.to_dict("records")]
    return [{"name": source.names[row["index"]] if source.names else str(row["index"]), **row} for row in rows]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value
