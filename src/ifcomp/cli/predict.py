"""``ifcomp predict``: calibrated probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType

from ifcomp.cli import options
from ifcomp.cli.command import command
from ifcomp.cli.output import TABLE_SUFFIXES, Outcome, check_target, class_name, paragraph, table, write_table

if TYPE_CHECKING:
    import pandas as pd

    from ifcomp.cli.probabilities import Probabilities

EPILOG = "[bold]Example:[/bold] ifcomp predict calibrated.ifcomp npz:new.npz --out predictions.csv"


@command
def predict(
    run: options.Run,
    data: Annotated[str, typer.Argument(metavar="DATA", help=f"What to predict: {options.DATA_FORM}.")],
    model: options.ModelChoice,
    reading: options.DataChoice,
    out: Annotated[str, typer.Option(metavar="FILE", help="A row an input: .parquet or .csv.")] = "predictions.parquet",
    alpha: Annotated[
        float | None,
        typer.Option(
            min=0, help="Weight of an example beside a training example.", show_default="what 'ifcomp calibrate' chose"
        ),
    ] = None,
    keep_argmax: Annotated[
        bool | None,
        typer.Option("--keep-argmax/--free-argmax", help="Never change the class.", show_default="as calibrated"),
    ] = None,
    no_labels: Annotated[
        bool, typer.Option("--no-labels", help="Do not use the labels of the data, if it has any.")
    ] = False,
) -> Outcome:
    """Predict calibrated probabilities, p_0 ... p_K-1, beside the model's own class and confidence.

    With labels it also says how good both are.
    """
    from ifcomp.cli.probabilities import METRICS, metric_rows, probabilities
    from ifcomp.cli.run import find_run
    from ifcomp.scoring import ScoreOptions

    check_target(out, TABLE_SUFFIXES)
    opened = find_run(run, model)
    chosen = opened.calibration() if alpha is None else (alpha, bool(opened.record and opened.record.keep_argmax))
    weight, kept = chosen[0], chosen[1] if keep_argmax is None else keep_argmax
    ScoreOptions(alpha=weight)
    source = opened.source(data, reading, labelled=not no_labels)
    found = probabilities(opened.predictor(source), source, weight, kept)
    frame, descriptions = prediction_frame(found, opened.class_names(source))
    write_table(out, frame, descriptions, {"alpha": weight, "keep_argmax": kept}, source)
    changed = int((frame["prediction"] != frame["model_prediction"]).sum())
    confidences = {name: float(frame[name].mean()) for name in ("confidence", "model_confidence")}
    metrics = None if found.labels is None else found.summaries()
    said = (
        f"Predicted {len(frame):,} inputs of {data} with alpha {weight:g}. "
        f"Mean confidence {confidences['confidence']:.3f}, the model's own {confidences['model_confidence']:.3f}; "
        f"{changed:,} predicted classes differ."
    )
    shown: list[RenderableType] = [paragraph(said)]
    if metrics is not None:
        shown.append(paragraph("NLL in nats; of NLL, ECE and Brier score smaller is better."))
        shown.append(table(("", *METRICS), metric_rows(metrics)))
    facts = {"run": run, "data": data, "examples": len(frame), "alpha": weight, "keep_argmax": kept}
    facts |= {"changed": changed, **confidences, "metrics": metrics}
    next_steps = {f"ifcomp ood {run} {data}": "which of these inputs are unlike the training data"}
    return Outcome(facts, shown, {out: f"{len(frame):,} rows"}, next_steps)


def prediction_frame(found: Probabilities, names: Sequence[str] | None) -> tuple[pd.DataFrame, dict[str, str]]:
    """One row an input, and what the columns mean."""
    import pandas as pd

    top, own = found.calibrated.max(1), found.own.max(1)
    columns = {
        "index": ("position of the example in the data", range(len(found.own))),
        "prediction": ("the most probable class, calibrated", top.indices.numpy()),
        "confidence": ("its calibrated probability", top.values.numpy()),
        "model_prediction": ("the model's class (argmax)", own.indices.numpy()),
        "model_confidence": ("the model's own probability of that class", own.values.numpy()),
    }
    for label, probability in enumerate(found.calibrated.T.numpy()):
        columns[f"p_{label}"] = (f"calibrated probability of class {class_name(label, names)}", probability)
    frame = pd.DataFrame({name: values for name, (_, values) in columns.items()})
    return frame, {name: meaning for name, (meaning, _) in columns.items()}
