"""Inputs from elsewhere: AUROC of parametric complexity beside the detectors of pytorch-ood (the paper's table of OOD).

Beta and damping are chosen together on inputs that share no source with a reported data set: another real data set, and
`strangers` that are made from validation images or from nothing. The detectors have their package's parameters, as
given.

The linearised hindsight probabilities ``p (1 + alpha/n IF)`` of the paper grow beyond 1. A variant caps them at 1, as
probabilities are; then alpha matters, and is chosen too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from experiments.baselines.detectors import OOD_BASELINES
from experiments.baselines.inference import model_logits
from experiments.baselines.ood import ood_scores
from experiments.datasets import Dataset, load
from experiments.recipes import PAPER, QUICK
from experiments.reproduce import strangers
from experiments.reproduce.paper import OOD as PAPER_NUMBERS
from experiments.reproduce.publish import markdown
from experiments.reproduce.study import Claim, Record, Results, Step, Study
from experiments.reproduce.subject import Subject, sample
from experiments.training import evaluate
from ifcomp import IFComp, Relative
from ifcomp.complexity import capped_complexity, expected_influence, parametric_complexity
from ifcomp.tasks.ood import OOD_DAMPING, ood_metrics
from ifcomp.tuning import fit_grid

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ifcomp.curvature.factors import Damping

#: Sets with this prefix are `strangers`, made from images of the network's own kind.
MADE = "made-"
#: The paper's names of detectors, where pytorch-ood has others.
PAPER_NAMES = {"MaxLogit": "MLS", "RMD": "RMDS", "ViM": "VIM"}
IFCOMP, CAPPED = "IF-COMP, tuned", "IF-COMP, capped, tuned"
#: What the paper's numbers are of.
PAPER_SETS = {
    "mnist": "The paper's far sets also have textures and places.",
    "cifar10": "The paper's near sets are CIFAR-100 and TinyImageNet, its far sets MNIST, SVHN, textures and places.",
}
AS_PAPER, DEFAULT = "IF-COMP, the paper's beta and damping", "IF-COMP, default"
DEFAULT_BETA = 1.0


@dataclass(frozen=True)
class Settings:
    """Settings of the study.

    Attributes:
        subject: The network.
        near: Test sets that look like the training data.
        far: Test sets that do not.
        also: More test sets, reported beside them.
        images: Of each test set.
        tuning_near: Sets to tune on that look like the training data.
        tuning_far: Sets to tune on that do not.
        tuning_images: Of each of them.
        fit_examples: Of the training data, for curvature and detectors; None takes all.
        betas: To choose from.
        dampings: To choose from, relative to a layer's mean; 0 is none.
        alphas: To choose from, for capped hindsight probabilities.
        paper_beta: As in the paper for this network.
        paper_damping: Absolute, in the paper's units.
        detectors: Names of `OOD_BASELINES`.
        seed: Of samples and strangers.
    """

    subject: Subject
    near: tuple[str, ...]
    far: tuple[str, ...]
    also: tuple[str, ...]
    images: int
    tuning_near: tuple[str, ...]
    tuning_far: tuple[str, ...]
    tuning_images: int
    fit_examples: int | None
    betas: tuple[float, ...]
    dampings: tuple[float, ...]
    alphas: tuple[float, ...]
    paper_beta: float
    paper_damping: float
    detectors: tuple[str, ...]
    seed: int = 0

    @property
    def test_sets(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.near, *self.far, *self.also)

    @property
    def tuning_sets(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.tuning_near, *self.tuning_far)


#: The paper's detectors, and as many that are often used.
_COMMON = (
    *("MSP", "MaxLogit", "Energy", "ODIN", "KNN", "RMD", "ViM", "GradNorm", "Gram"),
    *("Entropy", "GEN", "ReAct", "ASH", "SHE", "Mahalanobis"),
)
_MNIST = Settings(
    Subject("mnist", "lenet", QUICK, 5000),
    near=("notmnist", "fashion-mnist"),
    far=("cifar10", "tinyimagenet"),
    also=(),
    images=3000,
    tuning_near=("kmnist",),
    tuning_far=("made-noise", "made-clouds"),
    tuning_images=600,
    fit_examples=20000,
    betas=(0.001, 0.1, 0.2, 0.3, 0.45, 0.66, 1.0, 2.0),
    dampings=(1e-8, 1e-4, 1e-2),
    alphas=(0.03, 0.1, 0.3, 1.0, 3.0),
    paper_beta=2.0,
    paper_damping=1e-30,
    detectors=tuple(OOD_BASELINES),
)
PRESETS = {
    "digits": replace(
        _MNIST,
        subject=Subject("digits", "lenet", replace(QUICK, epochs=4, batch_size=32), 200),
        near=("made-patches",),
        far=("made-inverted", "made-clouds"),
        images=100,
        tuning_near=("made-halves",),
        tuning_far=("made-noise",),
        tuning_images=50,
        fit_examples=150,
        betas=(0.66, 1.0),
        dampings=(1e-4, 0.1),
        alphas=(0.1, 1.0),
        detectors=("MSP", "Energy", "KNN", "ViM"),
    ),
    "mnist": _MNIST,
    "cifar10": replace(
        _MNIST,
        subject=Subject("cifar10", "resnet20", None, 2000),
        near=("tinyimagenet",),
        far=("mnist", "fashion-mnist", "notmnist"),
        images=300,
        tuning_near=("made-halves", "made-patches"),
        tuning_far=("kmnist", "made-noise", "made-clouds"),
        tuning_images=60,
        fit_examples=3000,
        betas=(0.001, 0.3, 1.0),
        dampings=(1e-6, 1e-2, 1.0),
        paper_beta=0.001,
        paper_damping=1e-12,
        detectors=_COMMON,
    ),
    "paper": replace(
        _MNIST,
        subject=Subject("cifar10", "resnet18", PAPER, 5000),
        near=("tinyimagenet",),
        far=("mnist", "fashion-mnist", "notmnist"),
        images=10000,
        tuning_near=("made-halves", "made-patches"),
        tuning_far=("kmnist", "made-noise", "made-clouds"),
        fit_examples=None,
        paper_beta=0.001,
        paper_damping=1e-12,
    ),
}


def _needs(settings: Settings) -> Iterable[tuple[str, str]]:
    own = settings.subject.data
    sets = (*settings.test_sets, *settings.tuning_sets)
    return (own, "train"), (own, "test"), *((name, "test") for name in sets if not name.startswith(MADE))


def _images(settings: Settings, name: str, own: Dataset) -> Dataset:
    """As many images as ``own`` has, as the network takes them: of a data set, or made from ``own``."""
    if name.startswith(MADE):
        return strangers.make(name.removeprefix(MADE), own, settings.seed)
    data = settings.subject.fitted_to(sample(load(name), len(own), settings.seed))
    return replace(data, labels=None)


@lru_cache(maxsize=1)
def _known(settings: Settings) -> Any:
    """Training data for curvature and detectors."""
    known, _, _ = settings.subject.parts()
    return settings.subject.batches(sample(known, settings.fit_examples or len(known), settings.seed))


@lru_cache(maxsize=1)
def _loaders(settings: Settings) -> dict[str, Any]:
    """All test sets, the network's own as ``in``."""
    own = sample(settings.subject.parts()[2], settings.images, settings.seed)
    sets = {"in": own} | {name: _images(settings, name, own) for name in settings.test_sets}
    return {name: settings.subject.inputs(data) for name, data in sets.items()}


@lru_cache(maxsize=1)
def _fits(settings: Settings) -> dict[float, IFComp]:
    """A predictor for every beta that is tried or reported."""
    betas = list(dict.fromkeys((*settings.betas, settings.paper_beta, DEFAULT_BETA)))
    network = settings.subject.network()
    return dict(zip(betas, fit_grid(network, betas, _known(settings), fisher=settings.subject.fisher), strict=True))


def _hindsight(ifc: IFComp, batches: Any, damping: Damping) -> tuple[Tensor, Tensor]:
    """Probability at beta and influence of every label: [N, K] each."""
    inputs = [x for (x,) in batches]
    probability = torch.cat([(ifc.beta * model_logits(ifc.model, x)).softmax(1) for x in inputs])
    return probability, torch.cat([ifc.influence(x, damping=damping) for x in inputs])


def complexity(probability: Tensor, influence: Tensor, count: int, alpha: float | None) -> np.ndarray:
    """Parametric complexity [N] in nats; larger = more surprising.

    Args:
        probability: At beta, [N, K].
        influence: Of every label, [N, K].
        count: Examples of the curvature, n.
        alpha: With hindsight probabilities capped at 1; None takes the paper's form, whose order alpha does not change.
    """
    if alpha is None:
        return parametric_complexity(expected_influence(probability, influence), count).numpy()
    return capped_complexity(probability, influence, count, alpha).numpy()


def _measured(scores: dict[str, np.ndarray]) -> dict[str, dict[str, float]]:
    """Metrics of every test set against the network's own test data."""
    return {name: vars(ood_metrics(scores["in"], found)) for name, found in scores.items() if name != "in"}


def _network(settings: Settings, _: Results) -> dict[str, float]:
    subject = settings.subject
    loss, accuracy = evaluate(subject.network(), subject.batches(subject.parts()[2]))
    return {"test_accuracy": accuracy, "test_loss": loss}


def _tuning(settings: Settings, _: Results) -> dict[str, Any]:
    """AUROC against validation images for every beta and damping; the mean over near and far sets chooses."""
    subject = settings.subject
    own = sample(subject.parts()[1], 2 * settings.tuning_images, settings.seed)
    half = torch.arange(len(own)) % 2 == 0
    inside, base = own.take(half.nonzero()[:, 0], "even"), own.take((~half).nonzero()[:, 0], "odd")
    outside = {name: _images(settings, name, base) for name in settings.tuning_sets}
    rows = []
    for ifc in (_fits(settings)[beta] for beta in settings.betas):
        for multiple in settings.dampings:
            parts = {
                name: _hindsight(ifc, subject.inputs(data), Relative(multiple))
                for name, data in {"in": inside, **outside}.items()
            }
            for alpha in (None, *settings.alphas):
                scores = {name: complexity(*found, ifc.factors.count, alpha) for name, found in parts.items()}
                aurocs = {name: row["auroc"] for name, row in _measured(scores).items()}
                near, far = (
                    float(np.mean([aurocs[name] for name in names]))
                    for names in (settings.tuning_near, settings.tuning_far)
                )
                chosen = {"beta": ifc.beta, "damping": multiple, "alpha": alpha}
                rows.append(chosen | {"near": near, "far": far, "auroc": aurocs})
    return {
        name: max((row for row in rows if (row["alpha"] is None) == plain), key=lambda row: row["near"] + row["far"])
        for name, plain in ((IFCOMP, True), (CAPPED, False))
    } | {"grid": rows}


def _ifcomp(settings: Settings, results: Results) -> dict[str, Any]:
    """Metrics of the tuned, the paper's and the default beta and damping."""
    choices: dict[str, tuple[float, Any, float | None]] = {
        name: (found["beta"], Relative(found["damping"]), found["alpha"])
        for name, found in results["tuning"].items()
        if name != "grid"
    }
    choices[AS_PAPER] = (settings.paper_beta, settings.paper_damping / settings.paper_beta**2, None)
    choices[DEFAULT] = (DEFAULT_BETA, OOD_DAMPING, None)
    loaders, fits = _loaders(settings), _fits(settings)

    @cache
    def parts(beta: float, damping: Any) -> dict[str, tuple[Tensor, Tensor]]:
        return {key: _hindsight(fits[beta], data, damping) for key, data in loaders.items()}

    found = {}
    for name, (beta, damping, alpha) in choices.items():
        count = fits[beta].factors.count
        scores = {key: complexity(*part, count, alpha) for key, part in parts(beta, damping).items()}
        found[name] = {"beta": beta, "damping": repr(damping), "alpha": alpha, "sets": _measured(scores)}
    return found


def _detector(settings: Settings, name: str, _: Results) -> dict[str, Any]:
    network, train = settings.subject.network(), _known(settings)
    return {"sets": _measured(ood_scores(name, network, train, _loaders(settings), seed=settings.seed))}


def steps(settings: Settings) -> dict[str, Step]:
    """Train, tune, score, then one detector after the other."""
    found: dict[str, Step] = {
        "network": partial(_network, settings),
        "tuning": partial(_tuning, settings),
        "ifcomp": partial(_ifcomp, settings),
    }
    return found | {f"detector {name}": partial(_detector, settings, name) for name in settings.detectors}


def summary(record: Record) -> dict[str, dict[str, float]]:
    """For every method the AUROC in percent: mean over near and far sets, and of every set."""
    methods = dict(record.results.get("ifcomp", {}))
    prefix = "detector "
    methods |= {name.removeprefix(prefix): row for name, row in record.results.items() if name.startswith(prefix)}
    found = {}
    for name, row in methods.items():
        aurocs = {key: 100 * metrics["auroc"] for key, metrics in row["sets"].items()}
        means = {split: float(np.mean([aurocs[key] for key in record.settings[split]])) for split in ("near", "far")}
        found[name] = means | aurocs
    return found


def _paper(record: Record, method: str) -> tuple[float, float] | None:
    """The paper's near and far AUROC of a method on this data."""
    known = PAPER_NUMBERS.get(record.settings["subject"]["data"], {})
    return known.get("IF-COMP" if method in (IFCOMP, CAPPED) else PAPER_NAMES.get(method, method))


def table(record: Record) -> str:
    """Methods from the best to the worst mean of near and far."""
    settings, tuned = record.settings, record.results["tuning"]
    columns = ["near", "far", *settings["near"], *settings["far"], *settings["also"]]
    found = sorted(summary(record).items(), key=lambda item: -(item[1]["near"] + item[1]["far"]))
    rows = []
    for name, values in found:
        published = _paper(record, name)
        cells = [f"{values[column]:.2f}" for column in columns]
        bold = f"**{name}**" if name in (IFCOMP, CAPPED) else name
        rows.append([bold, *cells, f"{published[0]:.2f} / {published[1]:.2f}" if published else ""])
    words = (
        f"AUROC in percent, {settings['images']:,} images a set; near: {', '.join(settings['near'])}; far: "
        f"{', '.join(settings['far'])}. Network: {settings['subject']['model']}, test accuracy "
        f"{100 * record.results['network']['test_accuracy']:.2f} %. Tuned on validation images "
        f"against {', '.join(settings['tuning_near'])} (near) and {', '.join(settings['tuning_far'])} (far), which are "
        f"not reported on: beta {tuned[IFCOMP]['beta']:g}, damping {tuned[IFCOMP]['damping']:g} times the mean; with "
        f"hindsight probabilities capped at 1, beta {tuned[CAPPED]['beta']:g}, damping {tuned[CAPPED]['damping']:g} "
        f"times the mean, alpha {tuned[CAPPED]['alpha']:g}. Detectors have the parameters of pytorch-ood, not tuned. "
        f"Curvature and detectors see {settings['fit_examples'] or 'all'} training images. "
        f"{PAPER_SETS.get(settings['subject']['data'], '')}\n\n"
    )
    return words + markdown(["method", *columns, "paper, near / far"], rows)


def draw(record: Record, figure: Figure) -> None:
    """What near and far AUROC lack to 100 % for every method, the best on top; logarithmic, because many come close."""
    found = sorted(summary(record).items(), key=lambda item: item[1]["near"] + item[1]["far"])
    figure.set_size_inches(8, 1.5 + 0.22 * len(found))
    axes, places = figure.add_subplot(), np.arange(len(found))
    for index, (split, colour) in enumerate((("near", "tab:blue"), ("far", "tab:orange"))):
        axes.plot([100 - values[split] for _, values in found], places, "o", color=colour, label=split)
        published = {place: _paper(record, name) for place, (name, _) in enumerate(found)}
        known = {place: 100 - numbers[index] for place, numbers in published.items() if numbers}
        axes.plot(list(known.values()), list(known), "x", color=colour, label=f"{split}, paper")
    axes.set_yticks(places, [name for name, _ in found])
    for label, (name, _) in zip(axes.get_yticklabels(), found, strict=True):
        label.set_fontweight("bold" if name.startswith("IF-COMP") else "normal")
    axes.set(xscale="log", xlabel="100 - AUROC (%), smaller is better", ylim=(-0.7, len(found) - 0.3))
    axes.grid(axis="y", color="0.9")
    figure.legend(loc="outside lower center", ncols=4)


def claims(record: Record) -> list[Claim]:
    """High AUROC, and above every other detector: as the paper has it, and capped."""
    found, data = summary(record), record.settings["subject"]["data"]
    published = _paper(record, IFCOMP)
    others = {name: values for name, values in found.items() if not name.startswith("IF-COMP")}
    made = []
    for index, split in enumerate(("near", "far")):
        best = max(others, key=lambda name: others[name][split])
        number = f"{published[index]:.2f}" if published else "no number"
        for method, words in ((IFCOMP, "parametric complexity"), (CAPPED, "parametric complexity, capped,")):
            ours = found[method][split]
            made.append(
                Claim(
                    f"{data}: {words} detects {split} inputs better than every other detector",
                    f"{number}; best of 20 others is lower",
                    f"{ours:.2f}; best of {len(others)} others: {best} {others[best][split]:.2f}",
                    ours > others[best][split],
                )
            )
    return made


STUDY = Study("ood", "Out-of-distribution detection: AUROC near and far", PRESETS, _needs, steps, table, draw, claims)
