"""The page of the zoo: one row per architecture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from experiments.zoo.examine import CUT_TOLERANCE, TOLERANCE, Result
from ifcomp.io.files import atomic_write

PAGE = Path(__file__).parents[2] / "docs" / "zoo.md"

_INTRODUCTION = """\
# Tested architectures

Each row is a small version of a public architecture with random weights and three classes. It is fitted on 12 examples
and scored on 8, in float64. Influence and second moments are compared with dense autograd gradients of single examples.
Influence is also compared with that in batches of 1 and 3, after a fit with other batches and, for models of tokens,
with other padding.

- *Error* is the largest relative difference of these comparisons, except the fit with other batches. The limit of that
  one is {cut_tolerance:.0e}, because eigenvectors of equal eigenvalues are arbitrary and depend on rounding errors.
- The verdict is *exact* if the error is at most {tolerance:.0e}, and *refused* if the library raises an error that
  names the reason. *Wrong* and *crash* count as defects of the library.
- *EKFAC* is the share of the trainable parameters with Kronecker-factored blocks. The other parameters have diagonal
  blocks.
- *Units* are the time of scoring every label divided by that of a forward pass, for the same batch of 8. The models are
  so small that fixed costs dominate.

Casts to float32 inside the models are disabled, because their rounding errors would hide errors of the library.
`make zoo` repeats the measurement.

{summary}

| model | source | parameters | EKFAC | error | units | verdict |
|---|---|--:|--:|--:|--:|---|
"""


def write_page(results: Mapping[str, Result], path: Path = PAGE) -> None:
    """Write the table of all results."""
    counts = Counter(result.verdict for result in results.values())
    listed = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
    summary = f"{len(results)} architectures: {listed}."
    text = _INTRODUCTION.format(tolerance=TOLERANCE, cut_tolerance=CUT_TOLERANCE, summary=summary)
    text += "".join(_row(result) for _, result in sorted(results.items(), key=lambda item: item[0].lower()))
    with atomic_write(path) as scratch:
        scratch.write_text(text)


def _row(result: Result) -> str:
    ekfac = f"{100 * result.ekfac:.1f} %" if result.errors else "-"
    error = f"{result.error:.0e}" if result.errors else "-"
    units = f"{result.times['units']:.0f}" if "units" in result.times else "-"
    cells = [result.name, result.source, f"{result.trainable:,}", ekfac, error, units, _verdict(result)]
    return f"| {' | '.join(cells)} |\n"


def _verdict(result: Result) -> str:
    if not result.message:
        return result.verdict
    first = result.message.splitlines()[0].replace("|", "/")
    return f"{result.verdict}: {first[:160]}"
