"""``ifcomp predict``: calibrated probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from ifcomp.cli import options
from ifcomp.cli.output import TABLE_SUFFIXES, Outcome, check_target, class_name, metric_table, paragraph, write_table
from ifcomp.errors import NotCalibratedError, SettingError

if TYPE_CHECKING:
    import pandas as pd

    from ifcomp.cli.run import Predictions

EPILOG = "[bold]Example:[/bold] ifcomp predict run.ifcomp npz:new.npz --coverage 0.95"


def predict(
    path: options.RunPath,
    data: Annotated[str, typer.Argument(metavar="DATA", help=f"Inputs to predict: {options.DATA_FORM}.")],
    model: options.ModelOptions,
    reading: options.DataOptions,
    out: Annotated[
        str, typer.Option(metavar="FILE", help="Table with one row per input: .csv or .parquet.")
    ] = "predictions.csv",
    coverage: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Also write prediction sets that contain the class with this probability, such as 0.95.",
            show_default="no sets",
        ),
    ] = None,
    alpha: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Weight of an example, relative to one training example.",
            show_default="chosen by 'ifcomp calibrate'",
        ),
    ] = None,
    free_argmax: Annotated[
        bool,
        typer.Option("--free-argmax", help="Use the form of the paper, which can change the predicted class."),
    ] = False,
    no_labels: Annotated[bool, typer.Option("--no-labels", help="Ignore the labels of the data.")] = False,
) -> Outcome:
    """Predict calibrated probabilities p_0 ... p_K-1, and the class and confidence of the model.

    If the data has labels, the metrics of both are printed. Prediction sets need 'ifcomp calibrate'.
    """
    from ifcomp.cli.run import open_run, predict_source

    _check_options(coverage, alpha)
    run = open_run(path, model)
    check_target(out, TABLE_SUFFIXES, run.inputs(data))
    source = run.open_data(data, reading, labelled=not no_labels)
    ifc = run.load_predictor(source)
    if coverage is not None and ifc.calibration is None:
        raise NotCalibratedError(f"--coverage needs a calibration: call 'ifcomp calibrate {path} HELD_OUT' first.")
    predictions = predict_source(ifc, source, alpha, not free_argmax, coverage)
    frame, descriptions = prediction_frame(predictions, run.class_names(source))
    settings = {"alpha": alpha, "free_argmax": free_argmax, "coverage": coverage, "calibration": repr(ifc.calibration)}
    write_table(out, frame, descriptions, settings, source)
    metrics = None if predictions.labels is None else predictions.metrics()
    facts = {
        "run": path,
        "data": data,
        "examples": len(frame),
        "is_calibrated": alpha is None and ifc.calibration is not None,
        "alpha": alpha,
        "coverage": coverage,
        "changed": int((frame["prediction"] != frame["model_prediction"]).sum()),
        "mean_set_size": None if coverage is None else float(frame["set_size"].mean()),
        **{name: float(frame[name].mean()) for name in ("confidence", "model_confidence")},
        "metrics": metrics,
        "covered": predictions.covered,
    }
    shown: list[RenderableType] = [paragraph(_summary(facts))]
    if metrics is not None:
        shown.append(paragraph("NLL is in nats. Smaller NLL, ECE and Brier score are better."))
        shown.append(metric_table("", metrics))
    held_out = None if ifc.detector is not None else "DATA"
    next_steps = {
        options.command_line(
            "ood", path, data, held_out=held_out, model=model, reading=reading
        ): "find unfamiliar inputs"
    }
    if alpha is None and ifc.calibration is None:
        next_steps[options.command_line("calibrate", path, "DATA", model=model)] = "calibrate the predictions"
    return Outcome(facts, shown, {out: f"{len(frame):,} rows"}, next_steps)


def _check_options(coverage: float | None, alpha: float | None) -> None:
    """Refuse values before any work is done."""
    from ifcomp.curvature.factors import check_number

    if alpha is not None:
        check_number("alpha", alpha)
    if coverage is not None and not 0 < coverage < 1:
        raise SettingError(f"--coverage must be between 0 and 1, such as 0.95, but is {coverage}.")
    if coverage is not None and alpha is not None:
        raise SettingError("--coverage uses the alpha of 'ifcomp calibrate'. Leave --alpha out.")


def _summary(facts: Mapping[str, Any]) -> str:
    kind = "without calibration" if facts["alpha"] is None else f"with alpha {facts['alpha']:g}"
    text = (
        f"Predicted {facts['examples']:,} inputs of {facts['data']} "
        f"{'with the calibration of the run' if facts['is_calibrated'] else kind}. Mean confidence: "
        f"{facts['confidence']:.3f}, {facts['model_confidence']:.3f} of the model. {facts['changed']:,} predicted "
        "classes differ."
    )
    if facts["coverage"] is not None:
        text += (
            f" Prediction sets with coverage {facts['coverage']:g} have {facts['mean_set_size']:.2f} classes on average"
        )
        covered = "" if facts["covered"] is None else f" and contain {facts['covered']:.1%} of the labels"
        text += f"{covered}. Coverage is not guaranteed under shift."
    return text


def prediction_frame(predictions: Predictions, names: Sequence[str] | None) -> tuple[pd.DataFrame, dict[str, str]]:
    """Return a table with one row per input, and the meaning of its columns."""
    import pandas as pd

    calibrated, model = predictions.calibrated.max(1), predictions.model.max(1)
    columns: dict[str, tuple[str, Any]] = {
        "index": ("position of the example in the data", range(len(predictions.model))),
        "prediction": ("most probable class of the calibrated distribution", calibrated.indices.numpy()),
    }
    if names:
        columns["prediction_name"] = ("name of that class", [class_name(k, names) for k in calibrated.indices.tolist()])
    columns |= {
        "confidence": ("its calibrated probability", calibrated.values.numpy()),
        "model_prediction": ("class predicted by the model (argmax)", model.indices.numpy()),
        "model_confidence": ("softmax probability of that class", model.values.numpy()),
    }
    if predictions.sets is not None:
        members = [
            "; ".join(class_name(label, names) for label in row.nonzero()[0]) for row in predictions.sets.numpy()
        ]
        columns["set_size"] = ("number of classes in the prediction set", predictions.sets.sum(1).numpy())
        columns["prediction_set"] = ("classes of the prediction set, separated by semicolons", members)
    for label, probability in enumerate(predictions.calibrated.T.numpy()):
        columns[f"p_{label}"] = (f"calibrated probability of class {class_name(label, names)}", probability)
    frame = pd.DataFrame({name: values for name, (_, values) in columns.items()})
    return frame, {name: meaning for name, (meaning, _) in columns.items()}
