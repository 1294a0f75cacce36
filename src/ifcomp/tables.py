"""Results with a table: a one-line answer, HTML for notebooks, and files."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Mapping
from typing import Any, Protocol

import pandas as pd
from pandas.api.types import is_numeric_dtype

from ifcomp.io.delimited import escape_cell
from ifcomp.io.files import atomic_write
from ifcomp.optional import requires_package

#: Largest number of rows that notebooks show.
SHOWN_ROWS = 10


class _HasTable(Protocol):
    """Members that a class with `TableResult` defines."""

    @property
    def frame(self) -> pd.DataFrame: ...
    @property
    def answer(self) -> str: ...
    @property
    def headline(self) -> str: ...
    @property
    def shown(self) -> pd.DataFrame: ...


class TableResult:
    """Representation and export of a result that has a ``frame`` and an ``answer``, a line of text."""

    @property
    def headline(self: _HasTable) -> str:
        """Text above the table in notebooks."""
        return self.answer

    @property
    def shown(self: _HasTable) -> pd.DataFrame:
        """Rows that notebooks show, the most important first."""
        return self.frame

    def to_csv(self: _HasTable, path: str | os.PathLike[str]) -> None:
        """Write the rows of `frame` to a CSV file, atomically."""
        write_csv(path, self.frame)

    def __repr__(self: _HasTable) -> str:
        return f"{type(self).__name__}({self.answer})"

    def _repr_html_(self: _HasTable) -> str:
        rows = self.shown
        table = rows.head(SHOWN_ROWS).to_html(index=False, float_format=lambda value: f"{value:.4g}", border=0)
        more = f"<p>{len(rows) - SHOWN_ROWS:,} more rows</p>" if len(rows) > SHOWN_ROWS else ""
        return f"<p>{html.escape(self.headline)}</p>{table}{more}"


def write_parquet(
    path: str | os.PathLike[str], frame: pd.DataFrame, descriptions: Mapping[str, str], settings: Mapping[str, Any]
) -> None:
    """Write a frame to a Parquet file, atomically.

    Args:
        path: The file.
        frame: The table.
        descriptions: Description of every column, stored in the metadata of its field.
        settings: Stored as JSON under ``ifcomp`` in the metadata of the file.

    Raises:
        MissingPackageError: If pyarrow is not installed.
    """
    with requires_package("pyarrow", "parquet"):
        import pyarrow as pa
        import pyarrow.parquet as pq

    table = pa.Table.from_pandas(frame, preserve_index=False)
    fields = [field.with_metadata({"description": descriptions[field.name]}) for field in table.schema]
    metadata = {**(table.schema.metadata or {}), b"ifcomp": json.dumps(dict(settings)).encode()}
    with atomic_write(path) as scratch:
        pq.write_table(table.cast(pa.schema(fields, metadata)), scratch)


def write_csv(path: str | os.PathLike[str], frame: pd.DataFrame) -> None:
    """Write a frame to a CSV file, atomically.

    Texts are escaped by `escape_cell`, so that spreadsheets run none of them, and every row is one line.
    """
    texts = {name: frame[name].map(_escape) for name in frame.columns if not is_numeric_dtype(frame[name])}
    with atomic_write(path) as scratch:
        frame.assign(**texts).rename(columns=_escape).to_csv(scratch, index=False)


def _escape(value: Any) -> Any:
    return escape_cell(value) if isinstance(value, str) else value
