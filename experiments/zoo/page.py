"""The page of the zoo: a summary, and one row per architecture."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median

from experiments.zoo.examine import CUT_TOLERANCE, TOLERANCE, Result
from ifcomp.io.files import atomic_write

PAGE = Path(__file__).parents[2] / "docs" / "zoo.md"

_INTRODUCTION = """\
# Tested architectures

Does ifcomp work with your network? These are small versions of public architectures with random weights; your network
has the same kinds of layers. {summary}

{counts}

*Exact* means that influence and second moments are equal to dense autograd gradients of single examples, with a
relative error of at most {tolerance:.0e}, and do not depend on batches and padding. *EKFAC* is the share of the
trainable parameters with Kronecker-factored blocks; the others have diagonal blocks.

??? note "How it is measured"

    Each network has three classes, is fitted on 12 examples and scored on 8, in float64. Influence and second moments
    are compared with dense gradients. Influence is also compared with that in batches of 1 and 3, after a fit with
    other batches and, for models of tokens, with other padding. *Error* is the largest relative difference of these
    comparisons, except the fit with other batches. The limit of that one is {cut_tolerance:.0e}, because eigenvectors
    of equal eigenvalues are arbitrary. Casts to float32 inside the models are disabled, because their rounding errors
    would hide errors of the library. `make zoo` repeats the measurement.

"""

_HEADINGS = ("architecture", "trainable parameters", "EKFAC", "error")


def write_page(results: Mapping[str, Result], path: Path = PAGE) -> None:
    """Write a summary, the results that are not exact, and one table per package."""
    verdicts = Counter(result.verdict for result in results.values())
    listed = ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items()))
    by_source: dict[str, list[Result]] = {}
    for _, result in sorted(results.items(), key=lambda item: item[0].lower()):
        by_source.setdefault(result.source, []).append(result)
    text = _INTRODUCTION.format(
        tolerance=TOLERANCE,
        cut_tolerance=CUT_TOLERANCE,
        summary=f"{len(results)} architectures were tested: {listed}.",
        counts=_table(("package", "architectures", "exact", "EKFAC, median"), map(_summary_row, by_source.items())),
    )
    others = [result for result in results.values() if result.verdict != "exact"]
    if others:
        rows = [(result.name, result.source, _verdict(result)) for result in others]
        text += "Not exact:\n\n" + _table(("architecture", "package", "verdict"), rows) + "\n\n"
    for source, architectures in by_source.items():
        table = _table(_HEADINGS, map(_row, architectures))
        text += f'??? note "{source}: {len(architectures)} architectures"\n\n{textwrap.indent(table, "    ")}\n\n'
    with atomic_write(path) as scratch:
        scratch.write_text(text.rstrip("\n") + "\n")


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table with one column of text, and numbers beside it."""
    lines = [headings, ("---", *["--:"] * (len(headings) - 1)), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _summary_row(item: tuple[str, Sequence[Result]]) -> Sequence[str]:
    source, architectures = item
    exact = [result for result in architectures if result.verdict == "exact"]
    shares = [100 * result.ekfac for result in exact]
    return source, str(len(architectures)), str(len(exact)), f"{median(shares):.0f} %" if shares else "-"


def _row(result: Result) -> Sequence[str]:
    if not result.errors:
        return result.name, f"{result.trainable:,}", "-", "-"
    return result.name, f"{result.trainable:,}", f"{100 * result.ekfac:.1f} %", f"{result.error:.0e}"


def _verdict(result: Result) -> str:
    if not result.message:
        return result.verdict
    first = result.message.splitlines()[0].replace("|", "/")
    return f"{result.verdict}: {first[:160]}"
