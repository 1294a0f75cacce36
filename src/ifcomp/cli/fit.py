"""``ifcomp fit``: fit the curvature of a trained model, once, for all other commands."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from ifcomp.cli import options
from ifcomp.cli.output import GATE, RUN_SUFFIX, Outcome, check_target, paragraph, table

if TYPE_CHECKING:
    from ifcomp import IFComp
    from ifcomp.cli.record import Record
    from ifcomp.curvature.health import FittedCoverage

EPILOG = "[bold]Example:[/bold] ifcomp fit net:build npz:train.npz --weights net.safetensors"

#: Training accuracy below which the output asks to compare it with that of the training.
LOW_ACCURACY = 0.5


def fit(
    model: options.Model,
    data: options.FitData,
    reading: options.DataOptions,
    weights: options.Weights = None,
    out: Annotated[str, typer.Option(metavar="FILE", help=f"File of the run, {RUN_SUFFIX}.")] = "run.ifcomp",
    beta: Annotated[float, typer.Option(min=0, help="Inverse temperature; 1 leaves the model unchanged.")] = 1.0,
    fisher: Annotated[
        options.Fisher,
        typer.Option(
            help="Labels over which the curvature is averaged. Auto is exact for up to "
            f"{options.EXACT_UP_TO} classes, else sampled."
        ),
    ] = options.Fisher.auto,
    label_samples: Annotated[int, typer.Option(min=1, help="Labels drawn per example if the Fisher is sampled.")] = 1,
    layers: options.Layers = None,
    sua: Annotated[
        options.Sua, typer.Option(help="Share one eigenbasis of the inputs over all offsets of a convolution kernel.")
    ] = options.Sua.auto,
    damping: options.DampingText = None,
    seed: Annotated[int, typer.Option(help="Seed of the label samples and probes.")] = 0,
    skip_uncovered: options.SkipUncovered = False,
    max_memory: options.MaxMemory = None,
    checkpoint_every: options.CheckpointEvery = 60.0,
    device: options.Device = "cpu",
) -> Outcome:
    """Fit the curvature of a trained model in two passes over its training data.

    The run contains the names of model, weights and data, so the other commands need only the run. The exit code is 3
    if the training accuracy is near chance: wrong preprocessing, or no weights.
    """
    from ifcomp import IFComp
    from ifcomp.cli.model import load_checked_model
    from ifcomp.cli.record import Record, folder_of_fit
    from ifcomp.cli.run import recorded_options, resumable, write_run
    from ifcomp.data.sources import open_source
    from ifcomp.predictor import DEFAULT_DAMPING

    started = time.perf_counter()
    chosen_damping = options.parse_damping(damping, DEFAULT_DAMPING)
    reading_options = reading.parse()
    check_target(out, (RUN_SUFFIX,), (data, weights))
    with resumable(checkpoint_every, out) as checkpoint:
        source = open_source(data, reading_options)
        network, num_classes = load_checked_model(model, weights, device, source)
        ifc = IFComp(
            network,
            beta,
            layers=options.parse_layers(layers),
            damping=chosen_damping,
            sua=sua.setting(),
            fisher=fisher.setting(num_classes),
            label_samples=label_samples,
            seed=seed,
            skip_uncovered=skip_uncovered,
        ).fit(source.batches(), max_memory=max_memory, checkpoint=checkpoint)
        names = None if source.class_names is None else list(source.class_names)
        assert ifc.factors is not None
        record = Record(
            model,
            weights,
            source.spec,
            recorded_options(reading_options, source),
            names,
            ifc.factors.count,
            source.digest(),
            folder_of_fit(out),
        )
        write_run(out, ifc, record.signed())
    seconds, reason = time.perf_counter() - started, _inaccuracy(ifc)
    on_device = {"device": None if device == "cpu" else device}
    return Outcome(
        {**_facts(ifc, record, seconds), "exit_reason": reason},
        [*_shown(ifc, record, seconds), *([paragraph(reason)] if reason else [])],
        {out: "the run"},
        {}
        if reason
        else {
            options.command_line("audit", out, **on_device): "find wrong training labels",
            options.command_line("ood", out, "DATA", held_out="DATA", **on_device): "find unfamiliar inputs",
            options.command_line("calibrate", out, "DATA", **on_device): "calibrate the predictions",
        },
        GATE if reason else 0,
    )


def _inaccuracy(ifc: IFComp) -> str | None:
    """Return the reason for exit code `GATE`: a training accuracy near chance. None if it is not."""
    from ifcomp.fitting import least_accuracy

    assert ifc.factors is not None
    accuracy, least = ifc.training_accuracy, least_accuracy(ifc.factors.num_classes)
    if accuracy is None or accuracy >= least:
        return None
    return (
        f"Exit code {GATE}: the training accuracy is {accuracy:.1%}, which is near chance. Wrong preprocessing, or no "
        "weights?"
    )


def _fitted_coverage(ifc: IFComp) -> FittedCoverage:
    from ifcomp.curvature.health import FittedCoverage

    assert isinstance(ifc.coverage, FittedCoverage)
    return ifc.coverage


def _facts(ifc: IFComp, record: Record, seconds: float) -> dict[str, Any]:
    coverage = _fitted_coverage(ifc)
    assert ifc.factors is not None
    return {
        "model": record.model,
        "weights": record.weights,
        "data": record.data,
        "examples": record.examples,
        "classes": ifc.factors.num_classes,
        "class_names": record.class_names,
        "training_accuracy": ifc.training_accuracy,
        **asdict(ifc.settings),
        "damping": options.format_damping(ifc.damping),
        "parameters": coverage.total,
        "covered": coverage.covered,
        "coverage": [asdict(row) for row in coverage.rows],
        "health": [asdict(layer) for layer in coverage.health],
        "suggested_damping": options.format_damping(coverage.suggested),
        "seconds": seconds,
    }


def _shown(ifc: IFComp, record: Record, seconds: float) -> list[RenderableType]:
    coverage = _fitted_coverage(ifc)
    assert ifc.factors is not None
    summary = (
        f"Fitted {record.model} on {record.data}: {record.examples:,} examples, {ifc.factors.num_classes} classes, "
        f"{ifc.settings.fisher} Fisher at beta {ifc.settings.beta:g}, {seconds:.1f} s. "
        f"Covered: {coverage.covered:,} of {coverage.total:,} parameters ({100 * coverage.fraction:.1f} %)."
    )
    if ifc.training_accuracy is not None:
        summary += f" Training accuracy: {ifc.training_accuracy:.1%}."
        if ifc.training_accuracy < LOW_ACCURACY:
            summary += " If it was larger in your training, preprocessing or weights differ."
    if record.weights is None:
        summary += " No --weights were given: the model has the weights that its factory set."
    shown: list[RenderableType] = [paragraph(summary)]
    uncovered = [(row.name, row.kind, row.treatment, f"{row.parameters:,}") for row in coverage.rows if not row.covered]
    if uncovered:
        shown.append(table(("not covered", "kind", "reason", "parameters"), uncovered, left=3))
    if coverage.unhealthy:
        rows = [(layer.name, layer.verdict, layer.description) for layer in coverage.unhealthy]
        shown.append(table(("unhealthy", "verdict", "reason"), rows, left=3))
    if coverage.suggested != ifc.damping:
        shown.append(paragraph(f"Suggested damping: --damping {options.format_damping(coverage.suggested)}."))
    return shown
