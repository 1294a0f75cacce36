"""``ifcomp report``: the results of a run in one HTML file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ifcomp.cli import options
from ifcomp.cli.output import Outcome, check_target, paragraph

if TYPE_CHECKING:
    from ifcomp import IFComp
    from ifcomp.cli.cache import Cache
    from ifcomp.cli.run import Run
    from ifcomp.data.sources import Source
    from ifcomp.report import ComplexityGroups, ReliabilityPair
    from ifcomp.tasks.audit import LabelAudit

EPILOG = "[bold]Example:[/bold] ifcomp report run.ifcomp --held-out npz:test.npz --out report.html"


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
    from ifcomp.cli.cache import open_cache
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
    cache = open_cache(run, ifc)
    audit = cache.audit(source, None, lambda: ifc.audit(source.batches()))
    if held_out_source is not None or ood_sources:
        parts["ood"] = _complexity(ifc, cache, held_out_source or source, ood_sources)
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


def _complexity(
    ifc: IFComp, cache: Cache, in_distribution: Source, ood_sources: Mapping[str, Source]
) -> ComplexityGroups:
    """Return the bounded complexity of in-distribution and OOD inputs in nats."""
    from ifcomp.report import ComplexityGroups
    from ifcomp.tasks.ood import OOD_DAMPING

    def complexity(source: Source) -> Any:
        inputs, settings = source.unlabelled(), {"damping": repr(OOD_DAMPING)}
        scores = cache.scores(inputs, settings, lambda: ifc.score(inputs.batches(), damping=OOD_DAMPING))
        return scores.column("bounded_complexity")

    ood = {name: complexity(source) for name, source in ood_sources.items()}
    return ComplexityGroups(complexity(in_distribution), ood, in_distribution.spec)


def write_report(
    path: str,
    run: Run,
    ifc: IFComp,
    source: Source,
    audit: LabelAudit,
    *,
    reference: Source | None = None,
    title: str | None = None,
    **parts: Any,
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
        **parts: ``calibration`` and ``ood`` of `IFComp.report`.
    """
    from dataclasses import replace

    from ifcomp.report import current_provenance

    if not run.is_training_data(source.spec):
        audit = replace(audit, influential=None)
    named = {} if run.path is None else {"run": run.path}
    ifc.report(
        path,
        title=title or f"Labels of {source.spec}",
        audit=audit,
        previews=source.preview,
        reference_previews=None if reference is None else reference.preview,
        class_names=run.class_names(source),
        provenance=current_provenance(
            **named, model=run.model, weights=run.weights, data=source.spec, seed=ifc.settings.seed
        ),
        **parts,
    )
