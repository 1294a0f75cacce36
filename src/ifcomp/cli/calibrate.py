"""``ifcomp calibrate``: choose the settings of calibrated predictions on held-out data."""

from __future__ import annotations

from dataclasses import asdict, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ifcomp.cli import options
from ifcomp.cli.output import METRICS, Outcome, check_target, metric_table, paragraph
from ifcomp.errors import SettingError

if TYPE_CHECKING:
    from ifcomp import IFComp
    from ifcomp.data.sources import Source
    from ifcomp.tuning import Tuned

EPILOG = "[bold]Example:[/bold] ifcomp calibrate run.ifcomp npz:held-out.npz --figure reliability.svg"

#: File formats of figures.
FIGURE_SUFFIXES = (".svg", ".png", ".pdf")


class Objective(StrEnum):
    """Metric that is minimised on held-out data."""

    nll = "nll"
    ece = "ece"


def calibrate(
    path: options.RunPath,
    data: Annotated[
        str,
        typer.Argument(metavar="DATA", help=f"Labelled data that the model was not trained on: {options.DATA_FORM}."),
    ],
    model: options.ModelOptions,
    reading: options.DataOptions,
    shifted: Annotated[
        str | None,
        typer.Option(metavar="DATA", help="Held-out data under the shift that you expect; weighted like DATA."),
    ] = None,
    train: Annotated[
        str | None,
        typer.Option(metavar="DATA", help="Training data of the model.", show_default="the training data of the run"),
    ] = None,
    out: Annotated[str, typer.Option(metavar="FILE", help="File of the calibrated run.")] = "calibrated.ifcomp",
    figure: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Also draw a reliability diagram of DATA: .svg, .png or .pdf."),
    ] = None,
    objective: Annotated[
        Objective, typer.Option(help="Metric to minimise: nll, or ece without loss of accuracy.")
    ] = Objective.nll,
    betas: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,C",
            help="Inverse temperatures to try.",
            show_default="1 and values near the best inverse temperature",
        ),
    ] = None,
    keep_argmax: Annotated[bool, typer.Option("--keep-argmax", help="Never change the predicted class.")] = False,
    damping: options.DampingText = None,
) -> Outcome:
    """Choose beta and alpha on held-out data so that confidence matches accuracy.

    Fits the curvature once per beta. Writes a calibrated run for 'ifcomp predict'; its record contains alpha.
    """
    from ifcomp.cli.record import record_path
    from ifcomp.cli.run import check_labelled, open_run, predict_source, write_run
    from ifcomp.tasks.calibration import plot_reliability
    from ifcomp.tuning import tune

    for target in (out, record_path(out)):
        check_target(target)
    if figure is not None:
        check_target(figure, FIGURE_SUFFIXES)
    chosen_damping, chosen_betas = options.parse_damping(damping, None), options.parse_numbers("--betas", betas)
    run = open_run(path, model)
    if run.is_training_data(data):
        raise SettingError(f"The model was trained on '{data}', where it is right more often. Name held-out data.")
    held_out = [run.open_data(spec, reading) for spec in (data, shifted) if spec is not None]
    training = run.open_data(train, reading, secondary=True)
    for source in held_out:
        check_labelled(source)
    ifc = run.load_predictor(*held_out, training)
    tuned = tune(
        ifc.model,
        training.batches(),
        held_out[0].batches(),
        shifted=held_out[1].batches() if shifted is not None else None,
        betas=chosen_betas,
        damping=ifc.damping if chosen_damping is None else chosen_damping,
        objective=objective.value,
        keep_argmax=keep_argmax,
        **_fit_settings(ifc),
    )
    written = {out: "the calibrated run", record_path(out): "its record"}
    record = run.new_record(training, reading, tuned.predictor)
    write_run(out, tuned.predictor, replace(record, alpha=tuned.alpha, keep_argmax=keep_argmax))
    if figure is not None:
        predictions = predict_source(tuned.predictor, held_out[0], tuned.alpha, keep_argmax)
        plot_reliability(predictions.curves(), figure)
        written[figure] = f"reliability diagram of {data}"
    metrics = held_out_metrics(tuned)
    facts = {
        "run": path,
        "data": data,
        "shifted": shifted,
        "objective": objective.value,
        "beta": tuned.beta,
        "alpha": tuned.alpha,
        "keep_argmax": keep_argmax,
        "inverse_temperature": tuned.inverse_temperature,
        "held_out": metrics,
    }
    return Outcome(
        facts,
        [paragraph(_summary(tuned, held_out, metrics)), metric_table("held-out data", metrics)],
        written,
        {f"ifcomp predict {out} DATA": "calibrated probabilities of new inputs"},
    )


def held_out_metrics(tuned: Tuned) -> dict[str, dict[str, float]]:
    """Return the held-out metrics of the model, of the best plain temperature scaling, and of the chosen settings."""
    frame = tuned.frame
    softmax = [row for row in range(len(frame)) if frame["alpha"][row] == 0 and not frame["keep_argmax"][row]]
    best = min(softmax, key=lambda row: float(frame["nll"][row]))
    rows = {"model": 0, "temperature": best, "calibrated": tuned.chosen}
    return {name: {metric: float(frame[metric][row]) for metric in METRICS} for name, row in rows.items()}


def _fit_settings(ifc: IFComp) -> dict[str, Any]:
    """Return the settings of a fit except beta and damping."""
    settings = {name: value for name, value in asdict(ifc.settings).items() if name != "beta"}
    return {**settings, **asdict(ifc._selection)}


def _summary(tuned: Tuned, held_out: list[Source], metrics: dict[str, dict[str, float]]) -> str:
    text = (
        f"Chose beta {tuned.beta:g} and alpha {tuned.alpha:g} on {' and '.join(source.spec for source in held_out)}. "
        "NLL is in nats. Smaller NLL, ECE and Brier score are better."
    )
    if metrics["model"]["accuracy"] == 1:
        text += " The model predicts all of this data correctly, so overconfidence cannot be measured on it: give more"
        text += " data, or harder data with --shifted."
    return text
