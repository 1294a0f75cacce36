"""Corrections of ``parquet:FILE``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ifcomp.data.corrections.base import Corrections, LabelledFile, kept_rows
from ifcomp.data.sources.base import SourceRequest
from ifcomp.data.sources.columns import choose_label
from ifcomp.data.sources.parquet import check_label_type, explain_parquet_errors, read_chunks, read_columns, read_labels
from ifcomp.errors import EmptyDataError
from ifcomp.io.files import atomic_write
from ifcomp.io.untrusted import check_decompressed_size, regular_file
from ifcomp.optional import requires_package

with requires_package("pyarrow", "parquet"):
    import pyarrow as pa
    import pyarrow.parquet as pq

#: Bytes that are collected before they are written as one row group.
_GROUP_BYTES = 2**26

#: Bytes per row that corrections take in memory, for the size check before a table is read.
_BYTES_PER_ROW = 16


def open_parquet_labels(request: SourceRequest) -> LabelledFile:
    """Open the labels of a Parquet file. The corrected file has the same schema and metadata."""
    path, labels, class_names = request.path, None, request.class_names
    with explain_parquet_errors(path):
        schema = pq.read_schema(regular_file(path))
        label_column = choose_label(schema.names, request)
        if label_column is not None:
            check_label_type(schema, label_column, path)
        with pq.ParquetFile(path, read_dictionary=[] if label_column is None else [label_column]) as file:
            count = file.metadata.num_rows
            if count < 1:
                raise EmptyDataError(f"'{path}' has no rows.")
            check_decompressed_size(path, count * _BYTES_PER_ROW)
            if label_column is not None:
                table = read_columns(file, path, [label_column])
                labels, class_names = read_labels(table, path, label_column, request.class_names)

    def write(corrections: Corrections, out: str) -> tuple[()]:
        with explain_parquet_errors(path), atomic_write(out) as scratch, pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            with pq.ParquetWriter(scratch, schema) as writer:
                for group in _groups(_corrected(file, path, label_column, class_names, corrections)):
                    writer.write_table(pa.Table.from_batches(group, schema))
        return ()

    return LabelledFile(path, count, labels, class_names, None, write)


def _corrected(
    file: pq.ParquetFile,
    path: str,
    label_column: str | None,
    class_names: tuple[str, ...] | None,
    corrections: Corrections,
) -> Iterator[pa.RecordBatch]:
    """Yield all rows that are left, with their new labels."""
    rows, start = file.metadata.num_rows, 0
    kept, labels = kept_rows(rows, corrections), np.full(rows, -1, np.int64)
    labels[list(corrections.labels)] = list(corrections.labels.values())
    for batch in read_chunks(file, path):
        stop = start + batch.num_rows
        new = labels[start:stop]
        if label_column is not None and (new >= 0).any():
            place = batch.schema.get_field_index(label_column)
            batch = batch.set_column(place, batch.schema.field(place), _relabel(batch.column(place), new, class_names))
        yield batch.filter(pa.array(kept[start:stop]))
        start = stop


def _relabel(column: pa.Array, new: NDArray[np.int64], class_names: tuple[str, ...] | None) -> pa.Array:
    """Return the label column [N] with new labels [N], where these are not negative."""
    is_dictionary = pa.types.is_dictionary(column.type)
    value_type = column.type.value_type if is_dictionary else column.type
    places = np.flatnonzero(new >= 0).tolist()
    labels: list[Any] = [int(new[place]) for place in places]
    if not pa.types.is_integer(value_type) and class_names is not None:
        labels = [class_names[label] for label in labels]
    if is_dictionary:
        return _replace_in_dictionary(column, places, labels)
    values = column.to_pylist()
    for place, label in zip(places, labels, strict=True):
        values[place] = label
    return pa.array(values, value_type)


def _replace_in_dictionary(column: pa.Array, places: list[int], labels: list[Any]) -> pa.Array:
    """Return a dictionary column with new values. The order of its categories is kept; new ones are appended."""
    kind, categories = column.type, column.dictionary.to_pylist()
    codes = {category: code for code, category in enumerate(categories)}
    for label in labels:
        if label not in codes:
            codes[label] = len(categories)
            categories.append(label)
    indices = np.array(column.indices.to_pylist())
    indices[places] = [codes[label] for label in labels]
    dictionary = pa.array(categories, kind.value_type)
    return pa.DictionaryArray.from_arrays(pa.array(indices, kind.index_type), dictionary, ordered=kind.ordered)


def _groups(batches: Iterator[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
    """Collect batches into row groups."""
    group, size = [], 0
    for batch in batches:
        group.append(batch)
        size += batch.nbytes
        if size > _GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group
