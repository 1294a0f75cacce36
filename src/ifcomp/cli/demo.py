"""``ifcomp demo``: label audit, OOD detection and calibrated predictions on embedded data."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from ifcomp.cli.output import Outcome, check_target, paragraph, table

EPILOG = "[bold]Example:[/bold] ifcomp demo --seed 1 --json > demo.json"

SHADES = " ░▒▓█"

#: Length of the longest bar of a chart in characters.
BAR = 50


def demo(
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of data, training and shifts.")] = 0,
    out: Annotated[str, typer.Option(metavar="FILE", help="The report, .html.")] = "ifcomp-demo.html",
) -> Outcome:
    """Find wrong labels and OOD inputs of a small network, and calibrate its predictions.

    The network is trained on handwritten digits, of which 5 % have a wrong label, until it has memorised all labels.
    Needs no downloads.
    """
    import torch

    from ifcomp import IFComp
    from ifcomp.cli import demo_study as study

    check_target(out, (".html",))
    started = time.perf_counter()
    torch.set_num_threads(1)  # the tensors are too small for several threads
    data = study.load_data(seed)
    with Console(stderr=True).status("Training a network until it has memorised wrong labels") as status:
        network, epochs = study.train(data.training, seed)
        status.update("Fitting the curvature and auditing the labels")
        ifc = IFComp(network, fisher="exact", seed=seed).fit(data.training.batches(), progress=False)
        audit = ifc.audit(data.training.batches(), progress=False)
        status.update("Detecting OOD inputs and calibrating predictions")
        gate = ifc.ood_detector(data.held_out.batches(), progress=False)
        calibration = ifc.calibrate(data.held_out.all_shifts(seed), progress=False)
        facts = {
            "seed": seed,
            "epochs": epochs,
            "accuracy": {"training": ifc.training_accuracy, "test": study.accuracy(network, data.test)},
            "audit": study.judge_audit(audit, network, data),
            "out_of_distribution": study.judge_gate(gate, network, data, seed),
            "predictions": study.judge_predictions(ifc, data.test.shifted(seed + 1)),
        }
        invert = study.OOD_INPUTS["inverted digits"]
        inverted = study.Digits(invert(data.test.images, torch.Generator()), data.test.labels)
        ifc.report(
            out,
            title="ifcomp demo",
            audit=audit,
            ood=gate.table(inverted.images, progress=False),
            calibration=calibration,
            previews=data.training.previews,
            ood_previews=inverted.previews,
        )
    facts["seconds"] = time.perf_counter() - started
    return Outcome(
        facts,
        _shown(facts),
        {out: "the report: open it in a browser"},
        {"ifcomp audit --model MODEL --weights FILE --data DATA": "audit your own labels"},
    )


def _shown(facts: Mapping[str, Any]) -> list[RenderableType]:
    audit, ood, predictions = (facts[name] for name in ("audit", "out_of_distribution", "predictions"))
    found = {name: audit[name]["found"] for name in ("audit", "loss")}
    return [
        paragraph(
            f"A small CNN was trained on {audit['examples']:,} handwritten digits, {audit['flipped']} of them with the "
            f"label of a similar digit. After {facts['epochs']} epochs it predicts every training label: it has "
            f"memorised {audit['memorised']:.0%} of the wrong ones. Test accuracy {facts['accuracy']['test']:.1%}."
        ),
        _heading(
            "1. Which labels are wrong?",
            f"{audit['suspected']} labels flagged by each score: █ wrong label, ░ correct label.",
        ),
        _bars(found, audit["suspected"], audit["flipped"]),
        _pictures(audit["suspects"]),
        _heading(
            "2. Is this input like anything the model knows?",
            f"Share of flagged inputs. Both thresholds accept {ood['accepted']:.0%} of the held-out digits.",
        ),
        table(
            ("inputs", "ood_detector, %", "max softmax, %"),
            [(row["name"], f"{100 * row['gate']:.1f}", f"{100 * row['max_softmax']:.1f}") for row in ood["rows"]],
        ),
        _heading(
            "3. How far can a prediction be trusted?",
            "New digits are clean, blurred, noisy or moved. 300 others, in all four versions, calibrate ifcomp.",
        ),
        table(("new digits", "softmax", "ifcomp"), _prediction_rows(predictions)),
        Text(f"Seed {facts['seed']}, {facts['seconds']:.0f} s.", style="dim"),
    ]


def _prediction_rows(predictions: Mapping[str, Any]) -> list[tuple[str, ...]]:
    rows = {
        "accuracy": ("accuracy", "{:.1%}"),
        "mean confidence": ("confidence", "{:.1%}"),
        "NLL in nats, smaller is better": ("nll", "{:.2f}"),
        f"true label in the {predictions['coverage']:.0%} prediction set": ("covered", "{:.1%}"),
        "labels per set": ("size", "{:.2f}"),
    }
    forms = [predictions["softmax"], predictions["ifcomp"]]
    return [(title, *(shape.format(form[key]) for form in forms)) for title, (key, shape) in rows.items()]


def _heading(question: str, note: str) -> Text:
    return Text.assemble((f"{question}\n", "bold cyan"), (note, "dim"))


def _bars(found: Mapping[str, int], flagged: int, wrong: int) -> Text:
    """Draw one bar of flagged labels per score: wrong labels, then correct ones."""
    width, scale = max(map(len, found)), min(1.0, BAR / max(flagged, 1))
    parts: list[str | tuple[str, str]] = []
    for name, count in found.items():
        full, whole = round(scale * count), round(scale * flagged)
        parts += [f"{name:{width}}  ", ("█" * full, "red"), ("░" * (whole - full), "dim")]
        parts += [f"  finds {count} of {wrong}\n"]
    return Text.assemble(*parts)


def _pictures(suspects: list[dict[str, Any]]) -> Table:
    """Draw the suspects side by side, each with its labels."""
    grid = Table.grid(padding=(0, 3))
    pictures = []
    for suspect in suspects:
        truth = ("wrong label", "red") if suspect["flipped"] else ("original label", "green")
        caption = f"\nlabelled {suspect['given']}\nsuggested {suspect['suggested']}\n{suspect['score']:.1f} nats\n"
        pictures.append(Text.assemble(draw(suspect["pixels"]), caption, truth))
    grid.add_row(*pictures)
    return grid


def draw(pixels: list[list[int]]) -> str:
    """Draw an image with values 0 ... 16, one character per pixel, from light to dark."""
    return "\n".join("".join(SHADES[value * len(SHADES) // 17] for value in row) for row in pixels)
