"""Hindsight models without proximal terms memorise every label (appendix of the paper on hindsight-optimal retraining).

The paper trains from scratch on the whole training set with one example added. Here training continues from the fitted
weights on the training examples of the network, which is cheaper and more restrictive.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.bootstrap import mean_interval
from experiments.datasets import load
from experiments.recipes import PAPER, QUICK
from experiments.reproduce.publish import markdown
from experiments.reproduce.study import Claim, Record, Results, Step, Study
from experiments.reproduce.subject import Subject, sample
from ifcomp.oracle import unrestricted_refit

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Settings:
    """Settings of the study.

    Attributes:
        subject: Network and data.
        sets: Data sets whose test images are trained with every label.
        images: Number of images per data set.
        epochs: Number of epochs of the refit.
        rate: Learning rate of the refit.
        batch_size: Batch size of the refit.
    """

    subject: Subject
    sets: tuple[str, ...]
    images: int
    epochs: int
    rate: float
    batch_size: int


PRESETS = {
    "digits": Settings(
        Subject("digits", "lenet", replace(QUICK, epochs=4, batch_size=16), 200, 150), ("digits",), 1, 10, 0.02, 32
    ),
    "mnist": Settings(
        Subject("mnist", "lenet", replace(QUICK, epochs=10, batch_size=32), 5000, 500),
        ("mnist", "fashion-mnist"),
        2,
        100,
        0.02,
        64,
    ),
    "cifar10": Settings(
        Subject("cifar10", "resnet20", replace(PAPER, epochs=30, milestones=(15, 25)), 5000, 10000),
        ("cifar10", "mnist"),
        2,
        10,
        0.01,
        128,
    ),
    "paper": Settings(Subject("cifar10", "resnet18", PAPER, 5000), ("cifar10", "mnist"), 20, 200, 0.01, 128),
}


def _needs(settings: Settings) -> Iterable[tuple[str, str]]:
    return (settings.subject.data, "train"), *((name, "test") for name in settings.sets)


def _refits(settings: Settings, name: str, _: Results) -> dict[str, Any]:
    subject = settings.subject
    selected = subject.fitted_to(sample(load(name), settings.images, seed=2))
    (x,) = next(iter(subject.inputs(selected)))
    refits = unrestricted_refit(
        subject.network(),
        subject.batches(subject.parts()[0]),
        x,
        epochs=settings.epochs,
        learning_rate=settings.rate,
        batch_size=settings.batch_size,
        seed=subject.seed,
    )
    return {
        "before": refits.base.numpy().round(5).tolist(),
        "after": refits.probability.numpy().round(5).tolist(),
        "complexity": refits.parametric_complexity.numpy().round(5).tolist(),
    }


def steps(settings: Settings) -> dict[str, Step]:
    """Evaluate one data set after the other."""
    return {name: partial(_refits, settings, name) for name in settings.sets}


def table(record: Record) -> str:
    """Format the probability of the added label before and after training."""
    rows = []
    for name, row in record.results.items():
        before, after = (np.array(row[key]) for key in ("before", "after"))
        complexity = ", ".join(f"{value:.3f}" for value in row["complexity"])
        cells = (after.min(), np.median(after), after.mean(), (after > 0.5).mean())
        rows.append([name, f"{np.median(before):.4f}", *(f"{value:.3f}" for value in cells), complexity])
    classes = len(next(iter(record.results.values()))["after"][0])
    words = (
        "Probability of the added label (every image with every label) after unrestricted training, and the parametric "
        f"complexity of each image in nats, which is at most log K = {math.log(classes):.3f}. In the paper all "
        "probabilities are close to 1.\n\n"
    )
    header = ["images", "median before", "minimum", "median", "mean", "share above 0.5", "complexity"]
    return words + markdown(header, rows)


def draw(record: Record, figure: Figure) -> None:
    """Plot the probability of every label after training over that before."""
    axes = figure.add_subplot()
    for name, row in record.results.items():
        before, after = (np.array(row[key]).flatten() for key in ("before", "after"))
        axes.plot(np.maximum(before, 1e-5), after, "o", markersize=4, alpha=0.6, label=name)
    axes.set(xscale="log", xlabel="probability of the label before", ylabel="after training with it", ylim=(0, 1.02))
    axes.legend()


def claims(record: Record) -> list[Claim]:
    """Compare the claim that all labels are memorised."""
    after = np.concatenate([np.array(row["after"]).flatten() for row in record.results.values()])
    text = f"minimum {after.min():.3f}, mean {after.mean():.3f} of {len(after)} labels"
    lowest = np.concatenate([np.array(row["after"]).min(1) for row in record.results.values()])
    claim = "without proximal terms, every label gets a probability above 0.9 (mean over images of the lowest)"
    size = f"{len(lowest)} images, {len(after)} labels"
    return [Claim(claim, "close to 1 for all 600", text, size, mean_interval(lowest).shifted(-0.9), digits=3)]


STUDY = Study("retraining", "Hindsight retraining without restriction", PRESETS, _needs, steps, table, draw, claims)
