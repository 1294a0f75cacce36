"""Wrong labels: AUROC of stochastic complexity and other scores (mislabel table of the paper).

The paper stops early on clean validation data. Here the same run is also evaluated when half of the wrong labels are
memorised, and at its end. Plain loss, margin and cleanlab are added; they need no curvature.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from experiments.baselines.confident import in_sample_probabilities, label_suspicion
from experiments.baselines.el2n import el2n
from experiments.baselines.gradients import grand, tracin
from experiments.baselines.inference import run_data
from experiments.bootstrap import bounded_auroc_difference
from experiments.datasets import Batches
from experiments.recipes import PAPER, Recipe
from experiments.reproduce.noisy import STAGES, Noisy, at_stage, prepare, stages
from experiments.reproduce.paper import MISLABEL as PAPER_NUMBERS
from experiments.reproduce.publish import markdown
from experiments.reproduce.study import Claim, Record, Results, Step, Study
from experiments.reproduce.subject import Subject, sample
from experiments.runs import Trained
from experiments.tuning import fit_grid
from ifcomp import Relative
from ifcomp.tasks.metrics import auroc
from ifcomp.tasks.simple_scores import loss, margin

if TYPE_CHECKING:
    from matplotlib.figure import Figure

IFCOMP, AS_PAPER = "IF-COMP, beta 1", "IF-COMP, beta 0.001"
#: Stochastic complexity of the given label relative to the suggested one.
AUDIT = "label complexity, beta 1"
#: Sum suggested by the component figure of the paper, where complexity is divided by the number of parameters.
MIXED = "error at beta 1 + scaled complexity at beta 0.001"
PAPER_BETA = 0.001
#: Number of training examples where all are used.
FULL_TRAINING_SET = 45_000
#: Damping of all scores at beta 1.
DAMPING = Relative(1.0)
#: Methods in the order of the table; the first five are in the paper.
METHODS = (
    "TracIn",
    "EL2N",
    "GraNd",
    "Self-IF",
    IFCOMP,
    AS_PAPER,
    AUDIT,
    MIXED,
    "loss",
    "margin",
    "cleanlab, self-confidence",
    "cleanlab, weighted entropy",
)


@dataclass(frozen=True)
class Settings:
    """Settings of the study.

    Attributes:
        subject: Network and data. The recipe must store weights during training.
        noises: Kinds of label noise.
        fit_examples: Number of noisy examples of the curvature.
        paper_damping: Absolute damping in the units of the paper, for beta 0.001.
        short_runs: Number of networks of EL2N and GraNd.
        short_epochs: Number of epochs of these networks.
        scored_examples: Number of random training examples to score; None scores all.
    """

    subject: Subject
    noises: tuple[str, ...]
    fit_examples: int
    paper_damping: float
    short_runs: int
    short_epochs: int
    scored_examples: int | None = None


_TWO = ("symmetric 0.6", "asymmetric 0.3")
_MEMORISE = Recipe("one-cycle", 60, 0.05, weight_decay=0.0, checkpoint_every=6)
_MNIST = Settings(Subject("fashion-mnist", "lenet", _MEMORISE, 5000, 5000), _TWO, 5000, 1e-30, 3, 6)
PRESETS = {
    "digits": replace(
        _MNIST,
        subject=Subject("digits", "lenet", replace(_MEMORISE, epochs=12, batch_size=16, checkpoint_every=4), 200, 300),
        noises=("asymmetric 0.3",),
        fit_examples=300,
        short_runs=2,
        short_epochs=2,
    ),
    "mnist": _MNIST,
    "cifar10": replace(
        _MNIST,
        subject=Subject(
            "cifar10",
            "resnet18-width8",
            Recipe("one-cycle", 30, 0.05, weight_decay=0.0, batch_size=32, checkpoint_every=5),
            500,
            2000,
        ),
        noises=("human random1", "data-dependent", "asymmetric 0.3", "symmetric 0.6"),
        fit_examples=1000,
        paper_damping=1e-12,
        short_runs=2,
        short_epochs=3,
        scored_examples=800,
    ),
    "paper": Settings(
        Subject("cifar10", "resnet18", PAPER, 5000),
        ("human random1", "data-dependent", "asymmetric 0.3", "symmetric 0.6"),
        45000,
        1e-12,
        10,
        20,
    ),
}


def needs(settings: Settings) -> Iterable[tuple[str, str]]:
    """Return the data sets that the study needs: the training data."""
    return ((settings.subject.data, "train"),)


def run_of(settings: Settings, kind: str) -> tuple[Noisy, Trained]:
    """Return the data and the finished training with a kind of noise."""
    noisy = prepare(settings.subject, kind)
    return noisy, settings.subject.training(noisy.data, noisy.validation)


def _train(settings: Settings, kind: str, _: Results) -> dict[str, Any]:
    return stages(settings.subject, prepare(settings.subject, kind))


def short_networks(settings: Settings, noisy: Noisy) -> list[nn.Module]:
    """Return networks of other seeds after a few epochs."""
    seeds = range(settings.subject.seed + 1, settings.subject.seed + 1 + settings.short_runs)
    subjects = (replace(settings.subject, seed=seed) for seed in seeds)
    return [subject.training(noisy.data, None, until=settings.short_epochs).model() for subject in subjects]


def _short(settings: Settings, kind: str, _: Results) -> dict[str, float]:
    noisy = prepare(settings.subject, kind)
    networks, scored = short_networks(settings, noisy), noisy.sampled(settings.scored_examples, 1)
    batches = settings.subject.batches(scored.data)
    return {
        "EL2N": auroc(el2n(networks, batches), scored.wrong),
        "GraNd": auroc(grand(networks, batches), scored.wrong),
    }


def checkpoints_until(trained: Trained, epoch: int) -> Iterator[tuple[nn.Module, float]]:
    """Yield the networks and learning rates of TracIn: those stored up to an epoch, at least the first."""
    stored = [item for item in trained.checkpoints if item.epoch <= epoch] or [trained.checkpoints[0]]
    return ((trained.model(item.epoch), item.learning_rate) for item in stored)


def curvature_scores(settings: Settings, model: nn.Module, noisy: Noisy, batches: Batches) -> dict[str, np.ndarray]:
    """Return the scores [N] of all methods that need the curvature; larger = more suspicious."""
    subject = settings.subject
    fit_data = subject.batches(sample(noisy.data, settings.fit_examples, subject.seed))
    audit_fit, paper_fit = fit_grid(model, (1.0, PAPER_BETA), fit_data, fisher=subject.fisher)
    parameters = sum(value.numel() for value in model.parameters())
    audit = audit_fit.score(batches, damping=DAMPING)
    paper = paper_fit.score(batches, damping=settings.paper_damping / PAPER_BETA**2, linearized=True)
    return {
        "Self-IF": audit.column("influence"),
        IFCOMP: audit.column("stochastic_complexity"),
        AS_PAPER: paper.column("stochastic_complexity"),
        AUDIT: audit.column("label_complexity"),
        MIXED: audit.column("error") + paper.column("parametric_complexity") / parameters,
    }


def _stage(settings: Settings, kind: str, stage: str, results: Results) -> dict[str, float]:
    noisy, trained = run_of(settings, kind)
    epoch = results[f"{kind}, train"][stage]["epoch"]
    model, scored = at_stage(trained, stage, epoch), noisy.sampled(settings.scored_examples, 1)
    batches = settings.subject.batches(scored.data)
    probability, labels = in_sample_probabilities(model, batches), scored.data.labels.numpy()
    logits = run_data(model, batches).logits
    scores = {
        "TracIn": tracin(checkpoints_until(trained, epoch), batches),
        **curvature_scores(settings, model, noisy, batches),
        "loss": loss(logits, labels),
        "margin": margin(logits, labels),
        "cleanlab, self-confidence": label_suspicion(labels, probability),
        "cleanlab, weighted entropy": label_suspicion(labels, probability, "confidence_weighted_entropy"),
    }
    return {name: auroc(values, scored.wrong) for name, values in scores.items()} | results[f"{kind}, short runs"]


def steps(settings: Settings) -> dict[str, Step]:
    """For each kind of noise: train, run short trainings, then evaluate every stage."""
    named: dict[str, Step] = {}
    for kind in settings.noises:
        named[f"{kind}, train"] = partial(_train, settings, kind)
        named[f"{kind}, short runs"] = partial(_short, settings, kind)
        named |= {f"{kind}, {stage}": partial(_stage, settings, kind, stage) for stage in STAGES}
    return named


def _columns(record: Record) -> list[tuple[str, str]]:
    pairs = ((kind, stage) for kind in record.settings["noises"] for stage in STAGES)
    return [(kind, stage) for kind, stage in pairs if f"{kind}, {stage}" in record.results]


def _paper(kind: str, method: str) -> float | None:
    """Return the AUROC of the paper in percent on CIFAR-10 with ResNet-18, or None."""
    return PAPER_NUMBERS[kind.split()[0]].get("IF-COMP" if method == AS_PAPER else method)


def _scored(record: Record) -> str:
    count = record.settings.get("scored_examples")
    return "" if count is None else f", of which {count} are scored"


def table(record: Record) -> str:
    """Format the AUROC by method, noise and stage."""
    columns, settings = _columns(record), record.settings
    rows = []
    for method in METHODS:
        cells = [f"{100 * record.results[f'{kind}, {stage}'][method]:.1f}" for kind, stage in columns]
        published = [_paper(kind, method) for kind in settings["noises"]]
        rows.append([method, *cells, *(f"{value:.1f}" if value else "" for value in published)])
    header = [f"{kind}, {stage}" for kind, stage in columns] + [f"paper: {kind}" for kind in settings["noises"]]
    memorised = "; ".join(
        f"{kind}, {stage}: {100 * record.results[f'{kind}, train'][stage]['memorised']:.0f} % of the wrong labels "
        f"memorised, epoch {record.results[f'{kind}, train'][stage]['epoch']}"
        for kind, stage in columns
    )
    text = (
        f"AUROC of wrong labels among the training examples in percent ({settings['subject']['data']}, "
        f"{settings['subject']['model']}, trained on {settings['subject']['examples'] or 'all'}{_scored(record)}). "
        f"{memorised}. The numbers of the paper are for CIFAR-10 and ResNet-18 with early stopping. EL2N and GraNd use "
        "short runs of other seeds, TracIn uses checkpoints; all others use one network. IF-COMP is stochastic "
        "complexity, at beta 1 with a damping of 1 times the mean, at beta 0.001 with the damping of the paper. Label "
        "complexity, the score of label audits, compares the label with the most probable other label only.\n\n"
    )
    return text + markdown(["method", *header], rows)


def draw(record: Record, figure: Figure) -> None:
    """Plot the AUROC of every method, one panel per kind of noise."""
    noises = list(dict.fromkeys(kind for kind, _ in _columns(record)))
    figure.set_size_inches(5 * len(noises) + 2, 5)
    panels = figure.subplots(1, len(noises), sharey=True, squeeze=False)[0]
    positions = np.arange(len(METHODS))[::-1]
    lowest = min(
        100 * record.results[f"{kind}, {stage}"][method] for kind, stage in _columns(record) for method in METHODS
    )
    for axes, kind in zip(panels, noises, strict=True):
        shown_stages = [stage for other, stage in _columns(record) if other == kind]
        for index, stage in enumerate(shown_stages):
            values = [100 * record.results[f"{kind}, {stage}"][method] for method in METHODS]
            share = record.results[f"{kind}, train"][stage]["memorised"]
            title = f"{stage}: {100 * share:.0f} % memorised"
            axes.barh(positions + 0.27 * (1 - index), values, 0.27, label=title)
        axes.axvline(50, color="0.5", linewidth=1, linestyle="--")
        for position, method in zip(positions, METHODS, strict=True):
            if _paper(kind, method):
                axes.plot(_paper(kind, method), position, "kx", markersize=6)
        axes.plot([], [], "kx", label="paper, CIFAR-10")
        axes.set(xlabel="mislabel AUROC (%), larger is better", title=kind, xlim=(min(35, lowest - 2), 101))
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, fontsize=8)
    panels[0].set_yticks(positions, METHODS)


def _counts(record: Record, kind: str) -> tuple[int, int]:
    """Return the number of scored examples, and about how many of them have a wrong label."""
    settings = record.settings
    count = settings.get("scored_examples") or settings["subject"]["examples"] or FULL_TRAINING_SET
    return count, round(count * record.results[f"{kind}, train"]["wrong"])


def claims(record: Record) -> list[Claim]:
    """Compare IF-COMP at beta 1 with the other methods of the paper at every stage.

    The results have no scores of single examples, so the interval is the wide one of `bounded_auroc_difference`.
    """
    statements = []
    for kind, stage in _columns(record):
        aurocs = {name: 100 * value for name, value in record.results[f"{kind}, {stage}"].items()}
        rival = max(("TracIn", "EL2N", "GraNd", "Self-IF"), key=aurocs.__getitem__)
        published = _paper(kind, AS_PAPER)
        count, wrong = _counts(record, kind)
        statements.append(
            Claim(
                f"{record.settings['subject']['data']}, {kind}, {stage}: IF-COMP finds wrong labels better than "
                "TracIn, EL2N, GraNd and Self-IF",
                f"{published:.1f} (CIFAR-10, early)" if stage == "early" and published else "no number",
                f"{aurocs[IFCOMP]:.1f} (beta 1), {aurocs[AS_PAPER]:.1f} (beta 0.001); best other: {rival} "
                f"{aurocs[rival]:.1f}; plain loss: {aurocs['loss']:.1f}; label complexity: {aurocs[AUDIT]:.1f}",
                f"{count:,} labels, {wrong:,} wrong",
                bounded_auroc_difference(aurocs[IFCOMP] / 100, aurocs[rival] / 100, count - wrong, wrong).scaled(100),
                digits=1,
            )
        )
    return statements


STUDY = Study("mislabel", "Mislabel detection: AUROC by noise and stage", PRESETS, needs, steps, table, draw, claims)
