"""``ifcomp demo``: label audit, out-of-distribution detection and calibration on embedded data, in seconds."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

EPILOG = "[bold]Example:[/bold] ifcomp demo --seed 1 --json > demo.json"


def demo(
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Of the split, the flips, the training and the label samples.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON and nothing else.")] = False,
) -> None:
    """Find wrong labels, strange inputs and doubtful predictions of a small network.

    Trains it on handwritten digits of which 5 % get a wrong label. Needs no arguments and no downloads.
    """
    import torch

    from ifcomp.cli import demo_study, demo_tables

    torch.set_num_threads(1)  # the tensors are so small that threads mostly wait for each other
    with Console(stderr=True).status("Starting") as status:
        result = demo_study.run(seed, lambda step: status.update(f"{step} ..."))
    if as_json:
        typer.echo(json.dumps(asdict(result), indent=2))
    else:
        demo_tables.render(result, Console())
