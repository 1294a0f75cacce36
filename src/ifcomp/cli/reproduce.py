"""``ifcomp reproduce``: reproduce a table or figure of the paper."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from ifcomp.cli.output import Outcome, paragraph
from ifcomp.errors import MissingPackageError

EPILOG = "[bold]Example:[/bold] ifcomp reproduce ood --preset digits --out results"


def reproduce(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="The study, such as ood or mislabel; 'list' lists them, 'all' runs every study with the preset.",
        ),
    ],
    preset: Annotated[
        str,
        typer.Option(
            help="Size of the study: digits (seconds), mnist, cifar10 or cifar10-resnet56 (minutes to an hour), "
            "paper (days, GPUs)."
        ),
    ] = "digits",
    out: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Folder of the results.", show_default="docs/results of the checkout"),
    ] = None,
    plot_only: Annotated[
        bool, typer.Option("--plot-only", help="Only build table and plot from existing results.")
    ] = False,
) -> Outcome:
    """Reproduce a table or figure of the paper, with the paper's numbers for comparison.

    Needs a checkout of the repository. Data is read from the folder in IFCOMP_DATA, trained networks are stored in the
    folder in IFCOMP_CACHE. An interrupted study resumes when the command is repeated.
    """
    experiments = _import_experiments()
    if name == "list":
        titles = {study.name: study.title for study in experiments.STUDIES.values()}
        return Outcome({"studies": titles}, [paragraph(f"{key}: {title}") for key, title in titles.items()])
    import torch

    torch.set_num_threads(1)  # results do not depend on the number of cores
    folder = experiments.RESULTS if out is None else Path(out)
    with_preset = [study.name for study in experiments.STUDIES.values() if preset in study.presets]
    names = with_preset if name == "all" and with_preset else [name]
    written: dict[str, str] = {}
    try:
        for study in names:
            written |= experiments.reproduce(study, preset, folder, plot_only=plot_only)
    except KeyboardInterrupt as interrupt:
        interrupt.add_note("Repeat the command to run the remaining steps.")
        raise
    tables = [paragraph((folder / study / preset / "table.md").read_text()) for study in names]
    return Outcome({"study": name, "preset": preset}, tables, written)


def _import_experiments() -> Any:
    """Import ``experiments.reproduce``, which is in the checkout but not in the installed package."""
    import ifcomp

    for root in (Path.cwd(), Path(ifcomp.__file__).parents[2]):
        if (root / "experiments" / "reproduce").is_dir():
            sys.path.insert(0, str(root))
            return import_module("experiments.reproduce")
    raise MissingPackageError(
        "The experiments are not part of the installed package, and there is no folder 'experiments' here. Run this "
        "command in a checkout of the repository."
    )
