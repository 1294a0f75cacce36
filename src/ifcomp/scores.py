"""`ScoreTable`: one row per example, and the meaning, direction and unit of every column."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ifcomp.errors import DataError
from ifcomp.tables import TableResult, write_parquet

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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


@dataclass(frozen=True, eq=False, repr=False)
class ScoreTable(TableResult):
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

    def plot(self) -> Figure:
        """Draw the distribution of complexity over the examples: stochastic with labels, else parametric."""
        from matplotlib.figure import Figure

        values = self.column(self._main_column)
        figure = Figure(figsize=(6, 3), layout="constrained")
        axis = figure.subplots()
        axis.hist(values[np.isfinite(values)], bins=50)
        axis.set_xlabel(f"{self._main_column.replace('_', ' ')}, nats; larger = more surprising")
        axis.set_ylabel("examples")
        return figure

    @property
    def answer(self) -> str:
        """Number of examples and quantiles of their complexity."""
        values = self.column(self._main_column)
        median, high = np.quantile(values, [0.5, 0.95]) if len(self) else (np.nan, np.nan)
        name = self._main_column.replace("_", " ")
        return f"{len(self):,} examples, {name} {median:.3g} nats in the median, {high:.3g} at 95 %"

    @property
    def _main_column(self) -> str:
        return "stochastic_complexity" if "stochastic_complexity" in self.frame.columns else "parametric_complexity"

    def __str__(self) -> str:
        legend = f"[{len(self)} examples; larger = more surprising; codelengths in nats]"
        return f"{self.frame.to_string(max_rows=12)}\n{legend}"
