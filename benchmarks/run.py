"""Run suites: measure, store and print results."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import record
from benchmarks.suite import Section, Setup, Suite
from benchmarks.suites import SUITES
from benchmarks.tables import terminal_table
from benchmarks.timing import environment
from ifcomp.errors import SettingError


def chosen(names: Sequence[str]) -> list[Suite]:
    """Return the suites with these names in registry order; all suites without names."""
    unknown = sorted(set(names) - SUITES.keys())
    if unknown:
        raise SettingError(f"There is no suite {', '.join(unknown)}. The suites are {', '.join(SUITES)}.")
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
        suites: Suites to run.
        threads: Numbers of threads.
        rounds: Number of timed rounds.
        tiny: Use small networks and few examples, to test that the suites run.
        folder: Folder of raw results, written after each subject; None writes nothing.
        console: Console on which the subject that is measured is shown.
        note: Note to store with the results.

    Returns:
        Runs by suite.
    """
    results: dict[str, list[record.Run]] = {}
    for suite in suites:
        runs = results[suite.name] = []
        for count in threads:
            for section in suite.sections:
                if section.threads is None or count in section.threads:
                    setup = Setup(count, rounds, tiny)
                    runs += _measure(suite, section, setup, folder, console, note)
    return results


def tables(suites: Sequence[Suite], results: Mapping[str, Sequence[record.Run]], threads: Sequence[int]) -> list[Table]:
    """Return the tables of all sections for the results of `run`."""
    return [
        terminal_table(section, results[suite.name], count)
        for suite in suites
        for count in threads
        for section in suite.sections
        if section.threads is None or count in section.threads
    ]


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
