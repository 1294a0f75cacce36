"""Coverage: how each parameter of a model is treated."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CoverageRow:
    """One row of the coverage table: a block, or parameters outside of all blocks."""

    name: str
    kind: str
    treatment: str
    parameters: int
    covered: bool


@dataclass(frozen=True)
class Coverage:
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
