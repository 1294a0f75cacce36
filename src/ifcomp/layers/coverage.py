"""Coverage: how each parameter of a model is treated."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd

from ifcomp.tables import TableResult


@dataclass(frozen=True)
class CoverageRow:
    """One row of the coverage table: a block, or parameters outside of all blocks."""

    name: str
    kind: str
    treatment: str
    parameters: int
    covered: bool


@dataclass(frozen=True, repr=False)
class Coverage(TableResult):
    """Treatment of the parameters, per layer and in total. ``print`` shows a table."""

    rows: tuple[CoverageRow, ...]

    @property
    def total(self) -> int:
        """All parameters of the model, frozen ones included."""
        return sum(row.parameters for row in self.rows)

    @property
    def covered(self) -> int:
        """Parameters in a block."""
        return sum(row.parameters for row in self.rows if row.covered)

    @property
    def fraction(self) -> float:
        """Covered parameters over all parameters."""
        return self.covered / self.total if self.total else 0.0

    @property
    def frame(self) -> pd.DataFrame:
        """One row per block, and per group of parameters outside of all blocks."""
        names = list(CoverageRow.__dataclass_fields__)
        return pd.DataFrame([asdict(row) for row in self.rows], columns=names)

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that the coverage depends on."""
        return {}

    @property
    def answer(self) -> str:
        """Covered share of the parameters."""
        return f"{self.covered:,} of {self.total:,} parameters covered, {self.percent}"

    def __str__(self) -> str:
        table = [("layer", "kind", "treatment", "parameters")]
        table += [(row.name, row.kind, row.treatment, f"{row.parameters:,}") for row in self.rows]
        widths = [max(len(line[column]) for line in table) for column in range(4)]
        lines = [
            "  ".join(text.ljust(width) for text, width in zip(line[:3], widths, strict=False))
            + "  "
            + line[3].rjust(widths[3])
            for line in table
        ]
        rule = "-" * max(map(len, lines))
        total = f"covered: {self.covered:,} of {self.total:,} parameters ({100 * self.fraction:.1f} %)"
        return "\n".join([lines[0], rule, *lines[1:], rule, total])

    @property
    def percent(self) -> str:
        """Covered share in percent with up to one decimal, rounded down: 100 only if every parameter is covered."""
        return f"{math.floor(1000 * self.fraction) / 10:g} %"
