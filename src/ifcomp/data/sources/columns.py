"""Columns of tables, shared by the kinds of data with named columns: label, features and class names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ifcomp.data.sources.base import SourceRequest
from ifcomp.errors import DataError, LabelError

DEFAULT_LABEL_COLUMN = "label"

#: Largest number of names in a message.
MAX_QUOTED = 20


def choose_columns(names: Sequence[str], request: SourceRequest) -> tuple[str | None, tuple[str, ...]]:
    """Return the label column, if any, and the feature columns.

    Features are the requested columns in the requested order, by default all columns except the label.

    Raises:
        DataError: If names are not unique, or columns are missing; names them.
    """
    path, options = request.path, request.options
    check_unique(names, path)
    label = options.label_column or (DEFAULT_LABEL_COLUMN if DEFAULT_LABEL_COLUMN in names else None)
    if not request.needs_labels and label not in names:
        label = None
    features = options.feature_columns or tuple(name for name in names if name != label)
    present, needed = set(names), (*([] if label is None else [label]), *features)
    missing = [name for name in needed if name not in present]
    if missing:
        raise missing_columns(missing, names, path)
    if not features:
        raise DataError(f"'{path}' has no column with features. Its columns are {quote(names)}.")
    return label, features


def check_unique(names: Sequence[str], path: str) -> None:
    """Raise DataError if two columns have the same name."""
    duplicates = [name for name, count in Counter(names).items() if count > 1]
    if duplicates:
        raise DataError(f"'{path}' has several columns with the name {quote(duplicates)}. Rename them.")


def missing_columns(missing: Sequence[str], names: Sequence[str], path: str) -> DataError:
    """Return the error for columns that a table does not have."""
    return DataError(f"'{path}' has no column {quote(missing)}. Its columns are {quote(names)}.")


def number_classes(
    present: Iterable[str], known_classes: tuple[str, ...] | None, column: str, path: str
) -> dict[str, int]:
    """Return the number of each class by name: in the order of the known classes, or sorted.

    Raises:
        LabelError: If a label is none of the known classes.
    """
    names = set(present)
    classes = known_classes or tuple(sorted(names))
    unknown = sorted(names - set(classes))
    if unknown:
        raise LabelError(
            f"Column '{column}' of '{path}' has labels that are no classes of the fit: {quote(unknown)}. "
            f"Its classes are {quote(classes)}."
        )
    return {name: number for number, name in enumerate(classes)}


def quote(names: Sequence[str]) -> str:
    """Return names in quotation marks, at most `MAX_QUOTED` of them."""
    more = f" and {len(names) - MAX_QUOTED:,} more" if len(names) > MAX_QUOTED else ""
    return ", ".join(f"'{name}'" for name in names[:MAX_QUOTED]) + more
