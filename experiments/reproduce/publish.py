"""From result files to what people read: tables, plots, and one page of claims. Nothing is computed again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from matplotlib import cycler, rc_context
from matplotlib.colors import TABLEAU_COLORS
from matplotlib.figure import Figure

from experiments.reproduce.record import FILE, read, unfinished
from experiments.reproduce.study import PRESET_NAMES, Record, Study
from ifcomp.io.files import atomic_write

CLAIMS_FILE = "claims.md"
#: What `publish` writes beside a result.
TABLE, FIGURES = "table.md", {suffix: f"figure.{suffix}" for suffix in ("png", "svg")}
FILES = (TABLE, *FIGURES.values())
#: More than the usual ten: some plots have more methods.
_COLOURS = cycler(color=[*TABLEAU_COLORS.values(), "black", "gold"])
_ANSWERS = {True: "yes", False: "no", None: "cannot say"}


def publish(study: Study, record: Record, folder: Path) -> dict[str, str]:
    """Write the table and the plot of a record; returns the files with what is in them."""
    with atomic_write(folder / TABLE) as scratch:
        scratch.write_text(_page(study, record))
    figure = Figure(figsize=(8, 5), layout="constrained")
    with rc_context({"axes.prop_cycle": _COLOURS}):
        study.draw(record, figure)
    for suffix, name in FIGURES.items():
        with rc_context({"svg.hashsalt": study.name}), atomic_write(folder / name) as scratch:
            figure.savefig(scratch, format=suffix, dpi=110, metadata={"Date": None} if suffix == "svg" else None)
    return {str(folder / TABLE): "the numbers beside the paper's", str(folder / FIGURES["png"]): "the plot"}


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
    found = list(_finished(studies, results))
    for study, record in found:
        link = f"[{study.name}, {record.preset}]({study.name}/{record.preset}/table.md)"
        lines += [
            f"| {claim.claim} | {claim.paper} | {claim.ours} | {link} | {_ANSWERS[claim.holds]} |"
            for claim in study.claims(record)
        ]
    lines += ["", *_times([record for _, record in found])]
    path = results / CLAIMS_FILE
    with atomic_write(path) as scratch:
        scratch.write_text("\n".join(lines) + "\n")
    return path


def _finished(studies: Mapping[str, Study], results: Path) -> Iterator[tuple[Study, Record]]:
    """Every study with each of its finished results."""
    for name, study in studies.items():
        for preset in PRESET_NAMES:
            if (results / name / preset / FILE).exists():
                record = read(results / name / preset)
                if not unfinished(study, record):
                    yield study, record


def _times(records: Sequence[Record]) -> list[str]:
    """Minutes of every result, and of every preset."""
    rows = [[record.study, record.preset, *_minutes([record])] for record in records]
    rows += [
        ["**all**", preset, *_minutes([record for record in records if record.preset == preset])]
        for preset in dict.fromkeys(record.preset for record in records)
    ]
    words = [
        "## How long it took",
        "",
        "On one core, beside other work that slowed it down and at times stopped it: the processor's time is nearer to",
        "what a quiet machine needs (older results have only the clock's). Networks that were already",
        "trained when a study began are not in its time.",
        "",
    ]
    header = ["study", "preset", "minutes by the clock", "minutes of the processor"]
    return [*words, *markdown(header, rows).splitlines()]


def _minutes(records: Sequence[Record]) -> tuple[str, str]:
    """By the clock, and of the processor; by the clock too for a step that does not have it."""
    steps = [step for record in records for step in record.steps.values()]
    clock = sum(step["seconds"] for step in steps)
    work = sum(step.get("processor_seconds", step["seconds"]) for step in steps)
    return f"{clock / 60:.1f}", f"{work / 60:.1f}"


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
