"""Labels of a CSV file: integers or class names, collected row by row."""

from __future__ import annotations

import re
from array import array

import numpy as np
from numpy.typing import NDArray

from ifcomp.data.sources.columns import number_classes
from ifcomp.errors import DataError, LabelError

#: Largest number of distinct labels. More indicate that the column contains something else.
MAX_LABELS = 2**16

#: Longest class name in characters.
MAX_NAME = 1000

_INTEGER = re.compile(r"[+-]?\d{1,18}", re.ASCII)


class LabelColumn:
    """The label column of a CSV file. Every distinct text is stored once.

    Attributes:
        name: Name of the column.
        path: The file, for messages.
    """

    def __init__(self, name: str, path: str) -> None:
        self.name, self.path = name, path
        self._codes = array("i")
        self._lines: dict[str, tuple[int, int]] = {}  # code, and the first line, of every text

    def append(self, cell: str, line: int) -> None:
        """Add the label of one row.

        Raises:
            DataError: If the cell is empty or too long, or there are too many distinct labels.
        """
        text = cell.strip()
        if text not in self._lines:
            self._check(text, line)
            self._lines[text] = len(self._lines), line
        self._codes.append(self._lines[text][0])

    def encode(self, known_classes: tuple[str, ...] | None) -> tuple[NDArray[np.int64], tuple[str, ...] | None]:
        """Return labels [N] and class names, if known. Labels that are known class names are names, also "1".

        Raises:
            LabelError: If labels are fractions, or are none of the known classes.
        """
        texts = list(self._lines)
        codes = np.array(self._codes, np.int64)
        if not self.are_names(known_classes):
            return np.array([int(text) for text in texts], np.int64)[codes], known_classes
        numbers = number_classes(texts, known_classes, self.name, self.path)
        return np.array([numbers[text] for text in texts], np.int64)[codes], tuple(numbers)

    def are_names(self, known_classes: tuple[str, ...] | None) -> bool:
        """Return whether the labels are class names, not integers.

        Raises:
            LabelError: If labels are fractions.
        """
        if known_classes is not None and self._lines.keys() <= set(known_classes):
            return True
        other = [text for text in self._lines if not _INTEGER.fullmatch(text)]
        if other and all(_is_number(text) for text in self._lines):
            where = self._where(self._lines[other[0]][1])
            raise LabelError(f"{where}: labels must be integers or names, but '{other[0]}' is a fraction.")
        return bool(other)

    def _check(self, text: str, line: int) -> None:
        if not text:
            raise DataError(f"{self._where(line)}: the label is empty. Fill it, or leave this row out.")
        if len(text) > MAX_NAME:
            raise DataError(
                f"{self._where(line)}: the label has {len(text):,} characters, but at most {MAX_NAME:,} are allowed."
            )
        if len(self._lines) >= MAX_LABELS:
            raise DataError(
                f"{self._where(line)}: there are more than {MAX_LABELS:,} distinct labels. Name the column of the "
                "labels with --label-column."
            )

    def _where(self, line: int) -> str:
        return f"Line {line:,} of '{self.path}', column '{self.name}'"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
