"""Data whose labels can be corrected, and the corrections of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ifcomp.data.corrections.moves import Move


@dataclass(frozen=True)
class Corrections:
    """Decisions after all checks.

    Attributes:
        labels: New class of each example whose label changes, by index.
        dropped: Indices of the examples to drop.
        kept: Number of decisions to keep an example.
        unchanged: Number of decisions for a label that the example has already.
    """

    labels: Mapping[int, int]
    dropped: frozenset[int]
    kept: int = 0
    unchanged: int = 0


@dataclass(frozen=True, eq=False)
class LabelledFile:
    """A data file, or a folder of images, as far as corrections need it.

    Attributes:
        path: The file or folder.
        count: Number of examples.
        labels: Labels [N], or None if there are none.
        class_names: Names of the classes 0 ... K-1, or None.
        names: Names of the examples, or None.
        write: Writes the corrected data to a path, atomically. For a folder it writes a list of moves, and returns the
            moves, which are not carried out yet.
    """

    path: str
    count: int
    labels: NDArray[np.int64] | None
    class_names: Sequence[str] | None
    names: Sequence[str] | None
    write: Callable[[Corrections, str], Sequence[Move]]


def corrected_labels(labels: NDArray[np.int64], corrections: Corrections) -> NDArray[np.int64]:
    """Return the labels of the examples that are left, in the order of the data."""
    result = labels.copy()
    for index, label in corrections.labels.items():
        result[index] = label
    return result[kept_rows(len(labels), corrections)]


def kept_rows(count: int, corrections: Corrections) -> NDArray[np.bool_]:
    """Return whether each of the examples is left, [N]."""
    kept = np.ones(count, np.bool_)
    kept[list(corrections.dropped)] = False
    return kept
