"""``ifcomp bench``: the benchmarks of a checkout."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ifcomp.errors import MissingPackageError

EPILOG = "[bold]Example:[/bold] ifcomp bench influence fit --threads 1"


def bench(
    suites: Annotated[
        list[str] | None, typer.Argument(metavar="[SUITE]...", help="Which suites to run; all without a name.")
    ] = None,
    threads: Annotated[
        list[int] | None, typer.Option(min=1, help="Threads; can be given several times. Without it 1 and 2.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds; the best one counts.")] = 5,
    results: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the raw results instead of benchmarks/results.")
    ] = None,
    note: Annotated[
        str, typer.Option(help="What readers should know, such as other work at the time; kept with the numbers.")
    ] = "",
    tiny: Annotated[
        bool, typer.Option("--tiny", help="Only see whether all runs: small networks; written with --results only.")
    ] = False,
    show: Annotated[bool, typer.Option("--list", help="Say which suites there are, and end.")] = False,
) -> None:
    """Time the library against forward passes, the paper's way and other packages; needs a quiet machine.

    Runs from a checkout of the repository. Tables say which goals are met; raw numbers go to one JSON file a suite,
    after each network, where new ones take the place of older ones.
    """
    run = _benchmarks("run")
    chosen = run.chosen(suites or [])
    console = Console(width=None if sys.stdout.isatty() else 160)
    if show:
        for suite in chosen:
            about = f"[bold]{suite.name}[/bold] (about {suite.minutes:g} min): {suite.about}"
            console.print(about, highlight=False, soft_wrap=True)
        return
    folder = results if tiny or results else _benchmarks("record").RESULTS
    run.run(chosen, threads or [1, 2], rounds, tiny, folder, console, note)


def _benchmarks(name: str) -> Any:
    """A module of the benchmarks, which are not part of the installed package."""
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
