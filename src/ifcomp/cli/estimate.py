"""``ifcomp estimate``: memory, disk and time before a fit."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import RenderableType

from ifcomp.cli import options
from ifcomp.cli.command import command
from ifcomp.cli.fit import choose_fisher
from ifcomp.cli.output import Outcome, paragraph, table

EPILOG = "[bold]Example:[/bold] ifcomp estimate net:build npz:train.npz --weights net.safetensors"


@command
def estimate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=f"The model: {options.MODEL_FORM}.")],
    data: Annotated[str, typer.Argument(metavar="DATA", help=f"The training data: {options.DATA_FORM}.")],
    reading: options.DataChoice,
    weights: options.Weights = None,
    examples: Annotated[
        int | None, typer.Option(min=1, help="How many there are.", show_default="as the data says")
    ] = None,
    fisher: Annotated[options.Fisher, typer.Option(help="As of 'ifcomp fit'.")] = options.Fisher.auto,
    label_samples: Annotated[int, typer.Option(min=1, help="As of 'ifcomp fit'.")] = 1,
    layers: options.Layers = None,
    sua: Annotated[options.Sua, typer.Option(help="As of 'ifcomp fit'.")] = options.Sua.auto,
    probes: options.Probes = None,
    skip_uncovered: Annotated[
        bool, typer.Option("--skip-uncovered", help="Leave out parameters that cannot be covered.")
    ] = False,
    max_memory: options.MaxMemory = None,
    device: options.Device = "cpu",
) -> Outcome:
    """Estimate memory, disk and time of a fit and of scoring, from a few examples.

    Memory is what the process takes beside model and data.
    """
    from ifcomp import estimation
    from ifcomp.cli.models import load_model, try_model
    from ifcomp.data.sources import IndexedBatches, open_source

    source = open_source(data, reading.parsed())
    network = load_model(model, weights, device)
    classes = try_model(network, source, model)
    count = len(source) if examples is None and isinstance(source.data, IndexedBatches) else examples
    found = estimation.estimate(
        network,
        source.batches(),
        examples=count,
        probes=probes,
        max_memory=max_memory,
        layers=options.layers(layers),
        sua=options.sua(sua),
        fisher=choose_fisher(fisher, classes),
        label_samples=label_samples,
        skip_uncovered=skip_uncovered,
    )
    rows = [estimation.cells(layer) for layer in found.layers]
    shown: list[RenderableType] = [
        table(("layer", "kind", "parameters", "memory", "disk", "fit", "score"), rows, left=2),
        *(paragraph(line) for line in found.summary),
    ]
    return Outcome(
        {"model": model, "data": data, **asdict(found)},
        shown,
        next_steps={f"ifcomp fit {model} {data}": "fit the curvature, once, for all other commands"},
    )
