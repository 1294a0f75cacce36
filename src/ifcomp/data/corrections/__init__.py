"""Corrections of labelled data: decisions about examples are checked and carried out.

Each kind of data is one file with one function, which takes a `SourceRequest` and returns a `LabelledFile`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ifcomp.data.corrections.base import Corrections, LabelledFile
from ifcomp.data.corrections.csv import open_csv_labels
from ifcomp.data.corrections.decisions import Decision, read_decisions
from ifcomp.data.corrections.moves import Move, carry_out
from ifcomp.data.corrections.npz import open_npz_labels
from ifcomp.data.corrections.resolution import resolve_decisions
from ifcomp.data.sources import SourceOptions, source_kind
from ifcomp.data.sources.base import SourceRequest
from ifcomp.errors import SettingError

__all__ = [
    "CorrectionKind",
    "Corrections",
    "Decision",
    "LabelledFile",
    "Move",
    "carry_out",
    "correction_kind",
    "open_labels",
    "read_decisions",
    "resolve_decisions",
]


@dataclass(frozen=True)
class CorrectionKind:
    """A kind of data that can be corrected.

    Attributes:
        suffix: End of the name of the file that is written.
        open: Opens the labels of data of this kind.
        is_table: Whether the data has a label column.
        is_folder: Whether corrections are moves of files.
    """

    suffix: str
    open: Callable[[SourceRequest], LabelledFile]
    is_table: bool = False
    is_folder: bool = False


def _open_parquet(request: SourceRequest) -> LabelledFile:
    """Open a Parquet file. pyarrow is optional, so it is imported only when it is needed."""
    from ifcomp.data.corrections.parquet import open_parquet_labels

    return open_parquet_labels(request)


def _open_folder(request: SourceRequest) -> LabelledFile:
    """Open a folder of images. Pillow is imported only when it is needed."""
    from ifcomp.data.corrections.folder import open_folder_labels

    return open_folder_labels(request)


#: Kinds of data by the part of their names before the colon.
KINDS: dict[str, CorrectionKind] = {
    "npz": CorrectionKind(".npz", open_npz_labels),
    "parquet": CorrectionKind(".parquet", _open_parquet, is_table=True),
    "csv": CorrectionKind(".csv", open_csv_labels, is_table=True),
    "folder": CorrectionKind(".csv", _open_folder, is_folder=True),
}


def correction_kind(spec: str) -> CorrectionKind:
    """Return the kind of data that a name stands for.

    Raises:
        SettingError: If the name has none of the forms, or data of this kind has no file that can be corrected.
    """
    source_kind(spec)
    kind = KINDS.get(spec.partition(":")[0])
    if kind is None or ":" not in spec:
        raise SettingError(
            f"Only npz:FILE, parquet:FILE, csv:FILE and folder:DIR can be corrected, but the data is '{spec}'. Correct "
            "other data in its own code: the decisions have the index of each example."
        )
    return kind


def open_labels(
    spec: str, *, label_column: str | None = None, class_names: Sequence[str] | None = None
) -> LabelledFile:
    """Open the labels of data by its name. Features are not checked.

    Args:
        spec: ``npz:FILE``, ``parquet:FILE``, ``csv:FILE`` or ``folder:DIR``.
        label_column: Label column of a table; by default "label", if it exists.
        class_names: Names of the classes 0 ... K-1, if the data does not contain them.

    Raises:
        SettingError: If the data cannot be corrected, or has no columns.
        DataError: If the data cannot be read.
    """
    kind = correction_kind(spec)
    if label_column is not None and not kind.is_table:
        raise SettingError(f"--label-column does not apply to the data '{spec}'.")
    path = os.path.expanduser(spec.partition(":")[2])
    names = tuple(class_names) if class_names else None
    return kind.open(SourceRequest(spec, path, SourceOptions(label_column=label_column), names, needs_labels=True))
