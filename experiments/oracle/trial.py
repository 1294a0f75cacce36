"""IF-COMP beside hindsight models that were really trained: a LeNet for MNIST, a few images of MNIST and Fashion-MNIST.

    IFCOMP_DATA=... python -m experiments.oracle.trial --images 4 --training 5000

Pairs of an image and a label are kept (in the folder of IFCOMP_CACHE), so a stopped run goes on where it was.
"""

from __future__ import annotations

import json
import time
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from torch import Tensor, nn

from experiments.datasets import MNIST, Batches, Dataset, load, separate
from experiments.prepare_models import PRESETS, parts, trained
from experiments.runs import cache_folder
from ifcomp import IFComp
from ifcomp.io.files import atomic_write
from ifcomp.oracle import Hindsight, hindsight

#: So much damping that influence is the squared norm of the gradient over it.
_FLAT = 1e12


def predictions(ifc: IFComp, x: Tensor, damping: float, count: int) -> dict[str, Tensor]:
    """What influence says about hindsight: ``IF/n`` [B, K] with the damping, and the squared gradient norm [B, K]."""
    return {
        "influence": ifc.influence(x, damping=damping) / count,
        "squared gradient norm": ifc.influence(x, damping=_FLAT) * _FLAT / count,
    }


def compare(truth: Hindsight, predicted: Tensor) -> dict[str, float]:
    """Pearson's R between what was trained and what ``predicted`` [B, K] (for ``log p* - log p``) says."""
    expected = (truth.base * predicted).sum(1)
    return {
        "regret": correlation(truth.regret, predicted),
        "probability": correlation(truth.probability, truth.base * (1 + predicted)),
        "complexity, log1p": correlation(truth.parametric_complexity, torch.log1p(expected)),
        "complexity, linear": correlation(truth.probability.sum(1) - 1, expected),
    }


def correlation(one: Tensor, two: Tensor) -> float:
    """Pearson's R over all entries."""
    return float(np.corrcoef(one.flatten().numpy(), two.flatten().numpy())[0, 1])


def joined(truths: list[Hindsight]) -> Hindsight:
    """The examples of all, one after another."""
    names = (field.name for field in fields(Hindsight))
    return Hindsight(**{name: torch.cat([getattr(truth, name) for truth in truths]) for name in names})


def train_truth(
    model: nn.Module, train: Dataset, images: dict[str, Tensor], beta: float, lam: float, tolerance: float
) -> tuple[dict[str, Hindsight], dict[str, dict[str, float]]]:
    """Hindsight models of every data set's images, and what they took."""
    folder = cache_folder() / "oracle"
    folder.mkdir(parents=True, exist_ok=True)
    truths, costs = {}, {}
    for name, x in images.items():
        start = time.process_time()
        truth = hindsight(
            model, Batches(train, MNIST), x, beta=beta, lam=lam, tolerance=tolerance, results=folder / "trial.jsonl"
        )
        truths[name] = truth
        costs[name] = {
            "pairs": truth.converged.numel(),
            "converged": int(truth.converged.sum()),
            "median iterations": float(truth.iterations.double().median()),
            "median relative gradient": float(truth.gradient.median()),
            "cpu seconds": round(time.process_time() - start, 1),
        }
    return truths, costs


def main(
    images: Annotated[int, typer.Option(help="Test images of each data set.")] = 4,
    training: Annotated[int, typer.Option(help="Training images, n.")] = 5000,
    beta: Annotated[float, typer.Option(help="Inverse temperature.")] = 1.0,
    lam: Annotated[float, typer.Option(help="Weight of the squared distance.")] = 100.0,
    tolerance: Annotated[float, typer.Option(help="Of hindsight training, in nats.")] = 0.05,
    output: Annotated[Path | None, typer.Option(help="JSON file for the result.")] = None,
) -> None:
    """Train hindsight models and print how influence correlates with them."""
    torch.set_num_threads(1)
    model = trained(PRESETS["mnist"]["mnist"]).model()
    train = separate(parts("mnist")[0], training)[1]
    tests = {name: separate(load(name), images)[1] for name in ("mnist", "fashion-mnist")}
    inputs = {name: MNIST(data.images) for name, data in tests.items()}
    truths, costs = train_truth(model, train, inputs, beta, lam, tolerance)
    ifc = IFComp(model, beta, fisher="exact").fit(Batches(train, MNIST))
    damping = lam / (training * beta**2)
    correlations = {}
    for group, names in {**{name: [name] for name in tests}, "all": list(tests)}.items():
        found = predictions(ifc, torch.cat([inputs[name] for name in names]), damping, training)
        truth = joined([truths[name] for name in names])
        correlations[group] = {method: compare(truth, predicted) for method, predicted in found.items()}
    settings = {"images": images, "training": training, "beta": beta, "lam": lam, "tolerance": tolerance}
    result = json.dumps({"settings": settings, "cost": costs, "correlation": correlations}, indent=1)
    typer.echo(result)
    if output is not None:
        with atomic_write(output) as scratch:
            scratch.write_text(result + "\n")


if __name__ == "__main__":
    typer.run(main)
