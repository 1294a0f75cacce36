"""``ifcomp predict``: calibrated probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType

from ifcomp.cli import options
from ifcomp.cli.output import TABLE_SUFFIXES, Outcome, check_target, class_name, metric_table, paragraph, write_table

if TYPE_CHECKING:
    import pandas as pd

    from ifcomp.cli.run import Predictions

EPILOG = "[bold]Example:[/bold] ifcomp predict calibrated.ifcomp npz:new.npz --out predictions.csv"


def predict(
    path: options.RunPath,
    data: Annotated[str, typer.Argument(metavar="DATA", help=f"Inputs to predict: {options.DATA_FORM}.")],
    model: options.ModelOptions,
    reading: options.DataOptions,
    out: Annotated[
        str, typer.Option(metavar="FILE", help="Table with one row per input: .csv or .parquet.")
    ] = "predictions.csv",
    alpha: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Weight of an example, relative to one training example.",
            show_default="chosen by 'ifcomp calibrate'",
        ),
    ] = None,
    keep_argmax: Annotated[
        bool | None,
        typer.Option(
            "--keep-argmax/--free-argmax", help="Never change the predicted class.", show_default="as calibrated"
        ),
    ] = None,
    no_labels: Annotated[bool, typer.Option("--no-labels", help="Ignore the labels of the data.")] = False,
) -> Outcome:
    """Predict calibrated probabilities p_0 ... p_K-1, beside the class and confidence of the model.

    If the data has labels, the metrics of both are printed.
    """
    from ifcomp.cli.run import open_run, predict_source
    from ifcomp.scoring import ScoreOptions

    check_target(out, TABLE_SUFFIXES)
    run = open_run(path, model)
    weight, kept = run.calibration() if alpha is None else (alpha, bool(run.record and run.record.keep_argmax))
    kept = kept if keep_argmax is None else keep_argmax
    ScoreOptions(alpha=weight)  # checks alpha before any work is done
    source = run.open_data(data, reading, labelled=not no_labels)
    predictions = predict_source(run.load_predictor(source), source, weight, kept)
    frame, descriptions = prediction_frame(predictions, run.class_names(source))
    write_table(out, frame, descriptions, {"alpha": weight, "keep_argmax": kept}, source)
    changed = int((frame["prediction"] != frame["model_prediction"]).sum())
    confidences = {name: float(frame[name].mean()) for name in ("confidence", "model_confidence")}
    metrics = None if predictions.labels is None else predictions.metrics()
    summary = (
        f"Predicted {len(frame):,} inputs of {data} with alpha {weight:g}. "
        f"Mean confidence: {confidences['confidence']:.3f} calibrated, {confidences['model_confidence']:.3f} of the "
        f"model. {changed:,} predicted classes differ."
    )
    shown: list[RenderableType] = [paragraph(summary)]
    if metrics is not None:
        shown.append(paragraph("NLL is in nats. Smaller NLL, ECE and Brier score are better."))
        shown.append(metric_table("", metrics))
    facts = {
        "run": path,
        "data": data,
        "examples": len(frame),
        "alpha": weight,
        "keep_argmax": kept,
        "changed": changed,
        **confidences,
        "metrics": metrics,
    }
    next_steps = {f"ifcomp ood {path} {data}": "find inputs unlike the training data"}
    return Outcome(facts, shown, {out: f"{len(frame):,} rows"}, next_steps)


def prediction_frame(predictions: Predictions, names: Sequence[str] | None) -> tuple[pd.DataFrame, dict[str, str]]:
    """Return a table with one row per input, and the meaning of its columns."""
    import pandas as pd

    calibrated, model = predictions.calibrated.max(1), predictions.model.max(1)
    columns = {
        "index": ("position of the example in the data", range(len(predictions.model))),
        "prediction": ("most probable class of the calibrated distribution", calibrated.indices.numpy()),
        "confidence": ("its calibrated probability", calibrated.values.numpy()),
        "model_prediction": ("class predicted by the model (argmax)", model.indices.numpy()),
        "model_confidence": ("softmax probability of that class", model.values.numpy()),
    }
    for label, probability in enumerate(predictions.calibrated.T.numpy()):
        columns[f"p_{label}"] = (f"calibrated probability of class {class_name(label, names)}", probability)
    frame = pd.DataFrame({name: values for name, (_, values) in columns.items()})
    return frame, {name: meaning for name, (meaning, _) in columns.items()}
