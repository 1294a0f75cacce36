"""``csv:FILE``: a table with one row per example, a header, and its features in numeric columns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ifcomp.data.sources.arrays import source_from_arrays
from ifcomp.data.sources.base import Source, SourceRequest, explain_errors
from ifcomp.data.sources.columns import choose_columns, quote
from ifcomp.data.sources.csv_labels import LabelColumn
from ifcomp.data.sources.csv_values import ValueStore
from ifcomp.errors import DataError, EmptyDataError
from ifcomp.io.delimited import DelimitedFile, Row, open_delimited

#: Texts of Boolean cells, as written by pandas and by spreadsheets.
BOOLEANS = {"true": 1.0, "false": 0.0}

#: Longest cell in a message, in characters.
_MAX_SHOWN = 40

_FRACTION = re.compile(r"[+-]?\d*\.\d+")


def explain_csv_errors(path: str) -> AbstractContextManager[None]:
    """Raise DataError for errors of reading a CSV file."""
    return explain_errors(path, "a CSV file", (OSError, ValueError))


def open_csv(request: SourceRequest) -> Source:
    """Open the rows of a CSV file with a header.

    Features are numeric columns, as float32 [N, F]. Their order is that of the requested feature columns, else that of
    the file. Labels are integers or names; the classes of names are the known class names, or the sorted distinct
    values. The file is read once, row by row. Features beyond 256 MiB are in a temporary file.

    Raises:
        DataError: If columns are missing, or a cell is empty or not a number; names the line and the column.
    """
    path = request.path
    with explain_csv_errors(path):
        with open_delimited(path) as file:
            label_column, feature_columns = _choose_columns(file.names, request)
            x, labels = _read(file, path, label_column, feature_columns)
        y, class_names = (None, None) if labels is None else labels.encode(request.class_names)
    source = source_from_arrays(request.spec, x, y, request.options, class_names, feature_columns)
    return replace(source, feature_columns=feature_columns)


def _choose_columns(names: Sequence[str], request: SourceRequest) -> tuple[str | None, tuple[str, ...]]:
    """Return the label column, if any, and the feature columns, after a check of the header."""
    if any(_FRACTION.fullmatch(name) for name in names):
        raise DataError(
            f"The first line of '{request.path}' contains numbers. It must contain the names of the columns."
        )
    label, features = choose_columns(names, request)
    if "" in features:
        raise DataError(
            f"Column {names.index('') + 1} of '{request.path}' has no name. If it contains row numbers of pandas, "
            "write the file with to_csv(..., index=False), or name the features with --feature-columns."
        )
    return label, features


def _read(
    file: DelimitedFile, path: str, label_column: str | None, feature_columns: Sequence[str]
) -> tuple[NDArray[np.float32], LabelColumn | None]:
    """Return the features [N, F] and the label column, if any."""
    label_place = None if label_column is None else file.names.index(label_column)
    labels = None if label_column is None else LabelColumn(label_column, path)
    places = {name: place for place, name in enumerate(file.names)}
    columns = [(name, places[name]) for name in feature_columns]
    values = ValueStore(len(columns))
    for row in file.rows:
        values.append(_parse_features(row, columns, path))
        if labels is not None and label_place is not None:
            labels.append(row.cells[label_place], row.line)
    if not len(values):
        raise EmptyDataError(f"'{path}' has no rows.")
    return values.as_array(), labels


def _parse_features(row: Row, columns: Sequence[tuple[str, int]], path: str) -> NDArray[np.float32]:
    """Return the features [F] of one row.

    Raises:
        DataError: If a cell is not a finite number.
    """
    cells = [row.cells[place] for _, place in columns]
    try:
        if "_" in "".join(cells):  # float() ignores underscores between digits
            raise ValueError
        values = np.array(list(map(float, cells)), np.float64)
    except ValueError:
        values = np.array([_parse_cell(cell) for cell in cells], np.float64)
    with np.errstate(over="ignore"):
        features = values.astype(np.float32)
    if not np.isfinite(features).all():
        wrong = np.flatnonzero(~np.isfinite(features)).tolist()
        raise _not_numbers([columns[place][0] for place in wrong], cells[wrong[0]], row.line, path)
    return features


def _parse_cell(cell: str) -> float:
    """Return a number, 1 and 0 for Boolean texts, and NaN for other texts."""
    try:
        return float("nan") if "_" in cell else float(cell)
    except ValueError:
        return BOOLEANS.get(cell.strip().lower(), float("nan"))


def _not_numbers(names: Sequence[str], cell: str, line: int, path: str) -> DataError:
    """Return the error for cells that are empty, not numeric, or not finite in float32."""
    where = f"Line {line:,} of '{path}', column {quote(names)}"
    if not cell.strip():
        return DataError(f"{where}: the cell is empty. Fill it, or leave this row out.")
    shown = cell if len(cell) <= _MAX_SHOWN else f"{cell[:_MAX_SHOWN]}..."
    if re.fullmatch(r"\s*[+-]?\d+,\d+\s*", cell):
        return DataError(f"{where}: '{shown}' has a decimal comma. Export the table with decimal points.")
    return DataError(
        f"{where}: '{shown}' is not a finite number. Name numeric features with --feature-columns and the label with "
        "--label-column."
    )
