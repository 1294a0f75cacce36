"""Tables in Parquet files: a row an example, numbers in columns or in one list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ifcomp.errors import DataError, EmptyDataError, LabelError
from ifcomp.sources.arrays import of_arrays
from ifcomp.sources.source import Source, SourceOptions

DEFAULT_LABEL_COLUMN = "label"


def parquet(spec: str, path: str, options: SourceOptions, class_names: Sequence[str] | None = None) -> Source:
    """Rows of a Parquet file.

    Features are one column of number lists of equal length, or all other columns, in the order of the file, as
    float32 [N, F]. Lists of whole numbers stay whole. Labels are whole numbers, or strings, whose sorted distinct
    values are the classes.

    Args:
        spec: What was typed.
        path: The file.
        options: Which columns.
        class_names: Names of the classes 0 ... K-1 where they are known.

    Raises:
        DataError: If columns are missing, empty in places, or not numbers; the message lists them.
    """
    try:
        table = pq.ParquetFile(path).read()
    except FileNotFoundError as error:
        raise DataError(f"There is no file '{path}'.") from error
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"Cannot read '{path}' as a Parquet file ({error}).") from error
    if not table.num_rows:
        raise EmptyDataError(f"'{path}' has no rows.")
    label_column = _label_column(table, path, options)
    features = options.feature_columns or tuple(name for name in table.column_names if name != label_column)
    _check_columns(table, path, features)
    y, names = (None, None) if label_column is None else _labels(table, path, label_column, class_names)
    x, columns = _features(table, path, features)
    return of_arrays(spec, x, y, options, names, columns)


def _label_column(table: pa.Table, path: str, options: SourceOptions) -> str | None:
    if options.label_column is None:
        return DEFAULT_LABEL_COLUMN if DEFAULT_LABEL_COLUMN in table.column_names else None
    _check_columns(table, path, (options.label_column,))
    return options.label_column


def _check_columns(table: pa.Table, path: str, names: Sequence[str]) -> None:
    missing = [name for name in names if name not in table.column_names]
    if missing:
        raise DataError(f"'{path}' has no column {_listed(missing)}. Its columns are {_listed(table.column_names)}.")
    empty = [name for name in names if table.column(name).null_count]
    if empty:
        raise DataError(f"Column {_listed(empty)} of '{path}' has empty cells. Fill them, or leave these rows out.")


def _labels(
    table: pa.Table, path: str, name: str, class_names: Sequence[str] | None
) -> tuple[NDArray[np.int64], tuple[str, ...] | None]:
    _check_columns(table, path, (name,))
    column = table.column(name).combine_chunks()
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_integer(column.type):
        return column.to_numpy(zero_copy_only=False).astype(np.int64), tuple(class_names) if class_names else None
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        raise LabelError(f"Labels must be whole numbers or strings, but column '{name}' of '{path}' is {column.type}.")
    values = column.to_pylist()
    names = tuple(class_names or sorted(set(values)))
    unknown = sorted(set(values) - set(names))
    if unknown:
        raise LabelError(
            f"Column '{name}' of '{path}' has labels that are no classes of the fit: {_listed(unknown)}. "
            f"Its classes are {_listed(names)}."
        )
    numbers = {label: number for number, label in enumerate(names)}
    return np.array([numbers[value] for value in values], np.int64), names


def _features(table: pa.Table, path: str, names: Sequence[str]) -> tuple[NDArray[Any], tuple[str, ...]]:
    """Inputs [N, F], and the names of the F values where they have any."""
    if not names:
        raise DataError(f"'{path}' has no column with features. Its columns are {_listed(table.column_names)}.")
    columns = [table.column(name).combine_chunks() for name in names]
    if len(names) == 1 and _is_list(columns[0].type):
        return _list_values(columns[0], path, names[0]), ()
    wrong = [name for name, column in zip(names, columns, strict=True) if not _is_number(column.type)]
    if wrong:
        raise DataError(
            f"Column {_listed(wrong)} of '{path}' is not numeric. Name the features with --feature-columns: "
            "numeric columns, or one column of lists."
        )
    values = [column.cast(pa.float32(), safe=False).to_numpy(zero_copy_only=False) for column in columns]
    return np.stack(values, axis=1), tuple(names)


def _list_values(column: pa.Array, path: str, name: str) -> NDArray[Any]:
    lengths = column.value_lengths().to_numpy(zero_copy_only=False)
    if (lengths != lengths[0]).any():
        raise DataError(
            f"The lists in column '{name}' of '{path}' have {lengths.min()} to {lengths.max()} values, but must all be "
            "of one length. Pad them."
        )
    values = column.flatten()
    if not _is_number(values.type) or values.null_count:
        raise DataError(f"The lists in column '{name}' of '{path}' must hold numbers in all places.")
    whole = pa.types.is_integer(values.type)
    numbers: NDArray[Any] = values.to_numpy(zero_copy_only=False).astype(np.int64 if whole else np.float32)
    return numbers.reshape(len(column), -1)


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
