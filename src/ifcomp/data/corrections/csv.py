"""Corrections of ``csv:FILE``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TextIO

from ifcomp.data.corrections.base import Corrections, LabelledFile
from ifcomp.data.sources.base import SourceRequest
from ifcomp.data.sources.columns import choose_label
from ifcomp.data.sources.csv import explain_csv_errors
from ifcomp.data.sources.csv_labels import LabelColumn
from ifcomp.errors import DataError, EmptyDataError
from ifcomp.io.delimited import DelimitedFile, format_row, open_delimited
from ifcomp.io.files import atomic_write


def open_csv_labels(request: SourceRequest) -> LabelledFile:
    """Open the labels of a CSV file.

    The corrected file contains all other rows, and the other cells of corrected rows, unchanged byte by byte.
    """
    path, known_classes = request.path, request.class_names
    with explain_csv_errors(path), open_delimited(path) as file:
        labels, count = _read_labels(file, request)
    if not count:
        raise EmptyDataError(f"'{path}' has no rows.")
    y, class_names = (None, known_classes) if labels is None else labels.encode(known_classes)
    texts = class_names if labels is not None and labels.are_names(known_classes) else None

    def write(corrections: Corrections, out: str) -> tuple[()]:
        new = {index: str(label) if texts is None else texts[label] for index, label in corrections.labels.items()}
        with explain_csv_errors(path), atomic_write(out) as scratch, open_delimited(path) as file:
            place = -1 if labels is None else file.names.index(labels.name)
            with scratch.open("w", encoding="utf-8", newline="") as stream:
                copied = _copy_rows(file, stream, place, new, corrections)
            if copied != count:
                raise DataError(f"'{path}' was changed while it was read. Run this again.")
        return ()

    return LabelledFile(path, count, y, class_names, None, write)


def _read_labels(file: DelimitedFile, request: SourceRequest) -> tuple[LabelColumn | None, int]:
    """Return the label column, if any, and the number of rows."""
    name, count = choose_label(file.names, request), 0
    labels = None if name is None else LabelColumn(name, request.path)
    place = -1 if name is None else file.names.index(name)
    for row in file.rows:
        count += 1
        if labels is not None:
            labels.append(row.cells[place], row.line)
    return labels, count


def _copy_rows(
    file: DelimitedFile, stream: TextIO, place: int, new: Mapping[int, str], corrections: Corrections
) -> int:
    """Copy the header and the rows that are left, with their new labels. Returns the number of rows that were read."""
    stream.write(file.header.text)
    count = 0
    for index, row in enumerate(file.rows):
        count += 1
        if index in corrections.dropped:
            continue
        if index in new:
            row.cells[place] = new[index]
            stream.write(format_row(row.cells, file.delimiter, row.text))
        else:
            stream.write(row.text)
    return count
