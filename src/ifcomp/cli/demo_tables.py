"""The demo's result as tables on a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from ifcomp.cli.demo_study import Audit, Calibration, Demo, OutOfDistribution, Ranking, Shifted, Suspect

SHADES = " ░▒▓█"

#: From this width on five digits fit side by side with two characters a pixel, which makes pixels square.
WIDE_ENOUGH = 97

OWN_MODEL = """\
from ifcomp import IFComp

ifc = IFComp(model).fit(train_loader)                # any PyTorch classifier that returns logits
table = ifc.score(train_loader)                      # unshuffled, so that row i is example i
print(table.frame.nlargest(20, "stochastic_complexity"))  # the labels to look at first
ifc.parametric_complexity(x)                         # larger = more unlike the training data
ifc.predict_proba(x, alpha=0.001)                    # choose alpha on held-out data
"""


def render(result: Demo, console: Console) -> None:
    """Show everything."""
    console.print(_opening(result))
    console.print(_audit_table(result.audit), _suspects_table(result.audit.suspects, console.width))
    console.print(_cleaned(result))
    console.print(_strangers_table(result.out_of_distribution))
    console.print(_calibration_table(result.calibration))
    console.print(_closing(result))


def _opening(result: Demo) -> RenderableType:
    networks = result.networks
    return Padding(
        Text(
            f"{result.training_examples} handwritten digits (8x8 pixels) of which {result.audit.flipped} got a wrong "
            f"label, a small CNN with BatchNorm ({networks.parameters:,} parameters, {networks.covered:,} covered). "
            f"Test accuracy {networks.accuracy:.1%}; it memorised {networks.memorised:.0%} of the wrong labels."
        ),
        (1, 0),
    )


def _table(title: str, caption: str, *columns: str) -> Table:
    """The first column holds names, the others numbers."""
    table = Table(
        title=title,
        caption=caption,
        title_justify="left",
        caption_justify="left",
        title_style="bold",
        caption_style="dim",
        box=box.SIMPLE_HEAD,
    )
    for position, column in enumerate(columns):
        table.add_column(column, justify="right" if position else "left", no_wrap=True)
    return table


def _audit_table(audit: Audit) -> Table:
    table = _table(
        "1  Which labels are wrong?  Training examples ranked, most suspicious first",
        "Stochastic complexity in nats, larger = more suspicious. No extra training, no cross-validation.",
        "ranked by",
        f"wrong labels in the first {audit.flipped}",
        "AUROC",
    )

    def add(name: str, ranking: Ranking) -> None:
        table.add_row(name, f"{ranking.found:g} of {audit.flipped}", f"{ranking.auroc:.3f}")

    add("stochastic complexity (ifcomp)", audit.complexity)
    add("plain loss", audit.loss)
    add("chance", audit.chance)
    return table


def _suspects_table(suspects: list[Suspect], width: int) -> Table:
    across = 2 if width >= WIDE_ENOUGH else 1
    table = Table(title="The most suspicious ones", title_justify="left", title_style="dim", box=box.SIMPLE_HEAD)
    for suspect in suspects:
        table.add_column(f"{suspect.complexity:.1f} nats", justify="left", no_wrap=True, min_width=13)
    table.add_row(*(drawing(suspect.pixels, across) for suspect in suspects))
    table.add_row(*(_verdict(suspect) for suspect in suspects))
    return table


def drawing(pixels: list[list[int]], across: int) -> Text:
    """An image of values in 0 ... 16 as blocks, ``across`` characters a pixel."""
    lines = ("".join(SHADES[(value * len(SHADES)) // 17] * across for value in row) for row in pixels)
    return Text("\n".join(lines))


def _verdict(suspect: Suspect) -> Text:
    truth = ("wrong label", "red") if suspect.flipped else ("true label", "green")
    return Text.assemble(f"labelled {suspect.given}\npredicted {suspect.predicted}\n", truth)


def _cleaned(result: Demo) -> RenderableType:
    networks = result.networks
    return Padding(
        Text(
            f"Trained again without the {result.audit.flipped} most suspicious examples: test accuracy "
            f"{networks.accuracy:.1%} -> {networks.accuracy_cleaned:.1%}. The rest is about this network."
        ),
        (1, 0),
    )


def _strangers_table(found: OutOfDistribution) -> Table:
    tried = ", ".join(f"{damping.relative:g}: {damping.validation_auroc:.3f}" for damping in found.candidates)
    table = _table(
        "2  Is this input like anything the model knows?  AUROC against clean test digits",
        "Parametric complexity in nats, larger = more unlike the training data.\n"
        f"Relative({found.damping.relative:g}) damping, chosen on validation digits and {_and(found.chosen_on)} (tried: "
        f"{tried}).",
        "inputs",
        "parametric complexity (ifcomp)",
        "max softmax",
    )
    for row in found.rows:
        table.add_row(row.name, f"{row.complexity:.3f}", f"{row.max_softmax:.3f}")
    return table


def _calibration_table(found: Calibration) -> Table:
    table = _table(
        "3  How far can a prediction be trusted?  Test digits; smaller ECE and NLL are better",
        f"ECE over 20 bins of equal size; NLL in nats. alpha = {found.alpha.alpha:g} and the temperature "
        f"{1 / found.inverse_temperature:.2g}\nwere chosen by NLL on validation digits, {_and(found.chosen_on)}.",
        "",
        "ECE softmax",
        "temp.",
        "ifcomp",
        "NLL softmax",
        "temp.",
        "ifcomp",
        "accuracy",
        "ifcomp",
    )
    for row in found.rows:
        table.add_row(*_shifted_cells(row))
    return table


def _shifted_cells(row: Shifted) -> list[str]:
    compared = (row.softmax, row.temperature, row.pnml)
    return [
        row.name,
        *(f"{quality.ece:.3f}" for quality in compared),
        *(f"{quality.nll:.3f}" for quality in compared),
        *(f"{quality.accuracy:.1%}" for quality in (row.softmax, row.pnml)),
    ]


def _closing(result: Demo) -> RenderableType:
    return Group(
        Text(f"\nDone in {result.seconds:.0f} s with seed {result.seed}. With your own model:\n", style="bold"),
        Syntax(OWN_MODEL, "python", theme="ansi_dark", background_color="default"),
    )


def _and(names: list[str]) -> str:
    return " and ".join(names)
