"""Run suites: measure, write, show."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks import record
from benchmarks.suite import Section, Setup, Suite
from benchmarks.suites import SUITES
from benchmarks.tables import terminal_table
from benchmarks.timing import environment
from ifcomp.errors import SettingError


def chosen(names: Sequence[str]) -> list[Suite]:
    """The suites of these names in the order of the registry; all of them without names."""
    unknown = sorted(set(names) - SUITES.keys())
    if unknown:
        raise SettingError(f"There is no suite {', '.join(unknown)}. There are: {', '.join(SUITES)}.")
    return [suite for name, suite in SUITES.items() if not names or name in names]


def run(
    suites: Sequence[Suite],
    threads: Sequence[int],
    rounds: int,
    tiny: bool,
    folder: Path | None,
    console: Console,
    note: str = "",
) -> dict[str, list[record.Run]]:
    """Measure all subjects of suites.

    Args:
        suites: What to run.
        threads: Numbers of threads.
        rounds: Timed rounds.
        tiny: Whether it runs, not how fast it is.
        folder: Where raw results are written after each subject; None writes none.
        console: Where tables are shown.
        note: What readers of the figures should know, kept with them.

    Returns:
        What was measured, by suite.
    """
    found: dict[str, list[record.Run]] = {}
    for suite in suites:
        console.print(f"\n[bold]{suite.name}[/bold]: {suite.about}", highlight=False, soft_wrap=True)
        runs = found[suite.name] = []
        for own in threads:
            for section in suite.sections:
                if section.threads is None or own in section.threads:
                    setup = Setup(own, rounds, tiny)
                    runs += _measure(suite, section, setup, folder, console, note)
                    console.print(terminal_table(section, runs, own))
        if folder is not None:
            console.print(f"raw numbers: {folder / suite.name}.json", highlight=False)
    return found


def _measure(
    suite: Suite, section: Section, setup: Setup, folder: Path | None, console: Console, note: str
) -> list[record.Run]:
    runs = []
    for subject, measure in section.subjects.items():
        with console.status(f"{suite.name}: {subject}, threads: {setup.threads}"):
            measured = measure(setup)
        where = environment() | {"tiny": setup.tiny, "note": note}
        runs.append(record.Run(subject, setup.threads, where, measured))
        if folder is not None:
            record.write(suite.name, runs[-1:], folder)
    return runs
