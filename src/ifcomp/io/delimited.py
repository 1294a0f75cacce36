"""CSV files of others, read row by row in bounded memory, and cells that spreadsheets do not run.

Commas, semicolons and tabs separate cells; the header decides. A byte order mark and the line ``sep=;`` of Excel are
understood. All functions raise OSError or ValueError with the reason. Callers convert them to their own errors.
"""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO

from ifcomp.io.untrusted import regular_file

#: Largest size of a row in bytes and in lines. Longer rows are refused before they are read completely.
MAX_ROW_BYTES = 2**22
MAX_ROW_LINES = 2**16

#: Separators of cells, in order of preference.
DELIMITERS = (",", ";", "\t")

BYTE_ORDER_MARK = "\ufeff"

#: Start of a formula in a spreadsheet, also in full-width characters: at the start of a text, and after a semicolon,
#: which separates cells in many countries. Plain numbers are exempt.
_FORMULA = re.compile(r"(^|;)(?=\s*[=+\-@\uff1d\uff0b\uff0d\uff20])")
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")

_SEPARATOR_LINE = re.compile(r'"?sep=([,;\t])"?\s*')
_HOW_TO_SAVE = "in a spreadsheet, save it as 'CSV UTF-8'"

#: First bytes of files that are often given instead of a CSV file.
_OTHER_FORMATS = {
    b"\xff\xfe": f"its text is UTF-16; {_HOW_TO_SAVE}",
    b"\xfe\xff": f"its text is UTF-16; {_HOW_TO_SAVE}",
    b"PK\x03\x04": f"it is an Excel workbook or another zip archive; {_HOW_TO_SAVE}",
    b"\x1f\x8b": "it is compressed; decompress it first",
}


@dataclass(frozen=True)
class Row:
    """One row of a CSV file.

    Attributes:
        line: Line of the file on which the row starts, counted from 1.
        cells: Its cells as text.
        text: The row as it is in the file, with line breaks, and with blank lines before it.
    """

    line: int
    cells: list[str]
    text: str


@dataclass(frozen=True)
class DelimitedFile:
    """An opened CSV file.

    Attributes:
        header: The first row.
        names: Names of the columns, without surrounding spaces.
        rows: The other rows. Each has as many cells as the header; blank lines are skipped.
        delimiter: Separator of the cells.
    """

    header: Row
    names: tuple[str, ...]
    rows: Iterator[Row]
    delimiter: str


@contextmanager
def open_delimited(path: str | os.PathLike[str]) -> Iterator[DelimitedFile]:
    """Open a CSV file and read its header.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If it is not UTF-8 text, or a row is malformed or too long; names the line.
    """
    with regular_file(path).open("rb") as stream:
        _check_format(stream)
        lines = _Lines(stream)
        delimiter = _find_delimiter(lines)
        rows = _read_rows(lines, delimiter)
        header = next(rows, None)
        if header is None:
            raise ValueError("it has no header")
        names = tuple(name.strip() for name in header.cells)
        yield DelimitedFile(header, names, _check_width(rows, len(names)), delimiter)


def escape_cell(text: str) -> str:
    """Return a text with an apostrophe wherever a formula can start, and with escaped control characters."""
    if _NUMBER.fullmatch(text):
        return text
    return _CONTROL.sub(lambda control: control[0].encode("unicode_escape").decode(), _FORMULA.sub(r"\1'", text))


def format_row(cells: list[str], delimiter: str, text: str) -> str:
    """Return cells as a row with the line break of ``text``."""
    ending = text[len(text.rstrip("\r\n")) :]
    return delimiter.join(_quoted(cell, delimiter) for cell in cells) + ending


def _quoted(cell: str, delimiter: str) -> str:
    return '"' + cell.replace('"', '""') + '"' if any(part in cell for part in (delimiter, '"', "\r", "\n")) else cell


def _check_format(stream: BinaryIO) -> None:
    start = stream.read(4)
    stream.seek(0)
    for magic, reason in _OTHER_FORMATS.items():
        if start.startswith(magic):
            raise ValueError(reason)


class _Lines:
    """Lines of a file as text, and the text of the current row."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._size, self._count = stream, 0, 0
        self._parts: list[str] = []
        self._pushed: list[str] = []

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._pushed.pop() if self._pushed else self._read()
        if not line:
            raise StopIteration
        self._parts.append(line)
        return line.removeprefix(BYTE_ORDER_MARK) if self._count == 1 else line

    def peek(self) -> str:
        """Return the next line without its byte order mark. The line is not consumed."""
        self._pushed.append(self._read())
        return self._pushed[-1].removeprefix(BYTE_ORDER_MARK)

    def end_row(self) -> str:
        """Return the text of the current row, and start another."""
        text = "".join(self._parts)
        self._parts, self._size = [], 0
        return text

    @property
    def position(self) -> int:
        """Number of lines that were consumed."""
        return self._count - len(self._pushed)

    def _read(self) -> str:
        line = self._stream.readline(MAX_ROW_BYTES + 1)
        self._size += len(line)
        self._count += bool(line)
        if self._size > MAX_ROW_BYTES:
            raise ValueError(f"the row that includes line {self._count:,} has more than {MAX_ROW_BYTES:,} bytes")
        if len(self._parts) >= MAX_ROW_LINES:
            raise ValueError(f"the row that includes line {self._count:,} has more than {MAX_ROW_LINES:,} lines")
        try:
            return line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"line {self._count:,} is not UTF-8 text; {_HOW_TO_SAVE}") from error


def _find_delimiter(lines: _Lines) -> str:
    """Return the separator that Excel states in the first line, or the most frequent one in that line."""
    first = lines.peek()
    stated = _SEPARATOR_LINE.fullmatch(first)
    if stated is None:
        unquoted = re.sub(r'"[^"]*"', "", first)
        return max(DELIMITERS, key=unquoted.count)
    next(lines)
    return stated[1]


def _read_rows(lines: _Lines, delimiter: str) -> Iterator[Row]:
    """Yield the rows, without blank lines."""
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        start = lines.position
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise ValueError(f"line {lines.position:,}: {error}") from error
        if cells is None:
            return
        if cells:
            yield Row(start + 1, cells, lines.end_row())


def _check_width(rows: Iterator[Row], width: int) -> Iterator[Row]:
    for row in rows:
        if len(row.cells) != width:
            raise ValueError(f"line {row.line:,} has {len(row.cells):,} cells, but the header has {width:,}")
        yield row
