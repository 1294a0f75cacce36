"""Components of stochastic complexity during a training with label noise (component figure of the paper).

The trainings are those of the study of wrong labels. The paper uses CIFAR-10 with human labels and ResNet-18.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from experiments.bootstrap import Interval, bounded_auroc_difference
from experiments.recipes import PAPER
from experiments.reproduce import mislabel
from experiments.reproduce.noisy import memorised, prepare
from experiments.reproduce.paper import COMPONENTS_END
from experiments.reproduce.publish import markdown
from experiments.reproduce.study import Claim, Record, Results, Step, Study
from experiments.reproduce.subject import Subject, sample
from experiments.tuning import fit_grid
from ifcomp.tasks.metrics import auroc

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Settings:
    """Settings of the study.

    Attributes:
        subject: Network and data of the study of wrong labels.
        noise: Kind of label noise.
        betas: Inverse temperatures, including 1.
        fit_examples: Number of examples of the curvature.
        scored_examples: Number of scored training examples.
        paper_damping: Absolute damping in the units of the paper.
    """

    subject: Subject
    noise: str
    betas: tuple[float, ...]
    fit_examples: int
    scored_examples: int
    paper_damping: float


def _like(preset: str, noise: str, fit_examples: int, scored_examples: int) -> Settings:
    shared = mislabel.PRESETS[preset]
    return Settings(shared.subject, noise, (1.0, 0.5, 0.1, 0.001), fit_examples, scored_examples, shared.paper_damping)


PRESETS = {
    "digits": replace(_like("digits", "asymmetric 0.3", 100, 150), betas=(1.0, 0.001)),
    "mnist": _like("mnist", "asymmetric 0.3", 1500, 2500),
    "cifar10": _like("cifar10", "human random1", 500, 500),
    "paper": replace(
        _like("paper", "human random1", 45000, 45000),
        subject=Subject("cifar10", "resnet18", replace(PAPER, checkpoint_every=5), 5000),
    ),
}


def _train(settings: Settings, _: Results) -> dict[str, Any]:
    noisy = prepare(settings.subject, settings.noise)
    trained = settings.subject.training(noisy.data, noisy.validation)
    return {"epochs": [kept.epoch for kept in trained.checkpoints], "best_epoch": trained.best_epoch}


def _epoch(settings: Settings, epoch: int, _: Results) -> dict[str, Any]:
    """Return the AUROC of error, complexity at every beta, and sums after one epoch."""
    subject, noisy = settings.subject, prepare(settings.subject, settings.noise)
    model = subject.training(noisy.data, noisy.validation).model(epoch)
    scored = noisy.sampled(settings.scored_examples, 1)
    batches, truth = subject.batches(scored.data), scored.wrong
    fit_data = subject.batches(sample(noisy.data, settings.fit_examples))
    parameters = sum(value.numel() for value in model.parameters())
    complexity, error = {}, None
    for ifc in fit_grid(model, settings.betas, fit_data, fisher=subject.fisher):
        table = ifc.score(batches, damping=settings.paper_damping / ifc.beta**2, linearized=True)
        complexity[ifc.beta] = table.column("parametric_complexity")
        if ifc.beta == 1:
            error = table.column("error")
            audit = ifc.score(batches, damping=mislabel.DAMPING).column("stochastic_complexity")
    return {
        "memorised": memorised(subject, model, noisy),
        "error": auroc(error, truth),
        "complexity": {str(beta): auroc(values, truth) for beta, values in complexity.items()},
        "sum": auroc(audit, truth),
        "sum, as the paper's": auroc(error + complexity[min(complexity)] / parameters, truth),
    }


def steps(settings: Settings) -> dict[str, Step]:
    """Train, then evaluate one epoch after the other."""
    recipe = settings.subject.recipe
    stored = [epoch for epoch in range(1, recipe.total_epochs + 1) if recipe.keeps(epoch)]
    return {"train": partial(_train, settings)} | {f"epoch {e}": partial(_epoch, settings, e) for e in stored}


def _epochs(record: Record) -> dict[int, Any]:
    rows = ((name.removeprefix("epoch "), row) for name, row in record.results.items() if name.startswith("epoch "))
    return {int(epoch): row for epoch, row in rows}


def table(record: Record) -> str:
    """Format one row per epoch."""
    settings, betas = record.settings, [str(beta) for beta in record.settings["betas"]]
    rows = []
    for epoch, row in _epochs(record).items():
        values = [row["error"], row["sum"], row["sum, as the paper's"], *(row["complexity"][beta] for beta in betas)]
        rows.append([str(epoch), f"{100 * row['memorised']:.0f} %", *(f"{100 * value:.1f}" for value in values)])
    end = COMPONENTS_END
    published = [end["error"], end["IF-COMP"], end["IF-COMP"], *(end[float(beta)] for beta in betas)]
    rows.append(["paper, end", "", *(f"{100 * value:.1f}" for value in published)])
    text = (
        f"AUROC of wrong labels in percent ({settings['noise']}, {settings['subject']['data']}, "
        f"{settings['subject']['model']}). Parametric complexity uses the damping of the paper. The sum is shown with "
        "the settings of label audits (beta 1), and as the figure of the paper suggests (error + complexity at the "
        "smallest beta divided by the number of parameters). The last row is the end of the training in the paper, on "
        "CIFAR-10 with human labels.\n\n"
    )
    header = ["epoch", "memorised", "error", "sum, audit", "sum, paper", *(f"complexity, beta {b}" for b in betas)]
    return text + markdown(header, rows)


def _lines(axes: Axes, epochs: dict[int, Any], lines: dict[str, list[float]]) -> None:
    for title, values in lines.items():
        axes.plot(list(epochs), values, marker="o", markersize=3, label=title)
    axes.axhline(0.5, color="0.6", linewidth=1, linestyle="--")
    axes.set(xlabel="training epoch", ylabel="mislabel AUROC", ylim=(0.3, 1), xlim=(0, None))
    axes.legend(loc="lower right", fontsize=8)


def draw(record: Record, figure: Figure) -> None:
    """Plot the components and their sum (left) and the complexity at every beta (right)."""
    figure.set_size_inches(10, 4)
    left, right = figure.subplots(1, 2)
    epochs, betas = _epochs(record), [str(beta) for beta in record.settings["betas"]]
    smallest = min(betas, key=float)
    parts = {
        f"parametric complexity, beta {smallest}": [row["complexity"][smallest] for row in epochs.values()],
        "log error": [row["error"] for row in epochs.values()],
        "IF-COMP (audit settings)": [row["sum"] for row in epochs.values()],
        "IF-COMP (as the paper's)": [row["sum, as the paper's"] for row in epochs.values()],
        "share of wrong labels memorised": [row["memorised"] for row in epochs.values()],
    }
    _lines(left, epochs, parts)
    left.set_ylim(0, 1)
    _lines(right, epochs, {f"beta {b}": [row["complexity"][b] for row in epochs.values()] for b in betas})
    left.set_title("components", fontsize=10)
    right.set_title("parametric complexity", fontsize=10)


def wrong_share(noise: str) -> float:
    """Return the share of wrong labels of a kind of noise."""
    kind, _, share = noise.partition(" ")
    return {"human": 0.17, "data-dependent": 0.6}.get(kind) or float(share)


def claims(record: Record) -> list[Claim]:
    """Compare the claims about the figure.

    The results have no scores of single examples, so the intervals are the wide ones of `bounded_auroc_difference`.
    """
    epochs = _epochs(record)
    last, peak = epochs[max(epochs)], max(epochs, key=lambda epoch: epochs[epoch]["error"])
    betas = sorted(last["complexity"], key=float)
    smallest_beta, beta_one = last["complexity"][betas[0]], last["complexity"]["1.0"]
    end, data = COMPONENTS_END, record.settings["subject"]["data"]
    count = record.settings["scored_examples"]
    wrong = round(count * wrong_share(record.settings["noise"]))
    size = f"{count:,} labels, about {wrong:,} wrong"

    def lead(first: float, second: float) -> Interval:
        return bounded_auroc_difference(first, second, count - wrong, wrong).scaled(100)

    lowest = min(epochs.values(), key=lambda row: row["sum"] - row["error"])
    return [
        Claim(
            f"{data}: error detects wrong labels early in training, and fails as they are memorised",
            f"{100 * 0.890:.1f} at epoch 5, {100 * end['error']:.1f} at the end",
            f"{100 * epochs[peak]['error']:.1f} at epoch {peak}, {100 * last['error']:.1f} at the end",
            size,
            lead(epochs[peak]["error"], last["error"]),
            digits=1,
        ),
        Claim(
            f"{data}: at the end, parametric complexity detects wrong labels better at beta {betas[0]} than at beta 1",
            f"{100 * end[0.001]:.1f} and {100 * end[1.0]:.1f}",
            f"{100 * smallest_beta:.1f} and {100 * beta_one:.1f}",
            size,
            lead(smallest_beta, beta_one),
            digits=1,
        ),
        Claim(
            f"{data}: the sum is at most 1 point worse than the error throughout training",
            f"{100 * end['IF-COMP']:.1f} and {100 * end['error']:.1f} at the end",
            f"{100 * last['sum']:.1f} and {100 * last['error']:.1f} at the end (audit settings); at worst "
            f"{100 * (lowest['sum'] - lowest['error']):+.1f} relative to the error",
            size,
            lead(lowest["sum"], lowest["error"]),
            margin=1.0,
            digits=1,
        ),
    ]


STUDY = Study("components", "Components of IF-COMP over training", PRESETS, mislabel.needs, steps, table, draw, claims)
