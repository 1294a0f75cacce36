"""``ifcomp calibrate``: choose temperature and alpha of predictions on held-out data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ifcomp.cli import options
from ifcomp.cli.output import METRICS, Outcome, check_target, metric_table, paragraph
from ifcomp.errors import SettingError

if TYPE_CHECKING:
    from ifcomp.tasks.calibration_result import Calibration

EPILOG = "[bold]Example:[/bold] ifcomp calibrate run.ifcomp npz:held-out.npz --figure reliability.svg"

#: File formats of figures.
FIGURE_SUFFIXES = (".svg", ".png", ".pdf")


def calibrate(
    path: options.RunPath,
    held_out: Annotated[
        str,
        typer.Argument(
            metavar="HELD_OUT", help=f"Labelled data that the model was not trained on: {options.DATA_FORM}."
        ),
    ],
    model: options.ModelOptions,
    reading: options.DataOptions,
    shifted: Annotated[
        str | None,
        typer.Option(metavar="DATA", help="Labelled held-out data under the shift that you expect."),
    ] = None,
    figure: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Also draw cross-validated reliability curves: .svg, .png or .pdf."),
    ] = None,
) -> Outcome:
    """Choose temperature and alpha on held-out data so that confidence matches accuracy.

    They are chosen on a random half of HELD_OUT and on the shifted data; the other half is for prediction sets. The
    calibration is stored in the run, for 'ifcomp predict'.
    """
    from ifcomp.cli.run import check_labelled, open_run
    from ifcomp.tasks.calibration import plot_reliability

    check_target(path)
    run = open_run(path, model)
    if figure is not None:
        check_target(figure, FIGURE_SUFFIXES, run.inputs(held_out, shifted))
    if run.is_training_data(held_out):
        raise SettingError(
            f"The model was trained on '{held_out}', where it is more accurate than on new data. Give data that it was "
            "not trained on."
        )
    sources = [run.open_data(spec, reading) for spec in (held_out, shifted) if spec is not None]
    for source in sources:
        check_labelled(source)
    ifc = run.load_predictor(*sources)
    calibration = ifc.calibrate(*(source.batches() for source in sources))
    run.save(ifc)
    written = {path: "the run with its calibration"}
    if figure is not None:
        plot_reliability(calibration.curves, figure)
        written[figure] = "cross-validated reliability curves"
    metrics = held_out_metrics(calibration)
    facts = {
        "run": path,
        "held_out": held_out,
        "shifted": shifted,
        "temperature": calibration.temperature,
        "alpha": calibration.alpha,
        "has_gain": calibration.has_gain,
        "metrics": metrics,
        "settings": dict(calibration.settings),
    }
    return Outcome(
        facts,
        [paragraph(f"{calibration.headline} NLL is in nats."), metric_table("cross-validated", metrics)],
        written,
        {
            options.command_line("predict", path, "DATA", model=model): "calibrated probabilities of new inputs",
            options.command_line("predict", path, "DATA", model=model, coverage=0.95): "prediction sets",
        },
    )


def held_out_metrics(calibration: Calibration) -> dict[str, dict[str, float]]:
    """Return the cross-validated metrics of every form of the distribution."""
    rows = calibration.frame.to_dict("records")
    return {str(row["form"]): {metric: float(row[metric]) for metric in METRICS} for row in rows}
