"""``ifcomp selftest``: errors and times of small models on a device."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from ifcomp.cli.output import FAILED, Outcome, paragraph, table

if TYPE_CHECKING:
    from ifcomp.selftest import CaseResult

EPILOG = "[bold]Example:[/bold] ifcomp selftest --device cuda"

_COLUMNS = ("model", "precision", "largest error", "limit", "fit ms", "score ms", "result")


def selftest(
    device: Annotated[str, typer.Option(help="Device to test, such as cpu, cuda:0 or mps.")] = "cpu",
    cases: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Models to test: package.module:factory, a function that returns a list of "
            "ifcomp.selftest_oracle.SelftestCase.",
            show_default="small models of common layers",
        ),
    ] = None,
) -> Outcome:
    """Check the results of small models on a device against dense gradients on the CPU in float64.

    Every model is fitted and scored in float32 and, where the device has it, in float64. Influence and second moments
    are compared with autograd; scores and fits with those of the CPU; a batch of 8 with batches of 1; saved factors
    with the original. Errors are relative to the largest value. The exit code is 1 if an error exceeds its limit.
    """
    import torch

    from ifcomp._version import __version__
    from ifcomp.selftest import run_selftest
    from ifcomp.selftest_oracle import CASES

    results = run_selftest(device, CASES if cases is None else _load_cases(cases))
    failed = [result for result in results if result.failed]
    facts = {
        "device": device,
        "versions": {"ifcomp": __version__, "torch": torch.__version__},
        "passed": not failed,
        "results": [{**asdict(result), "failed": result.failed} for result in results],
    }
    return Outcome(facts, _shown(device, results, failed), exit_code=FAILED if failed else 0)


def _load_cases(spec: str) -> list[Any]:
    from ifcomp.data.factories import call_factory
    from ifcomp.errors import SettingError
    from ifcomp.selftest_oracle import SelftestCase

    cases = call_factory(spec, "cases", SettingError)
    if not isinstance(cases, list | tuple) or not cases or not all(isinstance(case, SelftestCase) for case in cases):
        raise SettingError(f"'{spec}' must return a list of at least one ifcomp.selftest_oracle.SelftestCase.")
    return list(cases)


def _shown(device: str, results: list[CaseResult], failed: list[CaseResult]) -> list[RenderableType]:
    rows = [
        (
            result.name,
            result.dtype,
            f"{result.errors[result.worst]:.1e}",
            f"{result.limits[result.worst]:.0e}",
            *(f"{1000 * seconds:.1f}" for seconds in (result.fit_seconds, result.score_seconds)),
            "FAILED" if result.failed else "passed",
        )
        for result in results
    ]
    shown: list[RenderableType] = [table(_COLUMNS, rows, left=2)]
    if not failed:
        return [*shown, paragraph(f"All {len(results)} results on {device} are within their limits.")]
    lines = [
        f"{result.name}, {result.dtype}, {check}: "
        + (result.exceptions.get(check) or f"error {result.errors[check]:.1e}, limit {result.limits[check]:.0e}")
        for result in failed
        for check in result.failed
    ]
    advice = (
        f"{len(failed)} of {len(results)} results on {device} failed. Do not use this device; results on the CPU "
        "are not affected. Please report this with the output of the same command with --json."
    )
    return [*shown, paragraph("\n".join(lines)), paragraph(advice)]
