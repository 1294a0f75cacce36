"""``ifcomp report``: everything about a run in one HTML file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ifcomp.cli import options
from ifcomp.cli.command import command
from ifcomp.cli.output import Outcome, check_target, paragraph
from ifcomp.errors import SettingError

if TYPE_CHECKING:
    from ifcomp import IFComp
    from ifcomp.cli.opened import Run
    from ifcomp.data.sources import Source
    from ifcomp.report import ComplexityGroups, ReliabilityPair

EPILOG = "[bold]Example:[/bold] ifcomp report run.ifcomp --held-out npz:test.npz --out report.html"


@command
def report(
    run: options.Run,
    model: options.ModelChoice,
    reading: options.DataChoice,
    data: options.TrainingData = None,
    out: Annotated[str, typer.Option(metavar="FILE", help="The page, .html.")] = "report.html",
    title: Annotated[str | None, typer.Option(help="Its heading.")] = None,
    held_out: Annotated[
        str | None,
        typer.Option(metavar="DATA", help="Data like the training data that the model was not trained on."),
    ] = None,
    strange: Annotated[
        list[str] | None,
        typer.Option(metavar="DATA", help="Inputs from elsewhere to compare complexity with; can be repeated."),
    ] = None,
    calibrated: Annotated[
        str | None,
        typer.Option(
            metavar="RUN", help="Run of 'ifcomp calibrate', to show reliability on the held-out data with and without."
        ),
    ] = None,
    noise_rate: options.NoiseRate = None,
    fraction: options.Fraction = None,
) -> Outcome:
    """Write one HTML file with the suspicious labels, calibration, complexity and coverage; it needs nothing else."""
    from ifcomp.cli.auditing import audit_run, check_shares, write_report
    from ifcomp.cli.opened import check_labelled, find_run
    from ifcomp.tasks.mislabel import AUDIT_DAMPING

    check_target(out, (".html",))
    check_shares(fraction, noise_rate)
    if calibrated is not None and held_out is None:
        raise SettingError("--calibrated needs --held-out, the labelled data on which reliability is shown.")
    opened = find_run(run, model)
    source = opened.source(data, reading)
    check_labelled(source)
    others = {spec: opened.source(spec, reading, labelled=False, beside=True) for spec in strange or ()}
    familiar = None if held_out is None else opened.source(held_out, reading, beside=True)
    ifc = opened.predictor(source, *others.values(), *([familiar] if familiar else []))
    reliability = None
    if calibrated is not None and familiar is not None:
        check_labelled(familiar)
        reliability = reliability_of(find_run(calibrated, model), familiar)
    audit = audit_run(ifc, source, AUDIT_DAMPING, fraction, noise_rate)
    parts: dict[str, Any] = {"calibration": reliability}
    if familiar is not None or others:
        parts["complexity"] = complexity_of(ifc, familiar or source, others)
    write_report(out, opened, ifc, source, audit, AUDIT_DAMPING, title, parts)
    suspects = len(audit.suspects)
    facts = {"run": run, "data": source.spec, "examples": len(audit.frame), "suspects": suspects}
    said = f"{suspects:,} of {len(audit.frame):,} labels of {source.spec} are suspects."
    return Outcome(facts, [paragraph(said)], {out: "the report: open it in a browser"})


def reliability_of(calibrated: Run, held_out: Source) -> ReliabilityPair:
    """Curves with and without what was calibrated."""
    from ifcomp.cli.probabilities import CALIBRATED, OWN, probabilities
    from ifcomp.report import ReliabilityPair

    alpha, keep_argmax = calibrated.calibration()
    curves = probabilities(calibrated.predictor(held_out), held_out, alpha, keep_argmax).curves()
    return ReliabilityPair(curves[OWN], curves[CALIBRATED], OWN, CALIBRATED)


def complexity_of(ifc: IFComp, familiar: Source, others: dict[str, Source]) -> ComplexityGroups:
    """Bounded complexity of familiar and of other inputs in nats."""
    from ifcomp.report import ComplexityGroups
    from ifcomp.tasks.ood import OOD_COLUMN, OOD_DAMPING

    def complexity(source: Source) -> Any:
        return ifc.score(source.unlabelled().batches(), damping=OOD_DAMPING).column(OOD_COLUMN)

    return ComplexityGroups(
        complexity(familiar), {name: complexity(source) for name, source in others.items()}, familiar.spec
    )
