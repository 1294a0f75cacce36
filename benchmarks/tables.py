"""Tables of a suite from its raw results, for the terminal and as Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table
from rich.text import Text

from benchmarks.record import Run
from benchmarks.suite import Column, Section

_STYLES = {True: "green", False: "red", None: ""}


@dataclass(frozen=True)
class Cell:
    """A figure as it is written, and whether it is what it should be; None without a goal."""

    words: str
    met: bool | None = None


def cell(column: Column, run: Run) -> Cell:
    """The figure of a column for a subject, with its goal."""
    value = column.value(run.measured)
    words = f"{value:{column.form}}"
    if column.goal is None or (met := column.goal.met(run.subject, value)) is None:
        return Cell(words)
    bound = f"{column.goal.of(run.subject):{column.form}}"
    return Cell(f"{words} ({column.goal.sign} {bound}: {'met' if met else 'missed'})", met)


def rows(section: Section, runs: Sequence[Run], threads: int) -> list[list[Cell]]:
    """The cells of a section, the subject first; subjects that were not measured are left out."""
    found = {run.subject: run for run in runs if run.threads == threads}
    shown = [found[subject] for subject in section.subjects if subject in found]
    return [[Cell(run.subject), *(cell(column, run) for column in section.columns)] for run in shown]


def headings(section: Section, threads: int) -> tuple[str, list[str]]:
    """The title of a table, and of its columns."""
    return f"{section.title}; threads: {threads}", ["", *(column.heading for column in section.columns)]


def terminal_table(section: Section, runs: Sequence[Run], threads: int) -> Table:
    """For the terminal."""
    title, names = headings(section, threads)
    made = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for name in names:
        made.add_column(name, justify="right" if name else "left")
    for row in rows(section, runs, threads):
        made.add_row(*(Text(own.words, _STYLES[own.met]) for own in row))
    return made


def markdown_table(section: Section, runs: Sequence[Run], threads: int) -> str:
    """The same as Markdown, with a line above that says what it shows; empty without rows."""
    title, names = headings(section, threads)
    found = rows(section, runs, threads)
    if not found:
        return ""
    lines = [f"| {' | '.join(line)} |" for line in (names, *([own.words for own in row] for row in found))]
    return "\n".join([f"{title}:", "", lines[0], "|---|" + "---:|" * (len(names) - 1), *lines[1:], ""])
