"""From result files to what people read: tables, plots, and one page of claims. Nothing is computed again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from experiments.reproduce.record import FILE, read, unfinished
from experiments.reproduce.study import PRESET_NAMES, Record, Study
from ifcomp.files import written_atomically

CLAIMS_FILE = "claims.md"
_ANSWERS = {True: "yes", False: "no", None: "cannot say"}


def publish(study: Study, record: Record, folder: Path) -> dict[str, str]:
    """Write the table and the plot of a record; returns the files with what is in them."""
    texts = {"table.md": _page(study, record)}
    for name, text in texts.items():
        with written_atomically(folder / name) as scratch:
            scratch.write_text(text)
    figure = Figure(figsize=(8, 5), layout="constrained")
    study.draw(record, figure)
    for suffix in ("png", "svg"):
        with rc_context({"svg.hashsalt": study.name}), written_atomically(folder / f"figure.{suffix}") as scratch:
            figure.savefig(scratch, format=suffix, dpi=110, metadata={"Date": None} if suffix == "svg" else None)
    return {str(folder / "table.md"): "the numbers beside the paper's", str(folder / "figure.png"): "the plot"}


def write_claims(studies: Mapping[str, Study], results: Path) -> Path:
    """One row for each claim of the paper that any finished result under the folder speaks to."""
    lines = [
        "# The paper's claims, and what we find",
        "",
        "Made from the result files in this folder by `ifcomp reproduce`; each row links to its numbers. AUROC and",
        "accuracy in percent. Where our network or data differ from the paper's, the preset says so.",
        "",
        "| claim | paper | ours | study, preset | holds here |",
        "|---|---|---|---|---|",
    ]
    for name, study in studies.items():
        for preset in PRESET_NAMES:
            if (results / name / preset / FILE).exists():
                record = read(results / name / preset)
                if unfinished(study, record):
                    continue
                link = f"[{name}, {preset}]({name}/{preset}/table.md)"
                lines += [
                    f"| {claim.claim} | {claim.paper} | {claim.ours} | {link} | {_ANSWERS[claim.holds]} |"
                    for claim in study.claims(record)
                ]
    path = results / CLAIMS_FILE
    with written_atomically(path) as scratch:
        scratch.write_text("\n".join(lines) + "\n")
    return path


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A table."""
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def _page(study: Study, record: Record) -> str:
    last, seconds = record.runs[-1], sum(step["seconds"] for step in record.steps.values())
    hardware = last["hardware"]
    return (
        f"# {study.title}\n\nPreset `{record.preset}`, {last['date'][:10]}: `{last['command']}`. {seconds:,.0f} s, "
        f"{hardware['threads']} thread of {hardware['processor']}, torch {last['versions']['torch']}; other work ran "
        f"beside it. All numbers and settings: [{FILE}]({FILE}).\n\n{study.table(record)}\n![figure](figure.svg)\n"
    )
