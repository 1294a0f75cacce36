"""``parquet:FILE``: a table with one row per example and its features in numeric columns or in one list column."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ifcomp.data.sources.arrays import source_from_arrays
from ifcomp.data.sources.base import Source, SourceRequest, explain_errors
from ifcomp.data.sources.columns import choose_columns, number_classes, quote
from ifcomp.errors import DataError, EmptyDataError, LabelError
from ifcomp.io.untrusted import check_decompressed_size, regular_file
from ifcomp.optional import requires_package

with requires_package("pyarrow", "parquet"):
    import pyarrow as pa
    import pyarrow.parquet as pq

#: Bytes per value, for the size check before a table is read.
_BYTES_PER_VALUE = 8

#: Largest number of rows that are read between two size checks, and of their bytes, judged by the first row.
_ROWS_PER_READ, _LISTS_PER_READ, _BYTES_PER_READ = 4096, 64, 2**24


def explain_parquet_errors(path: str) -> AbstractContextManager[None]:
    """Raise DataError for errors of reading a Parquet file. PyArrow raises errors of many types for damaged files."""
    return explain_errors(path, "a Parquet file", (Exception,))


def open_parquet(request: SourceRequest) -> Source:
    """Open the rows of a Parquet file.

    Features are numeric columns, as float32 [N, F], or one column of lists of equal length. Their order is that of the
    requested feature columns, else that of the file. Integers in lists become int64. Labels are integers or strings;
    the classes of strings are the known class names, or the sorted distinct values.

    Raises:
        DataError: If columns are missing, not numeric, or have empty cells.
    """
    path = request.path
    with explain_parquet_errors(path):
        label_column, feature_columns = _choose_columns(pq.read_schema(regular_file(path)), request)
        label_columns = [] if label_column is None else [label_column]
        with pq.ParquetFile(path, read_dictionary=label_columns) as file:  # keeps repeated strings once
            table = read_columns(file, path, list(dict.fromkeys([*label_columns, *feature_columns])))
        y, class_names = None, None
        if label_column is not None:
            y, class_names = read_labels(table, path, label_column, request.class_names)
        x, value_names = _read_features(table, path, feature_columns)
    source = source_from_arrays(request.spec, x, y, request.options, class_names, value_names)
    return replace(source, feature_columns=feature_columns)


def _choose_columns(schema: pa.Schema, request: SourceRequest) -> tuple[str | None, tuple[str, ...]]:
    """Return the label column, if any, and the feature columns, after a check of names and types."""
    path = request.path
    label, features = choose_columns(schema.names, request)
    if label is not None:
        check_label_type(schema, label, path)
    other = [name for name in features if not _is_numeric(schema.field(name).type)]
    if other and not (len(features) == 1 and _is_list(schema.field(other[0]).type)):
        raise DataError(
            f"Column {quote(other)} of '{path}' is not numeric. Name the features with --feature-columns: "
            "numeric columns, or one column of lists."
        )
    return label, features


def check_label_type(schema: pa.Schema, label: str, path: str) -> None:
    """Raise LabelError if labels are neither numeric nor strings. Fractions are refused when they are read."""
    dtype = schema.field(label).type
    if not (_is_label(dtype) or _is_numeric(dtype)):
        raise _label_type_error(label, path, dtype)


def _label_type_error(name: str, path: str, dtype: pa.DataType) -> LabelError:
    return LabelError(f"Labels must be integers or strings, but column '{name}' of '{path}' is {dtype}.")


def read_columns(file: pq.ParquetFile, path: str, names: list[str]) -> pa.Table:
    """Read columns that have no empty cells."""
    rows = file.metadata.num_rows
    if rows < 1:
        raise EmptyDataError(f"'{path}' has no rows.")
    check_decompressed_size(path, rows * len(names) * _BYTES_PER_VALUE)
    table = pa.Table.from_batches(read_chunks(file, path, names)).select(names).unify_dictionaries()
    empty = [name for name in names if table.column(name).null_count]
    if empty:
        raise DataError(f"Column {quote(empty)} of '{path}' has empty cells. Fill them, or leave these rows out.")
    return table


def read_chunks(file: pq.ParquetFile, path: str, names: list[str] | None = None) -> Iterator[pa.RecordBatch]:
    """Read columns in chunks, and check after each chunk that the whole table fits in memory. None reads all columns.

    The metadata of the columns is not used: pyarrow aborts the process if it is damaged.
    """
    rows, rows_read, bytes_read = file.metadata.num_rows, 0, 0
    for chunk in file.iter_batches(_rows_per_read(file, names), columns=names):
        rows_read, bytes_read = rows_read + chunk.num_rows, bytes_read + chunk.nbytes
        check_decompressed_size(path, bytes_read * max(rows, rows_read) // max(1, rows_read))
        yield chunk


def _rows_per_read(file: pq.ParquetFile, names: list[str] | None) -> int:
    """Return the rows of a chunk. The first row is read alone if rows may be long."""
    chosen = None if names is None else set(names)
    types = [field.type for field in file.schema_arrow if chosen is None or field.name in chosen]
    if all(_is_numeric(kind) or pa.types.is_dictionary(kind) for kind in types):  # a dictionary has each text once
        return _ROWS_PER_READ
    first = next(file.iter_batches(1, columns=names), None)
    largest = _LISTS_PER_READ if any(map(_is_list, types)) else _ROWS_PER_READ
    return max(1, min(largest, _BYTES_PER_READ // max(1, 0 if first is None else first.nbytes)))


def read_labels(
    table: pa.Table, path: str, name: str, known_classes: tuple[str, ...] | None
) -> tuple[NDArray[np.int64], tuple[str, ...] | None]:
    """Return labels [N] and class names, if known."""
    column = table.column(name).combine_chunks()
    if pa.types.is_dictionary(column.type) and pa.types.is_integer(column.type.value_type):
        column = column.cast(column.type.value_type)
    if pa.types.is_integer(column.type):
        return column.to_numpy(zero_copy_only=False).astype(np.int64), known_classes
    if not _is_label(column.type):
        raise _label_type_error(name, path, column.type)
    encoded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    codes, values = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64), encoded.dictionary.to_pylist()
    present = {values[code] for code in np.unique(codes)}
    numbers = number_classes(present, known_classes, name, path)
    return np.array([numbers.get(value, -1) for value in values], np.int64)[codes], tuple(numbers)


def _read_features(table: pa.Table, path: str, names: Sequence[str]) -> tuple[NDArray[Any], tuple[str, ...]]:
    """Return inputs [N, F] and the names of the F values, if they have names."""
    columns = [table.column(name).combine_chunks() for name in names]
    if len(names) == 1 and _is_list(columns[0].type):
        return _list_values(columns[0], path, names[0]), ()
    values = [column.cast(pa.float32(), safe=False).to_numpy(zero_copy_only=False) for column in columns]
    return np.stack(values, axis=1), tuple(names)


def _list_values(column: pa.Array, path: str, name: str) -> NDArray[Any]:
    """Return the values [N, F] of a column of lists."""
    lengths = column.value_lengths().to_numpy(zero_copy_only=False)
    if (lengths != lengths[0]).any():
        raise DataError(
            f"The lists in column '{name}' of '{path}' have {lengths.min()} to {lengths.max()} values, but must have "
            "equal length. Pad them."
        )
    values = column.flatten()
    if not _is_numeric(values.type) or values.null_count:
        raise DataError(f"The lists in column '{name}' of '{path}' must contain numbers only, without empty cells.")
    dtype = np.int64 if pa.types.is_integer(values.type) else np.float32
    array: NDArray[Any] = values.to_numpy(zero_copy_only=False).astype(dtype)
    return array.reshape(len(column), -1)


def _is_numeric(dtype: pa.DataType) -> bool:
    return bool(pa.types.is_integer(dtype) or pa.types.is_floating(dtype) or pa.types.is_boolean(dtype))


def _is_label(dtype: pa.DataType) -> bool:
    dtype = dtype.value_type if pa.types.is_dictionary(dtype) else dtype
    return bool(pa.types.is_integer(dtype) or pa.types.is_string(dtype) or pa.types.is_large_string(dtype))


def _is_list(dtype: pa.DataType) -> bool:
    return bool(pa.types.is_list(dtype) or pa.types.is_large_list(dtype) or pa.types.is_fixed_size_list(dtype))
