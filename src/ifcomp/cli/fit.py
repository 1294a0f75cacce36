"""``ifcomp fit``: the curvature of a trained model, once, for all other commands."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.console import RenderableType

from ifcomp.cli import options
from ifcomp.cli.command import command
from ifcomp.cli.output import Outcome, check_target, paragraph, table

if TYPE_CHECKING:
    from ifcomp import IFComp
    from ifcomp.cli.runs import Record
    from ifcomp.curvature.factors import FisherKind

EPILOG = "[bold]Example:[/bold] ifcomp fit net:build npz:train.npz --weights net.safetensors"

#: Up to so many classes the expectation over all labels is worth its cost: the fit then has no sampling error.
EXACT_UP_TO = 100


@command
def fit(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=f"The model: {options.MODEL_FORM}.")],
    data: Annotated[str, typer.Argument(metavar="DATA", help=f"The training data: {options.DATA_FORM}.")],
    reading: options.DataChoice,
    weights: options.Weights = None,
    out: Annotated[
        str, typer.Option(metavar="FILE", help="Where the run goes; its record goes beside it.")
    ] = "run.ifcomp",
    beta: Annotated[float, typer.Option(min=0, help="Inverse temperature; 1 is the model as it is.")] = 1.0,
    fisher: Annotated[
        options.Fisher,
        typer.Option(help=f"Labels of the curvature; auto is exact up to {EXACT_UP_TO} classes, else sampled."),
    ] = options.Fisher.auto,
    label_samples: Annotated[int, typer.Option(min=1, help="Labels drawn for each example if sampled.")] = 1,
    layers: options.Layers = None,
    sua: Annotated[options.Sua, typer.Option(help="One input basis for all offsets of a kernel.")] = options.Sua.auto,
    damping: options.DampingText = None,
    seed: Annotated[int, typer.Option(help="Of the label samples and probes.")] = 0,
    skip_uncovered: Annotated[
        bool, typer.Option("--skip-uncovered", help="Leave out parameters that cannot be covered.")
    ] = False,
    max_memory: options.MaxMemory = None,
    checkpoint_every: options.CheckpointEvery = 60.0,
    device: options.Device = "cpu",
) -> Outcome:
    """Fit the curvature of a trained model in two passes over its training data.

    Writes the run, and beside it a record of what was typed, so that the other commands need the run alone.
    """
    from ifcomp import IFComp
    from ifcomp.cli.models import load_model, try_model
    from ifcomp.cli.resuming import resumable
    from ifcomp.cli.runs import Record, record_path, write_run
    from ifcomp.data.sources import open_source
    from ifcomp.predictor import DEFAULT_DAMPING

    started = time.perf_counter()
    chosen_damping = options.damping(damping)
    reading_options = reading.parsed()
    for target in (out, record_path(out)):
        check_target(target)
    with resumable(checkpoint_every, out, record_path(out)) as checkpoint:
        source = open_source(data, reading_options)
        network = load_model(model, weights, device)
        classes = try_model(network, source, model)
        ifc = IFComp(
            network,
            beta,
            layers=options.layers(layers),
            damping=DEFAULT_DAMPING if chosen_damping is None else chosen_damping,
            sua=options.sua(sua),
            fisher=choose_fisher(fisher, classes),
            label_samples=label_samples,
            seed=seed,
            skip_uncovered=skip_uncovered,
        ).fit(source.batches(), max_memory=max_memory, checkpoint=checkpoint)
        names = None if source.class_names is None else list(source.class_names)
        assert ifc.factors is not None
        record = Record(model, weights, data, reading_options.given(), names, ifc.factors.count)
        write_run(out, ifc, record)
    return _outcome(ifc, record, out, time.perf_counter() - started)


def choose_fisher(wanted: options.Fisher, classes: int) -> FisherKind:
    """Exact where it is affordable, unless something else is wanted."""
    if wanted is options.Fisher.auto:
        return "exact" if classes <= EXACT_UP_TO else "sampled"
    return cast("FisherKind", wanted.value)


def _outcome(ifc: IFComp, record: Record, out: str, seconds: float) -> Outcome:
    from ifcomp.cli.runs import record_path
    from ifcomp.curvature.health import FittedCoverage

    coverage, settings = ifc.coverage, ifc.settings
    assert ifc.factors is not None
    assert isinstance(coverage, FittedCoverage)
    facts = {
        "model": record.model,
        "weights": record.weights,
        "data": record.data,
        "examples": record.examples,
        "classes": ifc.factors.num_classes,
        "class_names": record.class_names,
        **asdict(settings),
        "damping": options.damping_text(ifc.damping),
        "parameters": coverage.total,
        "covered": coverage.covered,
        "coverage": [asdict(row) for row in coverage.rows],
        "health": [asdict(layer) for layer in coverage.health],
        "suggested_damping": options.damping_text(coverage.suggested),
        "seconds": seconds,
    }
    said = (
        f"Fitted {record.model} on {record.data}: {record.examples:,} examples, {ifc.factors.num_classes} classes, "
        f"{settings.fisher} Fisher at beta {settings.beta:g}, {seconds:.1f} s. "
        f"Covered: {coverage.covered:,} of {coverage.total:,} parameters ({100 * coverage.fraction:.1f} %)."
    )
    if record.weights is None:
        said += " No --weights were given, so the model is as its factory makes it."
    left_out = [(row.name, row.kind, row.treatment, f"{row.parameters:,}") for row in coverage.rows if not row.covered]
    shown: list[RenderableType] = [paragraph(said)]
    if left_out:
        shown.append(table(("not covered", "kind", "why", "parameters"), left_out, left=3))
    if coverage.unhealthy:
        rows = [(layer.name, layer.verdict, layer.words) for layer in coverage.unhealthy]
        shown.append(table(("unhealthy", "verdict", "why"), rows, left=3))
    if coverage.suggested != ifc.damping:
        shown.append(paragraph(f"Suggested damping: --damping {options.damping_text(coverage.suggested)}."))
    return Outcome(
        facts,
        shown,
        {out: "the run", record_path(out): "its record: what was typed"},
        {
            f"ifcomp audit {out}": "which training labels are wrong",
            f"ifcomp ood {out} DATA": "which inputs are unlike the training data",
            f"ifcomp calibrate {out} DATA": "how far predictions can be trusted",
        },
    )
