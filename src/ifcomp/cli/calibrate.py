"""``ifcomp calibrate``: settings with which predictions can be trusted as far as they say."""

from __future__ import annotations

from dataclasses import asdict, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ifcomp.cli import options
from ifcomp.cli.command import command
from ifcomp.cli.output import Outcome, check_target, paragraph, table
from ifcomp.errors import SettingError

if TYPE_CHECKING:
    from ifcomp.tuning import Tuned

EPILOG = "[bold]Example:[/bold] ifcomp calibrate run.ifcomp npz:held-out.npz --figure reliability.svg"

#: Endings of figures.
FIGURES = (".svg", ".png", ".pdf")


class Objective(StrEnum):
    """What is to be small on held-out data."""

    nll = "nll"
    ece = "ece"


@command
def calibrate(
    run: options.Run,
    data: Annotated[
        str,
        typer.Argument(metavar="DATA", help=f"Labelled data that the model was not trained on: {options.DATA_FORM}."),
    ],
    model: options.ModelChoice,
    reading: options.DataChoice,
    shifted: Annotated[
        str | None,
        typer.Option(metavar="DATA", help="More of it, altered as future inputs may be; counts like the other."),
    ] = None,
    train: Annotated[
        str | None,
        typer.Option(
            metavar="DATA", help="What the model was trained on.", show_default="the training data of the run"
        ),
    ] = None,
    out: Annotated[str, typer.Option(metavar="FILE", help="Where the calibrated run goes.")] = "calibrated.ifcomp",
    figure: Annotated[
        str | None, typer.Option(metavar="FILE", help="Draw reliability on DATA: .svg, .png or .pdf.")
    ] = None,
    objective: Annotated[
        Objective, typer.Option(help="What to make small: nll, or ece without losing accuracy.")
    ] = Objective.nll,
    betas: Annotated[
        str | None, typer.Option(metavar="A,B,C", help="Inverse temperatures to try.", show_default="around the best")
    ] = None,
    keep_argmax: Annotated[bool, typer.Option("--keep-argmax", help="Never change the predicted class.")] = False,
    damping: options.DampingText = None,
) -> Outcome:
    """Choose beta and alpha on held-out data, so that confidence comes close to accuracy.

    Fits the training data once for each beta. The calibrated run is for 'ifcomp predict'; its alpha is in its record.
    """
    from ifcomp.cli.probabilities import METRICS, metric_rows, probabilities
    from ifcomp.cli.record import record_path, write_run
    from ifcomp.cli.run import check_labelled, find_run
    from ifcomp.tasks.calibration import plot_reliability
    from ifcomp.tuning import tune

    for target in (out, record_path(out)):
        check_target(target)
    if figure is not None:
        check_target(figure, FIGURES)
    chosen_damping, chosen_betas = options.damping(damping), options.numbers("--betas", betas)
    opened = find_run(run, model)
    if opened.is_training_data(data):
        raise SettingError(f"The model was trained on '{data}', where it is right more often. Name held-out data.")
    held_out = [opened.source(spec, reading) for spec in (data, shifted) if spec is not None]
    training = opened.source(train, reading, beside=True)
    for source in held_out:
        check_labelled(source)
    ifc = opened.predictor(*held_out, training)
    tuned = tune(
        ifc.model,
        training.batches(),
        held_out[0].batches(),
        shifted=held_out[1].batches() if shifted is not None else None,
        betas=chosen_betas,
        damping=ifc.damping if chosen_damping is None else chosen_damping,
        objective=objective.value,
        keep_argmax=keep_argmax,
        **_settings_of(ifc),
    )
    written = {out: "the calibrated run", record_path(out): "its record"}
    record = opened.new_record(training, reading, tuned.predictor)
    write_run(out, tuned.predictor, replace(record, alpha=tuned.alpha, keep_argmax=keep_argmax))
    if figure is not None:
        found = probabilities(tuned.predictor, held_out[0], tuned.alpha, keep_argmax)
        plot_reliability(found.curves(), figure)
        written[figure] = f"reliability on {data}"
    rows = compared(tuned)
    said = (
        f"Chose beta {tuned.beta:g} and alpha {tuned.alpha:g} on {' and '.join(part.spec for part in held_out)}. "
        "NLL in nats; of NLL, ECE and Brier score smaller is better."
    )
    if rows["model"]["accuracy"] == 1:
        said += " The model is right about all of this data, so it cannot show how sure is too sure: give more data, or"
        said += " harder data with --shifted."
    facts = {
        "run": run,
        "data": data,
        "shifted": shifted,
        "objective": objective.value,
        "beta": tuned.beta,
        "alpha": tuned.alpha,
        "keep_argmax": keep_argmax,
        "inverse_temperature": tuned.inverse_temperature,
        "held_out": rows,
    }
    return Outcome(
        facts,
        [paragraph(said), table(("held-out data", *METRICS), metric_rows(rows))],
        written,
        {f"ifcomp predict {out} DATA": "calibrated probabilities of new inputs"},
    )


def compared(tuned: Tuned) -> dict[str, dict[str, float]]:
    """Held-out metrics of the model, of the best of plain temperature scaling, and of the chosen settings."""
    frame = tuned.frame
    softmax = [row for row in range(len(frame)) if frame["alpha"][row] == 0 and not frame["keep_argmax"][row]]
    best = min(softmax, key=lambda row: float(frame["nll"][row]))
    rows = {"model": 0, "temperature": best, "calibrated": tuned.chosen}
    metrics = ("accuracy", "nll", "ece", "brier")
    return {name: {metric: float(frame[metric][row]) for metric in metrics} for name, row in rows.items()}


def _settings_of(ifc: Any) -> dict[str, Any]:
    """What a fit was made with, apart from beta and damping."""
    settings = {name: value for name, value in asdict(ifc.settings).items() if name != "beta"}
    return {**settings, **asdict(ifc._selection)}
