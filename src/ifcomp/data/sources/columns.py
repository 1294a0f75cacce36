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
    path, present = request.path, set(names)
    label = choose_label(names, request)
    features = request.options.feature_columns or tuple(name for name in names if name != label)
    missing = [name for name in features if name not in present]
    if missing:
        raise missing_columns(missing, names, path)
    if not features:
        raise DataError(f"'{path}' has no column with features. Its columns are {quote(names)}.")
    return label, features


def choose_label(names: Sequence[str], request: SourceRequest) -> str | None:
    """Return the label column: the requested one, else "label" if it exists, else None.

    Raises:
        DataError: If names are not unique, or the requested column is missing and labels are needed.
    """
    check_unique(names, request.path)
    label = request.options.label_column or DEFAULT_LABEL_COLUMN
    if label in names:
        return label
    if request.options.label_column is not None and request.needs_labels:
        raise missing_columns([label], names, request.path)
    return None


def check_unique(names: Sequence[str], path: str) -> None:
    """Raise DataError if two columns have the same name."""
    duplicates = [name for name, count in Counter(names).items() if count > 1]
    if duplicates:
        raise DataError(f"'{path}' has several columns with the name {quote(duplicates)}. Rename them.")


def missing_columns(missing: Sequence[str], names: Sequence[str], path: str) -> DataError:
    """Return the error for columns that a table does not have."""
    kind = "column" if len(missing) == 1 else "columns"
    return DataError(f"'{path}' has no {kind} {quote(missing)}. Its columns are {quote(names)}.")


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
            f"Column '{column}' of '{path}' has labels that are not classes of the fit: {quote(unknown)}. "
            f"Its classes are {quote(classes)}."
        )
    return {name: number for number, name in enumerate(classes)}


def quote(names: Sequence[str]) -> str:
    """Return names in quotation marks, at most `MAX_QUOTED` of them."""
    more = f" and {len(names) - MAX_QUOTED:,} more" if len(names) > MAX_QUOTED else ""
    return ", ".join(f"'{name}'" for name in names[:MAX_QUOTED]) + more
