"""Parametric complexity against trained hindsight models (pNML validation figure of the paper).

The weight lambda of the squared distance decides how far a hindsight model may move. At small lambda every label is
learnt and the truth is log K for all images; at large lambda nothing is learnt. So the study has several values.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from experiments.baselines.acnml import Acnml
from experiments.baselines.gradients import gradnorm
from experiments.bootstrap import correlation_draws, draw_counts, interval
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
        lams: Weights of the squared distance; the damping is ``lam / (n beta^2)``.
        tolerance: Tolerance of the training of hindsight models in nats.
    """

    subject: Subject
    sets: tuple[str, ...]
    images: int
    training: int
    beta: float = 1.0
    lams: tuple[float, ...] = (100.0,)
    tolerance: float = 0.05


_MNIST = Settings(Subject("mnist", "lenet", QUICK, 5000), ("mnist", "fashion-mnist", "notmnist"), 20, 5000)
PRESETS = {
    "digits": Settings(
        Subject("digits", "lenet", replace(QUICK, epochs=4, batch_size=32), 200),
        ("digits",),
        3,
        60,
        lams=(100.0, 1000.0),
        tolerance=0.5,
    ),
    "mnist": _MNIST,
    "mnist-lambdas": replace(_MNIST, lams=(100.0, 1000.0, 10000.0)),
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


def _truth(settings: Settings, name: str, lam: float, _: Results) -> dict[str, Any]:
    """Train the hindsight models. Finished pairs of image and label are stored, so an interrupted run resumes."""
    folder = cache_folder() / "oracle"
    folder.mkdir(parents=True, exist_ok=True)
    truth = hindsight(
        settings.subject.network(),
        _known(settings),
        _inputs(settings, name),
        beta=settings.beta,
        lam=lam,
        tolerance=settings.tolerance,
        results=folder / "study.jsonl",
    )
    return {
        "complexity": truth.parametric_complexity.tolist(),
        "converged": int(truth.converged.sum()),
        "pairs": truth.converged.numel(),
    }


@cache
def _fitted(settings: Settings, lam: float) -> IFComp:
    damping = lam / (settings.training * settings.beta**2)
    model, fisher = settings.subject.network(), settings.subject.fisher
    return IFComp(model, settings.beta, fisher=fisher, damping=damping).fit(_known(settings))


def _methods(settings: Settings, name: str, lam: float, _: Results) -> dict[str, list[float]]:
    """Return the complexity of every image by every method; larger = more surprising."""
    ifc, x = _fitted(settings, lam), _inputs(settings, name)
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


def _key(name: str, lam: float) -> str:
    """Return the start of the names of two steps."""
    return f"{name}, lambda {lam:g}"


def steps(settings: Settings) -> dict[str, Step]:
    """For each lambda, evaluate the methods, then train the hindsight models of one data set after the other."""
    named: dict[str, Step] = {}
    for lam in settings.lams:
        pairs = {_key(name, lam): (name, lam) for name in settings.sets}
        named |= {f"{key}, methods": partial(_methods, settings, *pair) for key, pair in pairs.items()}
        named |= {f"{key}, truth": partial(_truth, settings, *pair) for key, pair in pairs.items()}
    return named


def groups(record: Record) -> dict[str, list[str]]:
    """Return the data sets of every group: each alone, and all together."""
    sets = record.settings["sets"]
    return {**{name: [name] for name in sets}, **({"all": sets} if len(sets) > 1 else {})}


def values(record: Record, lam: float, sets: list[str], method: str | None) -> np.ndarray:
    """Return the complexity of every image by a method; None is the truth."""
    if method is None:
        parts = [record.results[f"{_key(name, lam)}, truth"]["complexity"] for name in sets]
    else:
        parts = [record.results[f"{_key(name, lam)}, methods"][method] for name in sets]
    return np.concatenate([np.array(part) for part in parts])


def correlations(record: Record, lam: float) -> dict[str, dict[str, float]]:
    """Return Pearson's R of every method with the hindsight models, by group."""
    return {
        group: {
            method: float(np.corrcoef(values(record, lam, sets, None), values(record, lam, sets, method))[0, 1])
            for method in METHODS
        }
        for group, sets in groups(record).items()
    }


def draws(record: Record, lam: float, group: str) -> dict[str, np.ndarray]:
    """Return Pearson's R of every method in every resample of the images, [R] each; every set keeps its size."""
    sets = groups(record)[group]
    sizes = [len(values(record, lam, [name], None)) for name in sets]
    counts = np.concatenate([draw_counts(size, index) for index, size in enumerate(sizes)], 1)
    truth = values(record, lam, sets, None)
    return {method: correlation_draws(truth, values(record, lam, sets, method), counts) for method in METHODS}


def table(record: Record) -> str:
    """Format the correlations by lambda, method and group."""
    settings, texts = record.settings, []
    text = (
        f"Pearson's R with the parametric complexity of trained hindsight models, {settings['images']} images per set "
        f"({settings['subject']['model']}, n = {settings['training']}), with 95 % intervals by bootstrap over images; "
        "best in bold. The damping of our methods follows lambda.\n"
    )
    for lam in settings["lams"]:
        truth = [row for name, row in record.results.items() if name.endswith(f"lambda {lam:g}, truth")]
        converged, pairs = (sum(row[key] for row in truth) for key in ("converged", "pairs"))
        complexity = np.concatenate([row["complexity"] for row in truth])
        by_group, rows = correlations(record, lam), []
        sizes = {group: len(values(record, lam, sets, None)) for group, sets in groups(record).items()}
        drawn = {group: draws(record, lam, group) for group in by_group}
        for method, published in PAPER_NUMBERS.items():
            cells = [
                _cell(row[method], drawn[group][method], row[method] == max(row.values()), sizes[group])
                for group, row in by_group.items()
            ]
            rows.append([method, *cells, " / ".join(f"{value:.3f}" for value in published)])
        texts.append(
            f"lambda = {lam:g}: true complexity {complexity.min():.2f} to {complexity.max():.2f} nats, median "
            f"{np.median(complexity):.2f}; {converged} of {pairs} pairs of image and label converged.\n\n"
            + markdown(["method", *by_group, "paper: CIFAR-10 / CIFAR-100 / MNIST / all"], rows)
        )
    return text + "\n" + "\n".join(texts)


def _cell(estimate: float, drawn: np.ndarray, is_best: bool, size: int) -> str:
    row = interval(estimate, drawn, size)
    text = f"**{estimate:.2f}**" if is_best else f"{estimate:.2f}"
    return f"{text} ({row.low:.2f} to {row.high:.2f})"


def draw(record: Record, figure: Figure) -> None:
    """Plot the correlations as bars, one panel per lambda."""
    lams = record.settings["lams"]
    figure.set_size_inches(5 * len(lams) + 2, 4.5)
    panels = figure.subplots(1, len(lams), sharey=True, squeeze=False)[0]
    for axes, lam in zip(panels, lams, strict=True):
        by_group = correlations(record, lam)
        for index, method in enumerate(METHODS):
            positions = np.arange(len(by_group)) + 0.2 * (index - 1.5)
            axes.bar(positions, [row[method] for row in by_group.values()], 0.2, label=method)
        axes.set_xticks(range(len(by_group)), list(by_group))
        axes.axhline(0, color="k", linewidth=0.8)
        axes.set_title(f"lambda {lam:g}")
    panels[0].set(ylabel="Pearson R")
    panels[0].legend()


def claims(record: Record) -> list[Claim]:
    """Compare the claim of the highest correlation on the data of the network and over all data."""
    statements, first = [], record.settings["sets"][0]
    network = f"{record.settings['subject']['data']}, {record.settings['subject']['model']}"
    for lam in record.settings["lams"]:
        by_group = correlations(record, lam)
        for group, column in ((first, 0), ("all", 3)):
            if group not in by_group:
                continue
            others = {method: by_group[group][method] for method in METHODS if method != "IF-COMP"}
            best = max(others, key=others.__getitem__)
            ours, drawn = by_group[group]["IF-COMP"], draws(record, lam, group)
            images = len(values(record, lam, groups(record)[group], None))
            statements.append(
                Claim(
                    f"{network}, lambda {lam:g}, images of {group}: IF-COMP correlates best with trained hindsight "
                    "models",
                    f"{PAPER_NUMBERS['IF-COMP'][column]:.3f}",
                    f"{ours:.3f}; best other: {best} {others[best]:.3f}",
                    f"{images} images",
                    interval(ours - others[best], drawn["IF-COMP"] - drawn[best], images),
                    digits=3,
                )
            )
    return statements


STUDY = Study("oracle", "Validation of the complexity by training", PRESETS, _needs, steps, table, draw, claims)
