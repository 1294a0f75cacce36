"""``ifcomp report``: the results of a run in one HTML file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ifcomp.cli import options
from ifcomp.cli.output import Outcome, check_target, paragraph

if TYPE_CHECKING:
    from ifcomp import IFComp
    from ifcomp.cli.run import Run
    from ifcomp.data.sources import Source
    from ifcomp.report import ComplexityGroups, LayerNeighbours, ReliabilityPair, TrainingExample
    from ifcomp.tasks.audit import LabelAudit

EPILOG = "[bold]Example:[/bold] ifcomp report run.ifcomp --held-out npz:test.npz --out report.html"

#: Largest number of suspicious examples with a preview.
MAX_PREVIEWS = 200

#: Largest number of layers in which a suspect has neighbours, and of neighbours per layer.
MAX_LAYERS = 3
MAX_NEIGHBOURS = 4


def report(
    path: options.RunPath,
    model: options.ModelOptions,
    reading: options.DataOptions,
    data: options.TrainingData = None,
    out: Annotated[str, typer.Option(metavar="FILE", help="The page, .html.")] = "report.html",
    title: Annotated[str | None, typer.Option(help="Heading of the page.")] = None,
    held_out: Annotated[
        str | None,
        typer.Option(
            metavar="DATA",
            help="In-distribution data that the model was not trained on. A calibrated run needs its labels.",
        ),
    ] = None,
    strange: Annotated[
        list[str] | None,
        typer.Option(metavar="DATA", help="OOD inputs whose complexity is compared; can be repeated."),
    ] = None,
) -> Outcome:
    """Write one self-contained HTML file with suspicious labels, calibration, complexity and coverage."""
    from ifcomp.cli.run import check_labelled, open_run

    check_target(out, (".html",))
    run = open_run(path, model)
    source = run.open_data(data, reading)
    check_labelled(source)
    ood_sources = {spec: run.open_data(spec, reading, labelled=False, secondary=True) for spec in strange or ()}
    held_out_source = None if held_out is None else run.open_data(held_out, reading, secondary=True)
    ifc = run.load_predictor(source, *ood_sources.values(), *([held_out_source] if held_out_source else []))
    parts: dict[str, Any] = {}
    if ifc.calibration is not None and held_out_source is not None:
        check_labelled(held_out_source)
        parts["calibration"] = _reliability(ifc, held_out_source)
    audit = ifc.audit(source.batches())
    if held_out_source is not None or ood_sources:
        parts["complexity"] = _complexity(ifc, held_out_source or source, ood_sources)
    write_report(out, run, ifc, source, audit, title=title, **parts)
    facts = {"headline": audit.headline, "examples": len(audit.frame), "suspects": len(audit.suspects)}
    return Outcome(
        {"run": path, "data": source.spec, **facts},
        [paragraph(audit.headline)],
        {out: "the report: open it in a browser"},
    )


def _reliability(ifc: IFComp, held_out: Source) -> ReliabilityPair:
    """Return the reliability curves of the model and of its calibration on held-out data."""
    from ifcomp.cli.run import predict_source
    from ifcomp.report import ReliabilityPair

    curves = predict_source(ifc, held_out).curves()
    return ReliabilityPair(curves["model"], curves["calibrated"], "model", "calibrated")


def _complexity(ifc: IFComp, in_distribution: Source, ood_sources: Mapping[str, Source]) -> ComplexityGroups:
    """Return the bounded complexity of in-distribution and OOD inputs in nats."""
    from ifcomp.report import ComplexityGroups
    from ifcomp.tasks.ood import OOD_DAMPING

    def complexity(source: Source) -> Any:
        return ifc.score(source.unlabelled().batches(), damping=OOD_DAMPING).column("bounded_complexity")

    ood = {name: complexity(source) for name, source in ood_sources.items()}
    return ComplexityGroups(complexity(in_distribution), ood, in_distribution.spec)


# The page of an audit ------------------------------------------------------------------------------------------------


def write_report(
    path: str,
    run: Run,
    ifc: IFComp,
    source: Source,
    audit: LabelAudit,
    *,
    reference: Source | None = None,
    title: str | None = None,
    calibration: ReliabilityPair | None = None,
    complexity: ComplexityGroups | None = None,
) -> None:
    """Write the report of an audit.

    The report shows neighbours of the suspects and, after a fit on the same data, influential training examples.

    Args:
        path: File to write.
        run: The run, for names and provenance.
        ifc: Predictor of the run.
        source: The audited data.
        audit: Audit of this data.
        reference: Data on which the predictors of the audit were fitted; None stands for the audited data.
        title: Heading of the page.
        calibration: Reliability curves, as in `build_report`.
        complexity: Complexity of in-distribution and OOD inputs, as in `build_report`.
    """
    from ifcomp.report import build_report, current_provenance
    from ifcomp.tasks.audit import MAX_EXPLAINED

    previewed = audit.ranked["index"].head(MAX_PREVIEWS).tolist()
    suspects = audit.suspects["index"].head(MAX_EXPLAINED).tolist()
    named = {} if run.path is None else {"run": run.path}
    build_report(
        path,
        title=title or f"Labels of {source.spec}",
        audit=audit,
        calibration=calibration,
        complexity=complexity,
        explanations=influential_examples(audit, source) if run.is_training_data(source.spec) else None,
        neighbours=find_neighbours(audit, suspects, reference or source),
        previews=dict(zip(previewed, source.preview(previewed), strict=True)),
        class_names=run.class_names(source),
        provenance=current_provenance(
            **named, model=run.model, weights=run.weights, data=source.spec, seed=ifc.settings.seed
        ),
        coverage=None if ifc.factors is None else ifc.coverage,
        max_previews=MAX_PREVIEWS,
    )


def find_neighbours(
    audit: LabelAudit, suspects: Sequence[int], reference: Source
) -> dict[int, tuple[LayerNeighbours, ...]]:
    """Return the nearest examples of each suspect in the layers of largest weight.

    Args:
        audit: The audit.
        suspects: Positions in the audited data.
        reference: Data that the neighbours belong to.
    """
    from ifcomp.report import LayerNeighbours, Neighbour

    tables = {suspect: audit.neighbours(suspect).head(MAX_LAYERS) for suspect in suspects}
    shown = {index for rows in tables.values() for near in rows["neighbours"] for index in near[:MAX_NEIGHBOURS]}
    previews = dict(zip(sorted(shown), reference.preview(sorted(shown)), strict=True))

    def examples(indices: Sequence[int], labels: Sequence[int]) -> tuple[Neighbour, ...]:
        pairs = list(zip(indices, labels, strict=True))[:MAX_NEIGHBOURS]
        return tuple(Neighbour(index, label, previews[index]) for index, label in pairs)

    return {
        suspect: tuple(
            LayerNeighbours(row["layer"], row["weight"], examples(row["neighbours"], row["neighbour_labels"]))
            for row in rows.to_dict("records")
        )
        for suspect, rows in tables.items()
    }


def influential_examples(audit: LabelAudit, training: Source) -> dict[int, tuple[TrainingExample, ...]]:
    """Return the training examples that most support and most contradict the label of each suspect, strongest first.

    Args:
        audit: The audit.
        training: The training data.
    """
    from ifcomp.report import TrainingExample

    if audit.influential is None:
        return {}
    indices = sorted({int(index) for index in audit.influential["index"]})
    previews = dict(zip(indices, training.preview(indices), strict=True))
    return {
        int(rows["suspect"].iloc[0]): tuple(
            TrainingExample(row["index"], row["effect"], row["label"], previews[row["index"]])
            for row in rows.to_dict("records")
        )
        for _, rows in audit.influential.groupby("suspect", sort=False)
    }
