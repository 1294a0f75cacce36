"""``ifcomp report``: the results of a run in one HTML file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ifcomp.cli import options
from ifcomp.cli.output import Outcome, check_target, paragraph
from ifcomp.errors import SettingError

if TYPE_CHECKING:
    from ifcomp import IFComp
    from ifcomp.cli.cache import Cache
    from ifcomp.cli.run import Run
    from ifcomp.data.sources import Source
    from ifcomp.detection import OODDetector
    from ifcomp.report import OODScores, ReliabilityPair
    from ifcomp.report.results import TrainingData
    from ifcomp.tasks.audit import LabelAudit

EPILOG = "[bold]Example:[/bold] ifcomp report run.ifcomp --ood folder:new --out report.html"


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
            help="Labelled data that the model was not trained on, for the calibration.",
            show_default="the cross-validated figures of 'ifcomp calibrate'",
        ),
    ] = None,
    ood: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DATA", help="Inputs that the detector of the run scores, see 'ifcomp ood'; can be repeated."
        ),
    ] = None,
) -> Outcome:
    """Write one self-contained HTML file with suspicious labels, calibration, OOD scores and coverage."""
    from ifcomp.cli.cache import open_cache
    from ifcomp.cli.ood import stored_detector
    from ifcomp.cli.run import check_labelled, open_run
    from ifcomp.report import training_data_of

    run = open_run(path, model)
    check_target(out, (".html",), run.inputs(data, held_out, *(ood or ())))
    source = run.open_data(data, reading)
    check_labelled(source)
    ood_sources = [run.open_data(spec, reading, labelled=False, secondary=True) for spec in ood or ()]
    held_out_source = None if held_out is None else run.open_data(held_out, reading, secondary=True)
    ifc = run.load_predictor(source, *ood_sources, *([held_out_source] if held_out_source else []))
    cache = open_cache(run, ifc)
    parts: dict[str, Any] = {"calibration": ifc.calibration}
    if held_out_source is not None:
        parts["calibration"] = _reliability(ifc, held_out_source, path)
    detector = stored_detector(ifc, path) if ood_sources else None
    audit = cache.audit(source, None, lambda: ifc.audit(source.batches()))
    if detector is not None:
        training = None
        if run.is_training_data(source.spec) and ifc.factors is not None:
            training = training_data_of(audit, ifc.factors.count, source.preview)
        parts["ood"] = _ood_scores(detector, cache, ood_sources, training)
    write_report(out, run, ifc, source, audit, reading, title=title, **parts)
    facts = {"headline": audit.headline, "examples": len(audit.frame), "suspects": len(audit.suspects)}
    return Outcome(
        {"run": path, "data": source.spec, **facts},
        [paragraph(audit.headline)],
        {out: "the report: open it in a browser"},
    )


def _reliability(ifc: IFComp, held_out: Source, path: str) -> ReliabilityPair:
    """Return the reliability curves of the model and of its calibration on held-out data."""
    from ifcomp.cli.run import check_labelled, predict_source
    from ifcomp.report import ReliabilityPair

    if ifc.calibration is None:
        raise SettingError(
            f"--held-out shows the calibration on other data, but '{path}' is not calibrated. Run 'ifcomp calibrate "
            f"{path} DATA' first."
        )
    check_labelled(held_out)
    curves = predict_source(ifc, held_out).curves()
    return ReliabilityPair(curves["model"], curves["calibrated"], "model", "calibrated")


def _ood_scores(
    detector: OODDetector, cache: Cache, sources: Sequence[Source], training: TrainingData | None
) -> OODScores:
    """Return the scores of held-out and new inputs, and the most surprising flagged inputs of each source."""
    from ifcomp.report import OODScores, flagged_examples

    tables = [cache.ood_table(source, detector) for source in sources]
    new = {source.spec: table.frame["score"].to_numpy() for source, table in zip(sources, tables, strict=True)}
    examples = [
        example
        for source, table in zip(sources, tables, strict=True)
        for example in flagged_examples(table, source.spec, source.preview, training)
    ]
    return OODScores(detector.rule.held_out_scores, new, detector.threshold, detector.rule.title, examples)


def write_report(
    path: str,
    run: Run,
    ifc: IFComp,
    source: Source,
    audit: LabelAudit,
    reading: options.DataOptions,
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
        reading: How the data was read.
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
        apply_command=_apply_command(source, run.class_names(source), run.label_column(source.spec, reading)),
        **parts,
    )


def _apply_command(source: Source, names: Sequence[str] | None, label_column: str | None) -> str:
    """Return the command that carries out the decisions about a source."""
    from ifcomp.data.corrections import KINDS

    prefix, _, path = source.spec.partition(":")
    if prefix not in KINDS:
        return options.command_line("apply", "decisions.csv", data="DATA", out="FILE")
    kind, stem = KINDS[prefix], os.path.splitext(os.path.basename(path.rstrip("/")))[0]
    out = "moves.csv" if kind.is_folder else f"{stem}-corrected{kind.suffix}"
    by_name = any(name.isdecimal() for name in names or ())  # such a name could be the index of another class
    return options.command_line(
        "apply", "decisions.csv", data=source.spec, out=out, label_column=label_column, by_name=by_name
    )
