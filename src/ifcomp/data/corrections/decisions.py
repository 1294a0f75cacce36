"""``decisions.csv``: decisions of a person about examples of the data."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from ifcomp.data.sources.columns import check_unique, missing_columns
from ifcomp.data.sources.csv import explain_csv_errors
from ifcomp.errors import DataError, EmptyDataError
from ifcomp.io.delimited import Row, open_delimited

REQUIRED = ("index", "decision")

#: Version of the file format, in the optional column ``format``.
FORMAT = "1"

#: Largest size of a file of decisions, in bytes and in rows.
MAX_BYTES = 2**27
MAX_DECISIONS = 2**20

_INDEX = re.compile(r"\d{1,18}", re.ASCII)


class Action(StrEnum):
    """A decision about one example."""

    keep = "keep"
    relabel = "relabel"
    drop = "drop"


@dataclass(frozen=True, slots=True)
class Decision:
    """One row of the file. Labels are texts: class names or class indices.

    Attributes:
        line: Line of the file, counted from 1.
        index: Position of the example in the data.
        action: Keep, relabel or drop.
        label: The new label; empty unless the action is relabel.
        given: The label when the decision was made; empty if unknown.
        name: Name of the example, such as its file; empty if unknown.
    """

    line: int
    index: int
    action: Action
    label: str
    given: str
    name: str


def read_decisions(path: str, max_decisions: int = MAX_DECISIONS) -> list[Decision]:
    """Read a CSV file with the columns index, decision and label, and optionally given, name and format.

    A file whose column ``format`` has another value than `FORMAT` is refused. Other columns are ignored. Names of
    columns and decisions may be in upper case. More rows than ``max_decisions`` are refused.

    Raises:
        DataError: If the file cannot be read or a row is invalid; names the line.
    """
    with explain_csv_errors(path):
        if os.path.exists(path) and os.path.getsize(path) > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES:,} bytes")
        with open_delimited(path) as file:
            names = [name.lower() for name in file.names]
            check_unique([name for name in names if name], path)
            missing = [name for name in REQUIRED if name not in names]
            if missing:
                raise missing_columns(missing, file.names, path)
            places = {name: place for place, name in enumerate(names)}
            decisions = [_parse(row, places, path) for row in itertools.islice(file.rows, max_decisions)]
            if next(file.rows, None) is not None:
                raise ValueError(f"it has more than {max_decisions:,} rows; split it")
    if not decisions:
        raise EmptyDataError(f"'{path}' has no decisions.")
    _check_duplicates(decisions, path)
    return decisions


def _parse(row: Row, places: Mapping[str, int], path: str) -> Decision:
    cells = {name: row.cells[place].strip() for name, place in places.items()}
    if cells.get("format", FORMAT) != FORMAT:
        raise DataError(
            f"Line {row.line:,} of '{path}' has format '{cells['format'][:40]}', this version reads {FORMAT}. Use the "
            "library version that wrote the file, or remove the column 'format' if the columns are index, decision and "
            "label."
        )
    where, index, action = f"Line {row.line:,} of '{path}'", cells["index"], cells["decision"].lower()
    if not _INDEX.fullmatch(index):
        raise DataError(f"{where}: the index must be a whole number from 0 on, but is '{index[:40]}'.")
    if action not in Action.__members__:
        raise DataError(f"{where}: the decision must be keep, relabel or drop, but is '{action[:40]}'.")
    label = cells.get("label", "")
    if action == Action.relabel and not label:
        raise DataError(f"{where}: relabel needs a class index or class name in the column 'label'.")
    label = label if action == Action.relabel else ""
    return Decision(row.line, int(index), Action(action), label, cells.get("given", ""), cells.get("name", ""))


def _check_duplicates(decisions: list[Decision], path: str) -> None:
    lines: dict[int, int] = {}
    for decision in decisions:
        if decision.index in lines:
            raise DataError(
                f"Lines {lines[decision.index]:,} and {decision.line:,} of '{path}' decide about the same index "
                f"{decision.index:,}. Remove one of them."
            )
        lines[decision.index] = decision.line
