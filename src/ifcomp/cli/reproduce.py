"""``ifcomp reproduce``: a table or figure of the paper, made again."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from ifcomp.cli.command import command
from ifcomp.cli.output import Outcome, paragraph
from ifcomp.errors import MissingPackageError

EPILOG = "[bold]Example:[/bold] ifcomp reproduce ood --preset digits --out results"


@command
def reproduce(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="The study: ood, mislabel, ...; 'list' shows them, 'all' runs those that have the preset.",
        ),
    ],
    preset: Annotated[
        str,
        typer.Option(
            help="Its size: digits (seconds), mnist (minutes), cifar10 or cifar10-resnet56 (hours), paper (days, GPUs)."
        ),
    ] = "digits",
    out: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Where results go.", show_default="docs/results of the checkout"),
    ] = None,
    plot_only: Annotated[
        bool, typer.Option("--plot-only", help="Make table and plot from the numbers that are there; run nothing.")
    ] = False,
) -> Outcome:
    """Make a table or figure of the paper again, and put our numbers beside the paper's.

    Works in a checkout of the project. Real data is read from the folder that IFCOMP_DATA names, networks are kept in
    the one that IFCOMP_CACHE names. A run that was stopped goes on where it was.
    """
    experiments = _experiments()
    if name == "list":
        rows = {study.name: study.title for study in experiments.STUDIES.values()}
        return Outcome({"studies": rows}, [paragraph(f"{key}: {title}") for key, title in rows.items()])
    import torch

    torch.set_num_threads(1)  # results do not depend on the machine's cores
    folder = experiments.RESULTS if out is None else Path(out)
    having = [study.name for study in experiments.STUDIES.values() if preset in study.presets]
    names = having if name == "all" and having else [name]
    written: dict[str, str] = {}
    try:
        for study in names:
            written |= experiments.reproduce(study, preset, folder, plot_only=plot_only)
    except KeyboardInterrupt as stopped:
        stopped.add_note("Give the same command again to go on with the steps that are left.")
        raise
    tables = [paragraph((folder / study / preset / "table.md").read_text()) for study in names]
    return Outcome({"study": name, "preset": preset}, tables, written)


def _experiments() -> Any:
    """The package of experiments, which is in the checkout but not in what pip installs."""
    import ifcomp

    for root in (Path.cwd(), Path(ifcomp.__file__).parents[2]):
        if (root / "experiments" / "reproduce").is_dir():
            sys.path.insert(0, str(root))
            return import_module("experiments.reproduce")
    raise MissingPackageError(
        "The experiments are not part of the installed package, and there is no folder 'experiments' here. Run this "
        "command in a checkout of the project."
    )
