"""``ifcomp demo``: label audit, OOD detection and calibration on embedded data."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from ifcomp.cli.output import Outcome, paragraph, table

EPILOG = "[bold]Example:[/bold] ifcomp demo --seed 1 --json > demo.json"

SHADES = " ░▒▓█"


def demo(
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of data, training and shifts.")] = 0,
) -> Outcome:
    """Find wrong labels and OOD inputs of a small network, and calibrate its predictions.

    The network is trained on handwritten digits of which 5 % have a wrong label. Needs no arguments and no downloads.
    """
    import torch

    from ifcomp import IFComp
    from ifcomp.cli import demo_study as study

    started = time.perf_counter()
    torch.set_num_threads(1)  # the tensors are too small for several threads
    data = study.load_data(seed)
    with Console(stderr=True).status("Training a network on digits of which 5 % have a wrong label") as status:
        noisy = study.train(data.training, 7, seed)  # wrong labels are learnt last, so training stops early
        audit = IFComp(noisy, seed=seed).audit(data.training.batches(), progress=False)
        status.update("Training again without the suspects")
        kept = data.training.select(~audit.frame["is_suspect"].to_numpy())
        network = study.train(kept, 40, seed)
        status.update("Detecting OOD inputs and calibrating predictions")
        ifc = IFComp(network, fisher="exact", seed=seed).fit(kept.batches(), progress=False)
        ood = study.detect_ood(ifc, data.test, seed)
        calibration = study.calibrate(network, kept, data, seed)
    facts = {
        "seed": seed,
        "networks": {
            "parameters": ifc.coverage.total,
            "covered": ifc.coverage.covered,
            "memorised": study.accuracy(noisy, data.training.select(data.flipped)),
            "accuracy": study.accuracy(noisy, data.test),
            "accuracy_cleaned": study.accuracy(network, data.test),
        },
        "audit": study.judge_audit(audit, noisy, data),
        "out_of_distribution": {"rows": ood},
        "calibration": calibration,
        "seconds": time.perf_counter() - started,
    }
    return Outcome(facts, _shown(facts), next_steps={"ifcomp fit MODEL DATA": "fit your own model"})


def _shown(facts: dict[str, Any]) -> list[RenderableType]:
    networks, audit, calibration = facts["networks"], facts["audit"], facts["calibration"]
    ood, rankings = facts["out_of_distribution"]["rows"], ("score", "loss", "chance")
    columns = [(metric, form) for metric in ("ece", "nll") for form in ("softmax", "temperature", "ifcomp")]
    return [
        paragraph(
            f"{audit['examples']} handwritten digits, {audit['flipped']} of them with a wrong label, and a small CNN: "
            f"{networks['covered']:,} of {networks['parameters']:,} parameters covered, test accuracy "
            f"{networks['accuracy']:.1%}. It has memorised {networks['memorised']:.0%} of the wrong labels."
        ),
        _heading("1. Which labels are wrong?", "Score of the audit in nats; larger = more suspicious."),
        paragraph(audit["headline"]),
        table(
            ("ranked by", f"wrong labels among the first {audit['flipped']}", "AUROC"),
            [(name, f"{audit[name]['found']:g}", f"{audit[name]['auroc']:.3f}") for name in rankings],
        ),
        _pictures(audit["suspects"]),
        paragraph(
            f"The audit flags {audit['suspected']} labels; {audit['suspected_flipped']} of them are wrong. Trained "
            f"longer without these labels, the network has a test accuracy of {networks['accuracy_cleaned']:.1%}."
        ),
        _heading("2. Is this input like anything the model knows?", "AUROC against test digits; larger is better."),
        table(
            ("OOD inputs", "bounded complexity", "max softmax"),
            [(row["name"], f"{row['complexity']:.3f}", f"{row['max_softmax']:.3f}") for row in ood],
        ),
        _heading("3. How far can a prediction be trusted?", "ECE, and NLL in nats; smaller is better."),
        table(
            ("test digits", *(f"{metric.upper()}\n{form}" for metric, form in columns)),
            [(row["name"], *(f"{row[form][metric]:.3f}" for metric, form in columns)) for row in calibration["rows"]],
        ),
        paragraph(
            f"{calibration['headline']} These are validation digits: {', '.join(calibration['chosen_on'])}. "
            f"Seed {facts['seed']}, {facts['seconds']:.0f} s."
        ),
    ]


def _heading(question: str, note: str) -> Text:
    return Text.assemble((f"{question}\n", "bold cyan"), (note, "dim"))


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
