"""Wrong labels: AUROC of stochastic complexity beside other scores (the paper's table of mislabel detection).

The paper stops early on clean validation data; here the same run is also looked at when half of the wrong labels are
memorised, and at its end. Plain loss, margin and cleanlab, which the paper leaves out, need no curvature.
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
from experiments.datasets import Batches
from experiments.recipes import PAPER, Recipe
from experiments.reproduce.noisy import STAGES, Noisy, at_stage, prepare, stages
from experiments.reproduce.paper import MISLABEL as PAPER_NUMBERS
from experiments.reproduce.publish import markdown
from experiments.reproduce.study import Claim, Record, Results, Step, Study
from experiments.reproduce.subject import Subject, sample
from experiments.runs import Trained
from ifcomp import Relative
from ifcomp.tasks.metrics import auroc
from ifcomp.tasks.mislabel import AUDIT_BETA, AUDIT_COLUMN
from ifcomp.tasks.simple_scores import loss, margin
from ifcomp.tuning import fit_grid

if TYPE_CHECKING:
    from matplotlib.figure import Figure

IFCOMP, AS_PAPER = "IF-COMP, beta 1", "IF-COMP, beta 0.001"
#: What the library's label audits sort by.
AUDIT = "label complexity, beta 1"
#: The sum that the paper's figure of components suggests: its complexity is divided by the number of parameters.
MIXED = "error at beta 1 + scaled complexity at beta 0.001"
PAPER_BETA = 0.001
#: Of all scores at beta 1.
DAMPING = Relative(1.0)
#: In the order of the table; the first five are the paper's.
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
        subject: The network; its recipe must keep weights on the way.
        noises: Kinds of wrong labels.
        fit_examples: For the curvature, of the noisy data.
        paper_damping: Absolute, in the paper's units, for beta 0.001.
        short_runs: How many networks EL2N and GraNd average.
        short_epochs: For how long those are trained.
        scored_examples: Of the training examples, at random; None scores all.
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
    """Only the training data."""
    return ((settings.subject.data, "train"),)


def run_of(settings: Settings, kind: str) -> tuple[Noisy, Trained]:
    """The data and the finished training with a kind of noise."""
    noisy = prepare(settings.subject, kind)
    return noisy, settings.subject.training(noisy.data, noisy.validation)


def _train(settings: Settings, kind: str, _: Results) -> dict[str, Any]:
    return stages(settings.subject, prepare(settings.subject, kind))


def short_networks(settings: Settings, noisy: Noisy) -> list[nn.Module]:
    """Networks of other seeds after a few epochs."""
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
    """Networks with learning rates as TracIn sums over them: those kept up to an epoch, at least the first."""
    kept = [item for item in trained.checkpoints if item.epoch <= epoch] or [trained.checkpoints[0]]
    return ((trained.model(item.epoch), item.learning_rate) for item in kept)


def curvature_scores(settings: Settings, model: nn.Module, noisy: Noisy, batches: Batches) -> dict[str, np.ndarray]:
    """Scores [N] of ``batches`` by every method that needs the curvature; larger = more suspicious."""
    subject = settings.subject
    fit_data = subject.batches(sample(noisy.data, settings.fit_examples, subject.seed))
    own, cold = fit_grid(model, (AUDIT_BETA, PAPER_BETA), fit_data, fisher=subject.fisher)
    parameters = sum(value.numel() for value in model.parameters())
    audit = own.score(batches, damping=DAMPING)
    paper = cold.score(batches, damping=settings.paper_damping / PAPER_BETA**2, linearized=True)
    return {
        "Self-IF": audit.column("influence"),
        IFCOMP: audit.column("stochastic_complexity"),
        AS_PAPER: paper.column("stochastic_complexity"),
        AUDIT: audit.column(AUDIT_COLUMN),
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
    return {name: auroc(found, scored.wrong) for name, found in scores.items()} | results[f"{kind}, short runs"]


def steps(settings: Settings) -> dict[str, Step]:
    """For each kind of noise: train, the short runs, then every stage."""
    found: dict[str, Step] = {}
    for kind in settings.noises:
        found[f"{kind}, train"] = partial(_train, settings, kind)
        found[f"{kind}, short runs"] = partial(_short, settings, kind)
        found |= {f"{kind}, {stage}": partial(_stage, settings, kind, stage) for stage in STAGES}
    return found


def _columns(record: Record) -> list[tuple[str, str]]:
    pairs = ((kind, stage) for kind in record.settings["noises"] for stage in STAGES)
    return [(kind, stage) for kind, stage in pairs if f"{kind}, {stage}" in record.results]


def _paper(kind: str, method: str) -> float | None:
    """The paper's AUROC in percent on CIFAR-10, ResNet-18."""
    return PAPER_NUMBERS[kind.split()[0]].get("IF-COMP" if method == AS_PAPER else method)


def _scored(record: Record) -> str:
    count = record.settings.get("scored_examples")
    return "" if count is None else f", of which {count} are scored"


def table(record: Record) -> str:
    """Methods by noise and stage."""
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
    words = (
        f"AUROC in percent of wrong labels among the training examples ({settings['subject']['data']}, "
        f"{settings['subject']['model']}, trained on {settings['subject']['examples'] or 'all'}{_scored(record)}). "
        f"{memorised}. The paper's numbers are for CIFAR-10 and ResNet-18, stopped "
        "early. EL2N and GraNd come from short runs of other seeds, TracIn from checkpoints; all others from the one "
        "network. IF-COMP at beta 1 is the sum with the library's audit damping, at beta 0.001 the paper's damping; "
        "label complexity, by which the library's audits sort, is that among it and the most likely other.\n\n"
    )
    return words + markdown(["method", *header], rows)


def draw(record: Record, figure: Figure) -> None:
    """AUROC of every method, one panel a kind of noise."""
    noises = list(dict.fromkeys(kind for kind, _ in _columns(record)))
    figure.set_size_inches(5 * len(noises) + 2, 5)
    panels = figure.subplots(1, len(noises), sharey=True, squeeze=False)[0]
    places = np.arange(len(METHODS))[::-1]
    lowest = min(
        100 * record.results[f"{kind}, {stage}"][method] for kind, stage in _columns(record) for method in METHODS
    )
    for axes, kind in zip(panels, noises, strict=True):
        found = [stage for other, stage in _columns(record) if other == kind]
        for index, stage in enumerate(found):
            values = [100 * record.results[f"{kind}, {stage}"][method] for method in METHODS]
            share = record.results[f"{kind}, train"][stage]["memorised"]
            title = f"{stage}: {100 * share:.0f} % memorised"
            axes.barh(places + 0.27 * (1 - index), values, 0.27, label=title)
        axes.axvline(50, color="0.5", linewidth=1, linestyle="--")
        for place, method in zip(places, METHODS, strict=True):
            if _paper(kind, method):
                axes.plot(_paper(kind, method), place, "kx", markersize=6)
        axes.plot([], [], "kx", label="paper, CIFAR-10")
        axes.set(xlabel="mislabel AUROC (%), larger is better", title=kind, xlim=(min(35, lowest - 2), 101))
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, fontsize=8)
    panels[0].set_yticks(places, METHODS)


def claims(record: Record) -> list[Claim]:
    """Best of the paper's methods at every stage, with the library's settings; the paper's own beta is beside it."""
    made = []
    for kind, stage in _columns(record):
        found = {name: 100 * value for name, value in record.results[f"{kind}, {stage}"].items()}
        rival = max(("TracIn", "EL2N", "GraNd", "Self-IF"), key=found.__getitem__)
        published = _paper(kind, AS_PAPER)
        made.append(
            Claim(
                f"{record.settings['subject']['data']}, {kind}, {stage}: IF-COMP finds wrong labels better than "
                "TracIn, EL2N, GraNd and Self-IF",
                f"{published:.1f} (CIFAR-10, early)" if stage == "early" and published else "no number",
                f"{found[IFCOMP]:.1f} (beta 1), {found[AS_PAPER]:.1f} (beta 0.001); best other: {rival} "
                f"{found[rival]:.1f}; plain loss: {found['loss']:.1f}; label complexity: {found[AUDIT]:.1f}",
                found[IFCOMP] > found[rival],
            )
        )
    return made


STUDY = Study("mislabel", "Mislabel detection: AUROC by noise and stage", PRESETS, needs, steps, table, draw, claims)
