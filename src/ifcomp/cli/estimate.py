"""``ifcomp estimate``: memory, disk and time of a fit, before it is run."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import RenderableType

from ifcomp.cli import options
from ifcomp.cli.output import Outcome, paragraph, table

EPILOG = "[bold]Example:[/bold] ifcomp estimate net:build npz:train.npz --weights net.safetensors"

_AS_IN_FIT = "As in 'ifcomp fit'."


def estimate(
    model: options.Model,
    data: options.FitData,
    reading: options.DataOptions,
    weights: options.Weights = None,
    examples: Annotated[
        int | None, typer.Option(min=1, help="Number of examples.", show_default="that of the data")
    ] = None,
    fisher: Annotated[options.Fisher, typer.Option(help=_AS_IN_FIT)] = options.Fisher.auto,
    label_samples: Annotated[int, typer.Option(min=1, help=_AS_IN_FIT)] = 1,
    layers: options.Layers = None,
    sua: Annotated[options.Sua, typer.Option(help=_AS_IN_FIT)] = options.Sua.auto,
    probes: options.Probes = None,
    skip_uncovered: options.SkipUncovered = False,
    max_memory: options.MaxMemory = None,
    device: options.Device = "cpu",
) -> Outcome:
    """Estimate memory, disk and time of fitting and scoring from a few examples.

    Memory does not include model and data.
    """
    from ifcomp import estimation
    from ifcomp.cli.model import load_checked_model
    from ifcomp.data.sources import IndexedBatches, open_source

    source = open_source(data, reading.parse())
    network, num_classes = load_checked_model(model, weights, device, source)
    count = len(source) if examples is None and isinstance(source.data, IndexedBatches) else examples
    result = estimation.estimate(
        network,
        source.batches(),
        examples=count,
        probes=probes,
        max_memory=max_memory,
        layers=options.parse_layers(layers),
        sua=sua.setting(),
        fisher=fisher.setting(num_classes),
        label_samples=label_samples,
        skip_uncovered=skip_uncovered,
    )
    rows = [estimation.cells(layer) for layer in result.layers]
    shown: list[RenderableType] = [
        table(estimation.CELLS, rows, left=2),
        *(paragraph(line) for line in result.summary),
    ]
    command = options.command_line(
        "fit",
        model,
        data,
        reading=reading,
        weights=weights,
        fisher=None if fisher is options.Fisher.auto else fisher,
        label_samples=None if label_samples == 1 else label_samples,
        layers=layers,
        sua=None if sua is options.Sua.auto else sua,
        skip_uncovered=skip_uncovered,
        max_memory=max_memory,
        device=None if device == "cpu" else device,
    )
    return Outcome({"model": model, "data": data, **asdict(result)}, shown, next_steps={command: "fit the curvature"})
