"""Tables in Parquet files: a row an example, numbers in columns or in one list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ifcomp.data.arrays import of_arrays
from ifcomp.data.source import Source, SourceOptions
from ifcomp.errors import DataError, EmptyDataError, IfcompError, LabelError
from ifcomp.io.untrusted import check_swelling, regular_file

DEFAULT_LABEL_COLUMN = "label"

#: What a number takes while a table is turned into inputs.
BYTES_A_VALUE = 8

#: Rows that are read before their size is looked at.
ROWS_AT_ONCE = 4096


def parquet(
    spec: str, path: str, options: SourceOptions, class_names: Sequence[str] | None = None, labelled: bool = True
) -> Source:
    """Rows of a Parquet file.

    Features are one column of number lists of equal length, or all other columns, in the order of the file, as
    float32 [N, F]. Lists of whole numbers stay whole. Labels are whole numbers, or strings, whose sorted distinct
    values are the classes.

    Args:
        spec: What was typed.
        path: The file.
        options: Which columns.
        class_names: Names of the classes 0 ... K-1 where they are known.
        labelled: Whether the column of labels that the options name must be there.

    Raises:
        DataError: If columns are missing, empty in places, or not numbers; the message lists them.
    """
    try:
        label_column, features = _choose(pq.read_schema(regular_file(path)), path, options, labelled)
        names_of_labels = [] if label_column is None else [label_column]
        with pq.ParquetFile(path, read_dictionary=names_of_labels) as file:  # text that repeats is kept once
            table = _read(file, path, list(dict.fromkeys([*names_of_labels, *features])))
        y, names = (None, None) if label_column is None else _labels(table, path, label_column, class_names)
        x, columns = _features(table, path, features)
    except IfcompError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"There is no file '{path}'.") from error
    except Exception as error:  # a damaged file makes its reader raise nearly anything
        raise DataError(f"Cannot read '{path}' as a Parquet file ({error}).") from error
    return of_arrays(spec, x, y, options, names, columns)


def _choose(schema: pa.Schema, path: str, options: SourceOptions, labelled: bool) -> tuple[str | None, tuple[str, ...]]:
    """The column of the labels, if there is one, and those of the features, by name and type alone."""
    twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if twice:
        raise DataError(f"'{path}' has several columns of the name {_listed(twice)}. Rename them.")
    label = options.label_column or (DEFAULT_LABEL_COLUMN if DEFAULT_LABEL_COLUMN in schema.names else None)
    if not labelled and label not in schema.names:
        label = None
    features = options.feature_columns or tuple(name for name in schema.names if name != label)
    missing = [name for name in (*([] if label is None else [label]), *features) if name not in schema.names]
    if missing:
        raise DataError(f"'{path}' has no column {_listed(missing)}. Its columns are {_listed(schema.names)}.")
    if label is not None and not (_is_label(schema.field(label).type) or _is_number(schema.field(label).type)):
        raise _wrong_labels(label, path, schema.field(label).type)
    if not features:
        raise DataError(f"'{path}' has no column with features. Its columns are {_listed(schema.names)}.")
    wrong = [name for name in features if not _is_number(schema.field(name).type)]
    if wrong and not (len(features) == 1 and _is_list(schema.field(wrong[0]).type)):
        raise DataError(
            f"Column {_listed(wrong)} of '{path}' is not numeric. Name the features with --feature-columns: "
            "numeric columns, or one column of lists."
        )
    return label, features


def _wrong_labels(name: str, path: str, kind: pa.DataType) -> LabelError:
    return LabelError(f"Labels must be whole numbers or strings, but column '{name}' of '{path}' is {kind}.")


def _read(file: pq.ParquetFile, path: str, names: list[str]) -> pa.Table:
    """Some columns, once it is known that their values fit in memory, and that none is empty.

    The metadata of columns would tell how many values there are, but pyarrow ends the process if they are damaged. So a
    column of numbers is taken to have one a row, and lists are read some rows at a time, for as long as all of them are
    going to fit.
    """
    rows = file.metadata.num_rows
    if rows < 1:
        raise EmptyDataError(f"'{path}' has no rows.")
    check_swelling(path, rows * len(names) * BYTES_A_VALUE)
    batches, seen, size = [], 0, 0
    for batch in file.iter_batches(ROWS_AT_ONCE, columns=names):
        batches.append(batch)
        seen, size = seen + batch.num_rows, size + batch.nbytes
        check_swelling(path, size * max(rows, seen) // max(1, seen))
    table = pa.Table.from_batches(batches).select(names).unify_dictionaries()
    empty = [name for name in names if table.column(name).null_count]
    if empty:
        raise DataError(f"Column {_listed(empty)} of '{path}' has empty cells. Fill them, or leave these rows out.")
    return table


def _labels(
    table: pa.Table, path: str, name: str, class_names: Sequence[str] | None
) -> tuple[NDArray[np.int64], tuple[str, ...] | None]:
    column = table.column(name).combine_chunks()
    if pa.types.is_dictionary(column.type) and pa.types.is_integer(column.type.value_type):
        column = column.cast(column.type.value_type)
    if pa.types.is_integer(column.type):
        return column.to_numpy(zero_copy_only=False).astype(np.int64), tuple(class_names) if class_names else None
    if not _is_label(column.type):
        raise _wrong_labels(name, path, column.type)
    coded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    positions, values = coded.indices.to_numpy(zero_copy_only=False).astype(np.int64), coded.dictionary.to_pylist()
    used = {values[position] for position in np.unique(positions)}
    names = tuple(class_names or sorted(used))
    unknown = sorted(used - set(names))
    if unknown:
        raise LabelError(
            f"Column '{name}' of '{path}' has labels that are no classes of the fit: {_listed(unknown)}. "
            f"Its classes are {_listed(names)}."
        )
    numbers = {label: number for number, label in enumerate(names)}
    return np.array([numbers.get(value, -1) for value in values], np.int64)[positions], names


def _features(table: pa.Table, path: str, names: Sequence[str]) -> tuple[NDArray[Any], tuple[str, ...]]:
    """Inputs [N, F], and the names of the F values where they have any."""
    columns = [table.column(name).combine_chunks() for name in names]
    if len(names) == 1 and _is_list(columns[0].type):
        return _list_values(columns[0], path, names[0]), ()
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


def _is_label(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
