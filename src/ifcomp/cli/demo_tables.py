"""The demo's result as tables on a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from ifcomp.cli.demo_results import Audit, Calibration, Demo, OutOfDistribution, Ranking, Shifted, Suspect

SHADES = " ░▒▓█"

#: From this width on five digits fit side by side with two characters a pixel, which makes pixels square.
WIDE_ENOUGH = 96

OWN_MODEL = """\
from ifcomp import IFComp
from ifcomp.tasks.mislabel import AUDIT_DAMPING, audit_labels
from ifcomp.tasks.ood import OOD_DAMPING
from ifcomp.tuning import tune

ifc = IFComp(model).fit(loader)  # two passes; the loader must not shuffle
audit_labels(ifc.score(loader, damping=AUDIT_DAMPING)).suspects
ifc.bounded_complexity(x, damping=OOD_DAMPING)  # larger = less familiar
tune(model, loader, held_out_loader).predict_proba(x)  # calibrated"""


def render(result: Demo, console: Console) -> None:
    """Show everything."""
    for part in _parts(result, console.width):
        console.print(part)


def _parts(result: Demo, width: int) -> Iterator[RenderableType]:
    yield _opening(result)
    yield from _audit(result.audit)
    yield _suspects(result.audit.suspects, 2 if width >= WIDE_ENOUGH else 1)
    yield _cleaned(result)
    yield from _strangers(result.out_of_distribution)
    yield from _calibration(result.calibration)
    yield Text(f"\nDone in {result.seconds:.0f} s, seed {result.seed}. Next, with your own model:\n", style="bold")
    yield Padding(
        Syntax(OWN_MODEL, "python", theme="ansi_dark", background_color="default"), (0, 0, 1, 2), expand=False
    )


def _opening(result: Demo) -> Text:
    networks, audit = result.networks, result.audit
    return Text(
        f"\n{audit.examples} handwritten digits of 8x8 pixels, {audit.flipped} of them with a wrong label, and a small "
        f"CNN with BatchNorm: {networks.parameters:,} parameters, {networks.covered:,} of them covered by the fit, "
        f"test accuracy {networks.accuracy:.1%}. It has memorised {networks.memorised:.0%} of the wrong labels."
    )


def _heading(text: str) -> Text:
    return Text(f"\n{text}", style="bold cyan")


def _note(text: str) -> Text:
    return Text(text, style="dim")


def _table(*columns: str) -> Table:
    """The first column holds names, the others numbers."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for position, column in enumerate(columns):
        table.add_column(column, justify="right" if position else "left", no_wrap=True, vertical="bottom")
    return table


def _indented(content: RenderableType) -> Padding:
    return Padding(content, (1, 0, 1, 2), expand=False)


def _audit(audit: Audit) -> Iterator[RenderableType]:
    yield _heading("1. Which labels are wrong?")
    yield _note("Training examples sorted by label complexity in nats; larger = more suspicious.")
    table = _table("sorted by", f"wrong labels in the first {audit.flipped}", "AUROC")

    def add(name: str, ranking: Ranking) -> None:
        table.add_row(name, f"{ranking.found:g}", f"{ranking.auroc:.3f}")

    add("label complexity (ifcomp)", audit.complexity)
    add("plain loss", audit.loss)
    add("chance", audit.chance)
    yield _indented(table)


def _suspects(suspects: list[Suspect], across: int) -> RenderableType:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for _ in suspects:
        table.add_column(no_wrap=True, min_width=13)
    table.add_row(*(drawing(suspect.pixels, across) for suspect in suspects))
    table.add_row(*(_verdict(suspect) for suspect in suspects))
    return Padding(table, (0, 0, 1, 2), expand=False)


def drawing(pixels: list[list[int]], across: int) -> Text:
    """An image of values in 0 ... 16 as blocks, ``across`` characters a pixel."""
    lines = ("".join(SHADES[(value * len(SHADES)) // 17] * across for value in row) for row in pixels)
    return Text("\n".join(lines))


def _verdict(suspect: Suspect) -> Text:
    truth = ("wrong label", "red") if suspect.flipped else ("original label", "green")
    return Text.assemble(
        (f"labelled {suspect.given}", "bold"),
        f"\nsuggested {suspect.suggested}\n{suspect.complexity:.1f} nats\n",
        truth,
    )


def _cleaned(result: Demo) -> Text:
    return Text(
        f"The audit calls {result.audit.suspected} labels suspects, and {result.audit.suspected_flipped} of them are "
        "wrong. Trained again, for longer, without these suspects, the network has a test accuracy of "
        f"{result.networks.accuracy_cleaned:.1%}. The rest is about that network."
    )


def _strangers(found: OutOfDistribution) -> Iterator[RenderableType]:
    yield _heading("2. Is this input like anything the model knows?")
    yield _note("AUROC against clean test digits. Complexity in nats; larger = less like the training data.")
    table = _table("inputs", "bounded complexity (ifcomp)", "max softmax")
    for row in found.rows:
        table.add_row(row.name, f"{row.complexity:.3f}", f"{row.max_softmax:.3f}")
    yield _indented(table)
    tried = ", ".join(f"{damping.relative:g}" for damping in found.candidates)
    yield _note(
        f"damping = Relative({found.damping.relative:g}), chosen from {tried} on validation digits against "
        f"{_and(found.chosen_on)}."
    )


def _calibration(found: Calibration) -> Iterator[RenderableType]:
    yield _heading("3. How far can a prediction be trusted?")
    yield _note("Test digits, also under shift. ECE (20 bins of equal size) and NLL (nats): smaller is better.")
    compared = ("softmax", "temp.", "ifcomp")
    table = _table(
        "test digits",
        *(f"{'ECE' if position == 0 else ''}\n{name}" for position, name in enumerate(compared)),
        *(f"{'NLL' if position == 0 else ''}\n{name}" for position, name in enumerate(compared)),
        "accuracy\nsoftmax",
        "\nifcomp",
    )
    for row in found.rows:
        table.add_row(*_cells(row))
    yield _indented(table)
    tried = ", ".join(f"{alpha.value:g}" for alpha in found.candidates)
    yield _note(
        f"alpha = {found.alpha.value:g}, chosen from {tried} by NLL on validation digits ({_and(found.chosen_on)}), "
        f"where it may cost {found.accuracy_cost:.0%} of accuracy. temp. is softmax at temperature "
        f"{1 / found.inverse_temperature:.2g}, chosen there too. {_summary(found.rows)}"
    )


def _summary(rows: list[Shifted]) -> str:
    ece = sum(row.pnml.ece < row.softmax.ece for row in rows)
    nll = sum(row.pnml.nll < row.softmax.nll for row in rows)
    return f"Beside softmax, ifcomp has the smaller ECE in {ece} and the smaller NLL in {nll} of {len(rows)} rows."


def _cells(row: Shifted) -> list[str]:
    compared = (row.softmax, row.temperature, row.pnml)
    return [
        row.name,
        *(f"{quality.ece:.3f}" for quality in compared),
        *(f"{quality.nll:.3f}" for quality in compared),
        *(f"{quality.accuracy:.1%}" for quality in (row.softmax, row.pnml)),
    ]


def _and(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"
