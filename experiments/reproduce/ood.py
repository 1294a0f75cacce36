"""OOD detection: AUROC of parametric complexity and the detectors of pytorch-ood (OOD table of the paper).

Beta and damping are tuned jointly on inputs that share no source with a reported data set: another real data set, and
`synthetic_ood` inputs. The detectors use the default parameters of pytorch-ood.

The linearised hindsight probabilities ``p (1 + alpha/n IF)`` of the paper can exceed 1. A variant caps them at 1; its
order depends on alpha, which is tuned too.
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
from experiments.bootstrap import bounded_auroc_difference
from experiments.datasets import Dataset, load
from experiments.recipes import PAPER, QUICK
from experiments.reproduce import synthetic_ood
from experiments.reproduce.paper import OOD as PAPER_NUMBERS
from experiments.reproduce.publish import markdown
from experiments.reproduce.study import Claim, Record, Results, Step, Study
from experiments.reproduce.subject import Subject, sample
from experiments.training import evaluate
from experiments.tuning import fit_grid
from ifcomp import IFComp, Relative
from ifcomp.complexity import capped_complexity, expected_influence, parametric_complexity
from ifcomp.tasks.ood import OOD_DAMPING, ood_metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ifcomp.curvature.factors import Damping

#: Prefix of `synthetic_ood` data sets.
MADE = "made-"
#: Names of detectors in the paper that differ from pytorch-ood.
PAPER_NAMES = {"MaxLogit": "MLS", "RMD": "RMDS", "ViM": "VIM"}
IFCOMP, CAPPED = "IF-COMP, tuned", "IF-COMP, capped, tuned"
#: Data sets of the paper.
PAPER_SETS = {
    "mnist": "The paper's far sets include textures and places.",
    "cifar10": "The paper's near sets are CIFAR-100 and TinyImageNet, its far sets MNIST, SVHN, textures and places.",
}
AS_PAPER, DEFAULT = "IF-COMP, the paper's beta and damping", "IF-COMP, default"
DEFAULT_BETA = 1.0


@dataclass(frozen=True)
class Settings:
    """Settings of the study.

    Attributes:
        subject: Network and data.
        near: Near OOD test sets, similar to the training data.
        far: Far OOD test sets.
        also: Further test sets to report.
        images: Number of images per test set.
        tuning_near: Near OOD sets for tuning.
        tuning_far: Far OOD sets for tuning.
        tuning_images: Number of images per tuning set.
        fit_examples: Number of training examples of curvature and detectors; None uses all.
        betas: Candidates of beta.
        dampings: Candidates of the damping, relative to the mean of a layer.
        alphas: Candidates of alpha for capped hindsight probabilities.
        paper_beta: Beta of the paper for this network.
        paper_damping: Absolute damping of the paper, in its units.
        detectors: Names in `OOD_BASELINES`.
        seed: Seed of samples and synthetic inputs.
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
        """All test sets."""
        return (*self.near, *self.far, *self.also)

    @property
    def tuning_sets(self) -> tuple[str, ...]:
        """All tuning sets."""
        return (*self.tuning_near, *self.tuning_far)


#: Detectors of the paper and other common detectors.
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
    in_data = settings.subject.data
    sets = (*settings.test_sets, *settings.tuning_sets)
    return (in_data, "train"), (in_data, "test"), *((name, "test") for name in sets if not name.startswith(MADE))


def _images(settings: Settings, name: str, in_data: Dataset) -> Dataset:
    """Return OOD images of a data set, or generated from ``in_data``, as many as ``in_data`` has."""
    if name.startswith(MADE):
        return synthetic_ood.make(name.removeprefix(MADE), in_data, settings.seed)
    data = settings.subject.fitted_to(sample(load(name), len(in_data), settings.seed))
    return replace(data, labels=None)


@lru_cache(maxsize=1)
def _known(settings: Settings) -> Any:
    """Return the training data of curvature and detectors."""
    known, _, _ = settings.subject.parts()
    return settings.subject.batches(sample(known, settings.fit_examples or len(known), settings.seed))


@lru_cache(maxsize=1)
def _loaders(settings: Settings) -> dict[str, Any]:
    """Return the inputs of all test sets; the in-distribution set is ``in``."""
    in_data = sample(settings.subject.parts()[2], settings.images, settings.seed)
    sets = {"in": in_data} | {name: _images(settings, name, in_data) for name in settings.test_sets}
    return {name: settings.subject.inputs(data) for name, data in sets.items()}


@lru_cache(maxsize=1)
def _fits(settings: Settings) -> dict[float, IFComp]:
    """Return the fitted predictors of all tuned and reported betas."""
    betas = list(dict.fromkeys((*settings.betas, settings.paper_beta, DEFAULT_BETA)))
    network = settings.subject.network()
    return dict(zip(betas, fit_grid(network, betas, _known(settings), fisher=settings.subject.fisher), strict=True))


def _hindsight(ifc: IFComp, batches: Any, damping: Damping) -> tuple[Tensor, Tensor]:
    """Return probability at beta and influence of every label, [N, K] each."""
    inputs = [x for (x,) in batches]
    probability = torch.cat([(ifc.beta * model_logits(ifc.model, x)).softmax(1) for x in inputs])
    return probability, torch.cat([ifc.influence(x, damping=damping) for x in inputs])


def complexity(probability: Tensor, influence: Tensor, count: int, alpha: float | None) -> np.ndarray:
    """Return the parametric complexity [N] in nats; larger = more surprising.

    Args:
        probability: Probability at beta, [N, K].
        influence: Influence of every label, [N, K].
        count: Number of examples of the curvature n.
        alpha: Alpha of capped hindsight probabilities; None is the form of the paper, whose order does not depend on
            alpha.
    """
    if alpha is None:
        return parametric_complexity(expected_influence(probability, influence), count).numpy()
    return capped_complexity(probability, influence, count, alpha).numpy()


def _measured(scores: dict[str, np.ndarray]) -> dict[str, dict[str, float]]:
    """Return the metrics of every OOD set against the in-distribution set."""
    return {name: vars(ood_metrics(scores["in"], values)) for name, values in scores.items() if name != "in"}


def _network(settings: Settings, _: Results) -> dict[str, float]:
    subject = settings.subject
    loss, accuracy = evaluate(subject.network(), subject.batches(subject.parts()[2]))
    return {"test_accuracy": accuracy, "test_loss": loss}


def _tuning(settings: Settings, _: Results) -> dict[str, Any]:
    """Evaluate all betas, dampings and alphas on the tuning sets, and select by the mean of near and far AUROC."""
    subject = settings.subject
    in_data = sample(subject.parts()[1], 2 * settings.tuning_images, settings.seed)
    half = torch.arange(len(in_data)) % 2 == 0
    inside, base = in_data.take(half.nonzero()[:, 0], "even"), in_data.take((~half).nonzero()[:, 0], "odd")
    outside = {name: _images(settings, name, base) for name in settings.tuning_sets}
    rows = []
    for ifc in (_fits(settings)[beta] for beta in settings.betas):
        for multiple in settings.dampings:
            parts = {
                name: _hindsight(ifc, subject.inputs(data), Relative(multiple))
                for name, data in {"in": inside, **outside}.items()
            }
            for alpha in (None, *settings.alphas):
                scores = {name: complexity(*part, ifc.factors.count, alpha) for name, part in parts.items()}
                aurocs = {name: row["auroc"] for name, row in _measured(scores).items()}
                near, far = (
                    float(np.mean([aurocs[name] for name in names]))
                    for names in (settings.tuning_near, settings.tuning_far)
                )
                setting = {"beta": ifc.beta, "damping": multiple, "alpha": alpha}
                rows.append(setting | {"near": near, "far": far, "auroc": aurocs})
    return {
        name: max((row for row in rows if (row["alpha"] is None) == plain), key=lambda row: row["near"] + row["far"])
        for name, plain in ((IFCOMP, True), (CAPPED, False))
    } | {"grid": rows}


def _ifcomp(settings: Settings, results: Results) -> dict[str, Any]:
    """Return the metrics of the tuned settings, those of the paper and the default."""
    choices: dict[str, tuple[float, Any, float | None]] = {
        name: (row["beta"], Relative(row["damping"]), row["alpha"])
        for name, row in results["tuning"].items()
        if name != "grid"
    }
    choices[AS_PAPER] = (settings.paper_beta, settings.paper_damping / settings.paper_beta**2, None)
    choices[DEFAULT] = (DEFAULT_BETA, OOD_DAMPING, None)
    loaders, fits = _loaders(settings), _fits(settings)

    @cache
    def parts(beta: float, damping: Any) -> dict[str, tuple[Tensor, Tensor]]:
        return {key: _hindsight(fits[beta], data, damping) for key, data in loaders.items()}

    metrics = {}
    for name, (beta, damping, alpha) in choices.items():
        count = fits[beta].factors.count
        scores = {key: complexity(*part, count, alpha) for key, part in parts(beta, damping).items()}
        metrics[name] = {"beta": beta, "damping": repr(damping), "alpha": alpha, "sets": _measured(scores)}
    return metrics


def _detector(settings: Settings, name: str, _: Results) -> dict[str, Any]:
    network, train = settings.subject.network(), _known(settings)
    return {"sets": _measured(ood_scores(name, network, train, _loaders(settings), seed=settings.seed))}


def steps(settings: Settings) -> dict[str, Step]:
    """Train, tune and score, then evaluate one detector after the other."""
    named: dict[str, Step] = {
        "network": partial(_network, settings),
        "tuning": partial(_tuning, settings),
        "ifcomp": partial(_ifcomp, settings),
    }
    return named | {f"detector {name}": partial(_detector, settings, name) for name in settings.detectors}


def summary(record: Record) -> dict[str, dict[str, float]]:
    """Return the AUROC of every method in percent: means over near and far sets, and of every set."""
    methods = dict(record.results.get("ifcomp", {}))
    prefix = "detector "
    methods |= {name.removeprefix(prefix): row for name, row in record.results.items() if name.startswith(prefix)}
    percents = {}
    for name, row in methods.items():
        aurocs = {key: 100 * metrics["auroc"] for key, metrics in row["sets"].items()}
        means = {split: float(np.mean([aurocs[key] for key in record.settings[split]])) for split in ("near", "far")}
        percents[name] = means | aurocs
    return percents


def _paper(record: Record, method: str) -> tuple[float, float] | None:
    """Return near and far AUROC of a method in the paper, or None."""
    known = PAPER_NUMBERS.get(record.settings["subject"]["data"], {})
    return known.get("IF-COMP" if method in (IFCOMP, CAPPED) else PAPER_NAMES.get(method, method))


def table(record: Record) -> str:
    """Format the AUROC of all methods, sorted by the mean of near and far."""
    settings, tuned = record.settings, record.results["tuning"]
    columns = ["near", "far", *settings["near"], *settings["far"], *settings["also"]]
    methods = sorted(summary(record).items(), key=lambda item: -(item[1]["near"] + item[1]["far"]))
    rows = []
    for name, values in methods:
        published = _paper(record, name)
        cells = [f"{values[column]:.2f}" for column in columns]
        bold = f"**{name}**" if name in (IFCOMP, CAPPED) else name
        rows.append([bold, *cells, f"{published[0]:.2f} / {published[1]:.2f}" if published else ""])
    text = (
        f"AUROC in percent, {settings['images']:,} images per set; near: {', '.join(settings['near'])}; far: "
        f"{', '.join(settings['far'])}. Network: {settings['subject']['model']}, test accuracy "
        f"{100 * record.results['network']['test_accuracy']:.2f} %. Settings were tuned on validation images "
        f"against {', '.join(settings['tuning_near'])} (near) and {', '.join(settings['tuning_far'])} (far), which are "
        f"not reported: beta {tuned[IFCOMP]['beta']:g}, damping {tuned[IFCOMP]['damping']:g} times the mean; with "
        f"hindsight probabilities capped at 1, beta {tuned[CAPPED]['beta']:g}, damping {tuned[CAPPED]['damping']:g} "
        f"times the mean, alpha {tuned[CAPPED]['alpha']:g}. Detectors use the default parameters of pytorch-ood. "
        f"Curvature and detectors use {settings['fit_examples'] or 'all'} training images. "
        f"{PAPER_SETS.get(settings['subject']['data'], '')}\n\n"
    )
    return text + markdown(["method", *columns, "paper, near / far"], rows)


def draw(record: Record, figure: Figure) -> None:
    """Plot 100 % minus near and far AUROC of every method on a logarithmic axis, best method on top."""
    methods = sorted(summary(record).items(), key=lambda item: item[1]["near"] + item[1]["far"])
    figure.set_size_inches(8, 1.5 + 0.22 * len(methods))
    axes, positions = figure.add_subplot(), np.arange(len(methods))
    for index, (split, colour) in enumerate((("near", "tab:blue"), ("far", "tab:orange"))):
        axes.plot([100 - values[split] for _, values in methods], positions, "o", color=colour, label=split)
        published = {position: _paper(record, name) for position, (name, _) in enumerate(methods)}
        known = {position: 100 - numbers[index] for position, numbers in published.items() if numbers}
        axes.plot(list(known.values()), list(known), "x", color=colour, label=f"{split}, paper")
    axes.set_yticks(positions, [name for name, _ in methods])
    for label, (name, _) in zip(axes.get_yticklabels(), methods, strict=True):
        label.set_fontweight("bold" if name.startswith("IF-COMP") else "normal")
    axes.set(xscale="log", xlabel="100 - AUROC (%), smaller is better", ylim=(-0.7, len(methods) - 0.3))
    axes.grid(axis="y", color="0.9")
    figure.legend(loc="outside lower center", ncols=4)


def claims(record: Record) -> list[Claim]:
    """Compare the AUROC of both forms with that of every other detector.

    The results have no scores of single images, so the intervals are the wide ones of `bounded_auroc_difference`.
    """
    aurocs, data = summary(record), record.settings["subject"]["data"]
    published, model = _paper(record, IFCOMP), record.settings["subject"]["model"]
    others = {name: values for name, values in aurocs.items() if not name.startswith("IF-COMP")}
    statements = []
    for index, split in enumerate(("near", "far")):
        best = max(others, key=lambda name: others[name][split])
        number = f"{published[index]:.2f}" if published else "no number"
        sets, images = record.settings[split], record.settings["images"]
        for method, text in ((IFCOMP, "parametric complexity"), (CAPPED, "parametric complexity, capped,")):
            ours = aurocs[method][split]
            pair = ([aurocs[name][key] / 100 for key in sets] for name in (method, best))
            statements.append(
                Claim(
                    f"{data}, {model}: {text} detects {split} inputs better than every other detector",
                    f"{number}; best of 20 others is lower",
                    f"{ours:.2f}; best of {len(others)} others: {best} {others[best][split]:.2f}",
                    f"{images:,} images per set, {len(sets)} sets",
                    bounded_auroc_difference(*pair, images, images).scaled(100),
                )
            )
    return statements


STUDY = Study("ood", "Out-of-distribution detection: AUROC near and far", PRESETS, _needs, steps, table, draw, claims)
