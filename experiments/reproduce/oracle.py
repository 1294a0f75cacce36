"""Parametric complexity against trained hindsight models (pNML validation figure of the paper)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from experiments.baselines.acnml import Acnml
from experiments.baselines.gradients import gradnorm
from experiments.datasets import load
from experiments.recipes import PAPER, QUICK
from experiments.reproduce.paper import ORACLE as PAPER_NUMBERS
from experiments.reproduce.publish import markdown
from experiments.reproduce.study import Claim, Record, Results, Step, Study
from experiments.reproduce.subject import Subject, sample
from experiments.runs import cache_folder
from ifcomp import IFComp
from ifcomp.oracle import hindsight

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METHODS = ("GradNorm", "Self-IF", "ACNML-EKFAC", "IF-COMP")


@dataclass(frozen=True)
class Settings:
    """Settings of the study.

    Attributes:
        subject: Network and data.
        sets: Data sets whose test images are trained with every label; the first is that of the network.
        images: Number of images per data set.
        training: Number of training examples n of the KL terms.
        beta: Inverse temperature.
        lam: Weight of the squared distance; the damping is ``lam / (n beta^2)``.
        tolerance: Tolerance of the training of hindsight models in nats.
    """

    subject: Subject
    sets: tuple[str, ...]
    images: int
    training: int
    beta: float = 1.0
    lam: float = 100.0
    tolerance: float = 0.05


PRESETS = {
    "digits": Settings(
        Subject("digits", "lenet", replace(QUICK, epochs=4, batch_size=32), 200), ("digits",), 3, 60, tolerance=0.5
    ),
    "mnist": Settings(Subject("mnist", "lenet", QUICK, 5000), ("mnist", "fashion-mnist", "notmnist"), 20, 5000),
    "cifar10": Settings(Subject("cifar10", "resnet20", None, 2000), ("cifar10", "tinyimagenet", "mnist"), 6, 1000),
    "paper": Settings(Subject("cifar10", "resnet18", PAPER, 5000), ("cifar10", "tinyimagenet", "mnist"), 20, 45000),
}


def _needs(settings: Settings) -> Iterable[tuple[str, str]]:
    return (settings.subject.data, "train"), *((name, "test") for name in settings.sets)


def _inputs(settings: Settings, name: str) -> Tensor:
    data = settings.subject.fitted_to(sample(load(name), settings.images, seed=2))
    (x,) = next(iter(settings.subject.batches(replace(data, labels=None), settings.images)))
    return x


def _known(settings: Settings) -> Any:
    return settings.subject.batches(sample(settings.subject.parts()[0], settings.training))


def _truth(settings: Settings, name: str, _: Results) -> dict[str, Any]:
    """Train the hindsight models. Finished pairs of image and label are stored, so an interrupted run resumes."""
    folder = cache_folder() / "oracle"
    folder.mkdir(parents=True, exist_ok=True)
    truth = hindsight(
        settings.subject.network(),
        _known(settings),
        _inputs(settings, name),
        beta=settings.beta,
        lam=settings.lam,
        tolerance=settings.tolerance,
        results=folder / "study.jsonl",
    )
    return {
        "complexity": truth.parametric_complexity.tolist(),
        "converged": int(truth.converged.sum()),
        "pairs": truth.converged.numel(),
    }


@cache
def _fitted(settings: Settings) -> IFComp:
    damping = settings.lam / (settings.training * settings.beta**2)
    model, fisher = settings.subject.network(), settings.subject.fisher
    return IFComp(model, settings.beta, fisher=fisher, damping=damping).fit(_known(settings))


def _methods(settings: Settings, name: str, _: Results) -> dict[str, list[float]]:
    """Return the complexity of every image by every method; larger = more surprising."""
    ifc, x = _fitted(settings), _inputs(settings, name)
    influence = ifc.influence(x)
    acnml = Acnml.from_ekfac(ifc)
    predicted = ifc.predict_proba(x, alpha=0.0).argmax(1, keepdim=True)
    scores = {
        "GradNorm": gradnorm(ifc.model, [x]),
        "Self-IF": influence.gather(1, predicted).squeeze(1),
        "ACNML-EKFAC": acnml.hindsight_proba(x).sum(1).log(),
        "IF-COMP": ifc.parametric_complexity(x),
    }
    return {key: np.asarray(values).tolist() for key, values in scores.items()}


def steps(settings: Settings) -> dict[str, Step]:
    """Evaluate the methods, then train the hindsight models of one data set after the other."""
    named: dict[str, Step] = {f"{name}, methods": partial(_methods, settings, name) for name in settings.sets}
    return named | {f"{name}, truth": partial(_truth, settings, name) for name in settings.sets}


def correlations(record: Record) -> dict[str, dict[str, float]]:
    """Return Pearson's R of every method with the hindsight models, by data set and over all."""
    done = [name for name in record.settings["sets"] if f"{name}, truth" in record.results]
    by_group = {}
    for group, names in {**{name: [name] for name in done}, "all": done}.items():
        truth = [value for name in names for value in record.results[f"{name}, truth"]["complexity"]]
        by_group[group] = {
            method: float(np.corrcoef(truth, _values(record, names, method))[0, 1]) for method in METHODS
        }
    return by_group


def _values(record: Record, names: list[str], method: str) -> list[float]:
    return [value for name in names for value in record.results[f"{name}, methods"][method]]


def table(record: Record) -> str:
    """Format the correlations by method and data set."""
    by_group, settings = correlations(record), record.settings
    rows = [
        [method, *(f"{by_group[group][method]:.3f}" for group in by_group), " / ".join(f"{v:.3f}" for v in published)]
        for method, published in PAPER_NUMBERS.items()
    ]
    truth = [row for name, row in record.results.items() if name.endswith(", truth")]
    pairs = sum(row["converged"] for row in truth), sum(row["pairs"] for row in truth)
    text = (
        f"Pearson's R with the parametric complexity of trained hindsight models, {settings['images']} images per set "
        f"({settings['subject']['model']}, n = {settings['training']}, lambda = {settings['lam']:g}); {pairs[0]} of "
        f"{pairs[1]} pairs of image and label converged.\n\n"
    )
    return text + markdown(["method", *by_group, "paper: CIFAR-10 / CIFAR-100 / MNIST / all"], rows)


def draw(record: Record, figure: Figure) -> None:
    """Plot the correlations as bars, as in the paper."""
    axes, by_group = figure.add_subplot(), correlations(record)
    for index, method in enumerate(METHODS):
        positions = np.arange(len(by_group)) + 0.2 * (index - 1.5)
        axes.bar(positions, [row[method] for row in by_group.values()], 0.2, label=method)
    axes.set_xticks(range(len(by_group)), list(by_group))
    axes.axhline(0, color="k", linewidth=0.8)
    axes.set(ylabel="Pearson R")
    axes.legend()


def claims(record: Record) -> list[Claim]:
    """Compare the claim of the highest correlation on the data of the network and over all data."""
    by_group, statements = correlations(record), []
    for group, column in ((record.settings["sets"][0], 0), ("all", 3)):
        others = {method: by_group[group][method] for method in METHODS if method != "IF-COMP"}
        best = max(others, key=others.__getitem__)
        statements.append(
            Claim(
                f"{group}: IF-COMP correlates best with trained hindsight models",
                f"{PAPER_NUMBERS['IF-COMP'][column]:.3f}",
                f"{by_group[group]['IF-COMP']:.3f}; best other: {best} {others[best]:.3f}",
                by_group[group]["IF-COMP"] > others[best],
            )
        )
    return statements


STUDY = Study("oracle", "Validation of the complexity by training", PRESETS, _needs, steps, table, draw, claims)
