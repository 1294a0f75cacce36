"""Accuracy after training on a pruned data set, lowest scores dropped first (pruning figure of the paper).

The labels are clean. The number of epochs is multiplied by 1 / (1 - fraction): the number of steps is constant. Results
have one bit per seed and test image, so that intervals are over both.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch

from experiments.baselines.el2n import el2n
from experiments.baselines.gradients import grand, tracin
from experiments.baselines.inference import run_data
from experiments.bootstrap import Interval, mean_interval
from experiments.recipes import PAPER, QUICK, Recipe
from experiments.reproduce.mislabel import checkpoints_until
from experiments.reproduce.paper import PRUNING as PAPER_NUMBERS
from experiments.reproduce.publish import markdown
from experiments.reproduce.study import Claim, Record, Results, Step, Study
from experiments.reproduce.subject import Subject, sample
from ifcomp import IFComp
from ifcomp.scores import ScoreTable
from ifcomp.tasks.pruning import PRUNING_DAMPING, keep_lists

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METHODS = ("EL2N", "GraNd", "TracIn", "IF-COMP", "Self-IF", "random")
#: Methods that need checkpoints or several networks.
CHECKPOINTS = ("EL2N", "GraNd", "TracIn")
#: Accuracies that differ by less are similar, in points. The largest difference in the paper is 0.7.
SIMILAR = 1.0


@dataclass(frozen=True)
class Settings:
    """Settings of the study.

    Attributes:
        subject: Network and data. The recipe must store weights during training for TracIn.
        fractions: Fractions of the data to drop.
        seeds: Seeds of the trainings on the kept data.
        short_runs: Number of networks of EL2N and GraNd.
        short_epochs: Number of epochs of these networks.
        fit_examples: Number of examples of the curvature.
    """

    subject: Subject
    fractions: tuple[float, ...]
    seeds: tuple[int, ...]
    short_runs: int
    short_epochs: int
    fit_examples: int


_RECIPE = replace(QUICK, epochs=8, checkpoint_every=2)
PRESETS = {
    "digits": Settings(
        Subject("digits", "lenet", replace(_RECIPE, epochs=4, batch_size=8, checkpoint_every=2), 200, 300),
        (0.5,),
        (0, 1),
        1,
        1,
        150,
    ),
    "mnist": Settings(
        Subject("fashion-mnist", "lenet", _RECIPE, 5000, 5000), (0.2, 0.4, 0.6, 0.7, 0.8), (0, 1, 2, 3, 4), 3, 1, 5000
    ),
    "cifar10": Settings(
        Subject("cifar10", "resnet20", Recipe("one-cycle", 15, 0.1, augment=True, checkpoint_every=3), 5000, 20000),
        (0.3, 0.6),
        (0, 1),
        2,
        2,
        20000,
    ),
    "paper": Settings(
        Subject("cifar10", "resnet18", PAPER, 5000),
        (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7),
        (0, 1, 2, 3, 4),
        10,
        20,
        45000,
    ),
}


def _needs(settings: Settings) -> Iterable[tuple[str, str]]:
    return (settings.subject.data, "train"), (settings.subject.data, "test")


def _tested(subject: Subject, data: Any) -> dict[str, Any]:
    """Return the test accuracy after training on ``data``, and whether each test image is classified correctly."""
    test = subject.parts()[2]
    outputs = run_data(subject.training(data, None).model(), subject.batches(test))
    correct = (outputs.logits.argmax(1) == outputs.labels).numpy()
    packed = base64.b64encode(np.packbits(correct).tobytes()).decode()
    return {"accuracy": float(correct.mean()), "images": len(correct), "correct": packed}


def _none(settings: Settings, seed: int, _: Results) -> dict[str, Any]:
    subject = replace(settings.subject, seed=seed)
    return _tested(subject, subject.parts()[0])


def _ranks(settings: Settings, _: Results) -> dict[str, list[int]]:
    """Return the ranks of all training examples by the score of every method; larger = kept longer."""
    subject = settings.subject
    data = subject.parts()[0]
    batches, trained = subject.batches(data), subject.training(data, None)
    short = [
        replace(subject, seed=subject.seed + 1 + run).training(data, None, until=settings.short_epochs).model()
        for run in range(settings.short_runs)
    ]
    ifc = IFComp(trained.model(), fisher="exact", damping=PRUNING_DAMPING)
    audit = ifc.fit(subject.batches(sample(data, settings.fit_examples, subject.seed))).score(batches)
    scores = {
        "EL2N": el2n(short, batches),
        "GraNd": grand(short, batches),
        "TracIn": tracin(checkpoints_until(trained, subject.recipe.epochs), batches),
        "IF-COMP": audit.column("stochastic_complexity"),
        "Self-IF": audit.column("influence"),
        "random": np.random.default_rng(subject.seed).random(len(data)),
    }
    return {name: np.argsort(np.argsort(values, kind="stable")).tolist() for name, values in scores.items()}


def kept(ranks: list[int], labels: torch.Tensor, fraction: float) -> torch.Tensor:
    """Return the positions of the training examples to keep; the lowest ranks are dropped."""
    columns = {"index": range(len(ranks)), "label": labels.numpy(), "stochastic_complexity": ranks}
    lists = keep_lists(ScoreTable(pd.DataFrame(columns), {}), [fraction])
    return torch.from_numpy(lists[fraction])


def _pruned(settings: Settings, method: str, fraction: float, seed: int, results: Results) -> dict[str, Any]:
    data = settings.subject.parts()[0]
    positions = kept(results["ranks"][method], data.labels, fraction)
    recipe = settings.subject.recipe.stretched(1 / (1 - fraction))
    subject = replace(settings.subject, recipe=recipe, seed=seed)
    return _tested(subject, data.take(positions, f"{method}-{fraction:g}"))


def steps(settings: Settings) -> dict[str, Step]:
    """Train on all data, score it, then train on the kept data."""
    named: dict[str, Step] = {f"none, seed {seed}": partial(_none, settings, seed) for seed in settings.seeds}
    named["ranks"] = partial(_ranks, settings)
    for fraction in settings.fractions:
        for method in METHODS:
            for seed in settings.seeds:
                step = partial(_pruned, settings, method, fraction, seed)
                named[f"{method}, {fraction:g}, seed {seed}"] = step
    return named


def correct(record: Record, prefix: str) -> np.ndarray | None:
    """Return whether each network classifies each test image correctly, [S, N] in {0, 100}, or None."""
    rows = [row for name, row in record.results.items() if name.startswith(f"{prefix}, seed ")]
    if not rows:
        return None
    packed = [np.frombuffer(base64.b64decode(row["correct"]), np.uint8) for row in rows]
    return 100.0 * np.stack([np.unpackbits(bits, count=row["images"]) for bits, row in zip(packed, rows, strict=True)])


def _over_seeds(record: Record, prefix: str) -> tuple[float, float] | None:
    """Return mean and standard deviation over seeds in percent, or None."""
    hits = correct(record, prefix)
    return None if hits is None else (float(hits.mean()), float(hits.mean(1).std()))


def summary(record: Record) -> dict[str, dict[float, tuple[float, float]]]:
    """Return the accuracy of every method by fraction."""
    accuracies = {}
    for method in METHODS:
        rows = {fraction: _over_seeds(record, f"{method}, {fraction:g}") for fraction in record.settings["fractions"]}
        accuracies[method] = {fraction: row for fraction, row in rows.items() if row}
    return accuracies


def table(record: Record) -> str:
    """Format the accuracy by method and fraction."""
    settings, whole = record.settings, _over_seeds(record, "none")
    rows = [["no pruning", *(f"{whole[0]:.2f} ± {whole[1]:.2f}" for _ in settings["fractions"]), "95.28"]]
    for method, accuracies in summary(record).items():
        by_fraction = [accuracies.get(fraction) for fraction in settings["fractions"]]
        cells = [f"{row[0]:.2f} ± {row[1]:.2f}" if row else "" for row in by_fraction]
        known = [PAPER_NUMBERS[method].get(fraction) for fraction in settings["fractions"]]
        published = ["-" if value is None else f"{value:.2f}" for value in known]
        rows.append([method, *cells, " / ".join(published)])
    text = (
        f"Test accuracy in percent after pruning {settings['subject']['data']} ("
        f"{settings['subject']['examples'] or 'all'} training examples, {settings['subject']['model']}), mean and "
        f"standard deviation over {len(settings['seeds'])} seeds; all seeds share one ranking. The numbers of the "
        "paper are for CIFAR-10 and ResNet-18.\n\n"
    )
    return text + markdown(["method", *(f"{100 * f:g} % dropped" for f in settings["fractions"]), "paper"], rows)


def draw(record: Record, figure: Figure) -> None:
    """Plot accuracy over the fraction, with standard deviations."""
    axes = figure.add_subplot()
    axes.axhline(_over_seeds(record, "none")[0], color="k", linestyle="--", label="no pruning")
    for method, accuracies in summary(record).items():
        mean, spread = np.array(list(accuracies.values())).T
        (line,) = axes.plot(list(accuracies), mean, marker="o", label=method)
        axes.fill_between(list(accuracies), mean - spread, mean + spread, color=line.get_color(), alpha=0.12)
    axes.set(xlabel="fraction of data pruned", ylabel="test accuracy (%)")
    axes.legend(loc="lower left")


def difference(record: Record, fraction: float, method: str, other: str) -> Interval:
    """Return the difference of two accuracies in points, paired by seed and test image."""
    first, second = (correct(record, f"{name}, {fraction:g}") for name in (method, other))
    return mean_interval(first - second)


def claims(record: Record) -> list[Claim]:
    """Compare IF-COMP with methods that need checkpoints and with random pruning.

    "Similar" means at most `SIMILAR` points worse than the best method that needs checkpoints.
    """
    settings, accuracies, statements = record.settings, summary(record), []
    for fraction in settings["fractions"]:
        if not all(fraction in accuracies[method] for method in METHODS):
            continue
        rows = {method: accuracies[method][fraction] for method in METHODS}
        best = max(CHECKPOINTS, key=lambda method: rows[method][0])
        images = correct(record, f"IF-COMP, {fraction:g}").shape[1]
        size = f"{len(settings['seeds'])} seeds, {images:,} test images"
        subject = f"{settings['subject']['data']}, {100 * fraction:g} % dropped: IF-COMP is"
        for text, other, margin in (
            (f"at most {SIMILAR:g} point worse than the best method with checkpoints", best, SIMILAR),
            ("better than random", "random", 0.0),
        ):
            names = ("IF-COMP", other)
            published = {name: PAPER_NUMBERS[name].get(fraction) for name in names}
            paper = "; ".join(f"{name} {value:.2f}" for name, value in published.items() if value is not None)
            statements.append(
                Claim(
                    f"{subject} {text}",
                    paper if all(published.values()) else "no number",
                    "; ".join(f"{name} {rows[name][0]:.2f}" for name in names),
                    size,
                    difference(record, fraction, "IF-COMP", other),
                    margin=margin,
                )
            )
    return statements


STUDY = Study("pruning", "Dataset pruning: accuracy by share dropped", PRESETS, _needs, steps, table, draw, claims)
