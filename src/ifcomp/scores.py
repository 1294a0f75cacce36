"""`ScoreTable`: one row per example, and the meaning, direction and unit of every column."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pandas.api.types import is_numeric_dtype

from ifcomp.errors import DataError
from ifcomp.io.files import atomic_write
from ifcomp.optional import requires_package

#: Start of a text that spreadsheets run as a formula, also in full-width characters. Plain numbers are exempt.
_FORMULA = re.compile(r"\s*[=+\-@\uff1d\uff0b\uff0d\uff20]|[\t\r\n]")
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?")

#: Meaning of each column. Larger is always more surprising, more suspicious; codelengths are in nats.
DESCRIPTIONS: dict[str, str] = {
    "index": "position of the example in the data",
    "prediction": "the model's class (argmax)",
    "confidence": "probability of that class at inverse temperature beta",
    "expected_influence": "E[IF], expected Boltzmann influence over the model's own labels; larger = more surprising",
    "expected_influence_error": "standard error of E[IF] where it is estimated from two or more probes; 0 = exact",
    "parametric_complexity": "log(1 + alpha/n E[IF]) in nats, with capped=True at most log K; larger = more surprising",
    "bounded_complexity": "parametric complexity with hindsight probabilities below 1 (from 0 to log K) in nats; "
    "larger = more surprising",
    "label": "the given label",
    "label_probability": "probability of the given label at inverse temperature beta",
    "suggested_label": "the most probable class other than the given label",
    "suggested_probability": "probability of the suggested label at inverse temperature beta",
    "error": "-log p of the given label at inverse temperature beta in nats, the plain loss; larger = more surprising",
    "influence": "IF of the given label; larger = more surprising",
    "regret": "log(1 + alpha/n IF) of the given label in nats; larger = more surprising",
    "stochastic_complexity": "error + parametric complexity in nats; larger = more suspicious label",
    "label_complexity": "stochastic complexity of the given label where the suggested one is the only other choice "
    "(-log pNML over the two) in nats; 0.69 = both alike; larger = more suspicious label",
}


@dataclass(frozen=True)
class ScoreTable:
    """Scores of a data set.

    Attributes:
        frame: One row per example, in the order of the data.
        settings: Settings of the scores, such as alpha, beta and damping.
    """

    frame: pd.DataFrame
    settings: Mapping[str, Any]

    def __len__(self) -> int:
        return len(self.frame)

    @property
    def descriptions(self) -> dict[str, str]:
        """Meaning, direction and unit of every column by name."""
        return {str(name): DESCRIPTIONS[str(name)] for name in self.frame.columns}

    def column(self, name: str) -> NDArray[Any]:
        """Return the values [N] of one column.

        Raises:
            DataError: If the table has no such column.
        """
        if name not in self.frame.columns:
            probed = name == "bounded_complexity" or "label" in self.frame.columns
            remedy = "Score without probes." if probed else "Score data with labels, (x, y)."
            raise DataError(f"The table has no column '{name}', only {', '.join(self.frame.columns)}. {remedy}")
        return np.asarray(self.frame[name])

    def to_parquet(self, path: str | os.PathLike[str]) -> None:
        """Write all rows to a Parquet file, atomically. Its metadata contain settings and column descriptions.

        Raises:
            MissingPackageError: If pyarrow is not installed.
        """
        write_parquet(path, self.frame, self.descriptions, self.settings)

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write all rows to a CSV file, atomically."""
        write_csv(path, self.frame)

    def __str__(self) -> str:
        legend = f"[{len(self)} examples; larger = more surprising; codelengths in nats]"
        return f"{self.frame.to_string(max_rows=12)}\n{legend}"


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

    Texts that start like a formula get a leading apostrophe, so that spreadsheets do not run them.
    """
    texts = {name: frame[name].map(_escape_formula) for name in frame.columns if not is_numeric_dtype(frame[name])}
    with atomic_write(path) as scratch:
        frame.assign(**texts).to_csv(scratch, index=False)


def _escape_formula(value: Any) -> Any:
    is_formula = isinstance(value, str) and _FORMULA.match(value) and not _NUMBER.fullmatch(value)
    return f"'{value}" if is_formula else value
