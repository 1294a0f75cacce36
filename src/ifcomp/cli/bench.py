"""``ifcomp bench``: the benchmarks of a checkout."""

from __future__ import annotations

import importlib
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ifcomp.cli.output import Outcome, paragraph
from ifcomp.errors import MissingPackageError

EPILOG = "[bold]Example:[/bold] ifcomp bench influence fit --threads 1"


def bench(
    suites: Annotated[
        list[str] | None, typer.Argument(metavar="[SUITE]...", help="Suites to run. Default: all.")
    ] = None,
    threads: Annotated[
        list[int] | None, typer.Option(min=1, help="Number of threads; can be repeated. Default: 1 and 2.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds; the fastest is reported.")] = 5,
    results: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the raw results instead of benchmarks/results.")
    ] = None,
    note: Annotated[
        str, typer.Option(help="Note for readers, such as other load on the machine; stored with the results.")
    ] = "",
    tiny: Annotated[
        bool,
        typer.Option("--tiny", help="Smoke test with small networks; results are written only with --results."),
    ] = False,
    show: Annotated[bool, typer.Option("--list", help="List the suites and exit.")] = False,
) -> Outcome:
    """Time the library against forward passes, the paper's implementation and other packages.

    Needs a checkout of the repository and an idle machine. The tables show which goals are met. Raw results are written
    after each network to one JSON file per suite, where they replace older ones. The tables are printed at the end.
    """
    run = _import_benchmarks("run")
    chosen = run.chosen(suites or [])
    if show:
        listed = {suite.name: {"about": suite.about, "minutes": suite.minutes} for suite in chosen}
        lines = [f"{suite.name} (about {suite.minutes:g} min): {suite.about}" for suite in chosen]
        return Outcome({"suites": listed}, [paragraph("\n".join(lines))])
    folder = results if tiny or results else _import_benchmarks("record").RESULTS
    counts = threads or [1, 2]
    measured = run.run(chosen, counts, rounds, tiny, folder, Console(stderr=True), note)
    facts = {name: [asdict(found) for found in runs] for name, runs in measured.items()}
    written = {} if folder is None else {str(folder / f"{suite.name}.json"): "raw results" for suite in chosen}
    return Outcome({"suites": facts}, run.tables(chosen, measured, counts), written)


def _import_benchmarks(name: str) -> Any:
    """Import a module of the benchmarks, which are not part of the installed package."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(f"benchmarks.{name}")
    except ModuleNotFoundError as error:
        if error.name not in ("benchmarks", f"benchmarks.{name}"):
            raise
        raise MissingPackageError(
            "The benchmarks are not part of the installed package. Run this command in a checkout of the repository."
        ) from error
    finally:
        sys.path.pop(0)
