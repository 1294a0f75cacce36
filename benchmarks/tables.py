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
    """Formatted value, and whether it meets its goal; None without a goal."""

    text: str
    met: bool | None = None


def cell(column: Column, run: Run, *, with_goal: bool = True) -> Cell:
    """Format the value of a column for one run, with its goal."""
    value = column.value(run.measured)
    text = f"{value:{column.format_spec}}"
    if not with_goal or column.goal is None or (met := column.goal.met(run.subject, value)) is None:
        return Cell(text)
    bound = f"{column.goal.of(run.subject):{column.format_spec}}"
    return Cell(f"{text} ({column.goal.sign} {bound}: {'met' if met else 'missed'})", met)


def rows(section: Section, runs: Sequence[Run], threads: int, *, with_goals: bool = True) -> list[list[Cell]]:
    """Return the cells of a section, subject first; subjects without results are left out."""
    by_subject = {run.subject: run for run in runs if run.threads == threads}
    measured = [by_subject[subject] for subject in section.subjects if subject in by_subject]
    return [
        [Cell(run.subject), *(cell(column, run, with_goal=with_goals) for column in section.columns)]
        for run in measured
    ]


def headings(section: Section, threads: int) -> tuple[str, list[str]]:
    """Return the title of a table and the headings of its columns."""
    return f"{section.title}; threads: {threads}", ["", *(column.heading for column in section.columns)]


def terminal_table(section: Section, runs: Sequence[Run], threads: int) -> Table:
    """Return the table of a section for the terminal."""
    title, names = headings(section, threads)
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for name in names:
        table.add_column(name, justify="right" if name else "left")
    for row in rows(section, runs, threads):
        table.add_row(*(Text(entry.text, _STYLES[entry.met]) for entry in row))
    return table


def markdown_table(section: Section, runs: Sequence[Run], threads: int) -> str:
    """Return the table of a section as Markdown below its title, without goals; empty without rows."""
    title, names = headings(section, threads)
    body = rows(section, runs, threads, with_goals=False)
    if not body:
        return ""
    lines = [f"| {' | '.join(line)} |" for line in (names, *([entry.text for entry in row] for row in body))]
    return "\n".join([f"{title}:", "", lines[0], "|---|" + "---:|" * (len(names) - 1), *lines[1:], ""])
