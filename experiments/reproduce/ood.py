"""OOD detection: AUROC of complexity, joined scores and the detectors of pytorch-ood (OOD table of the paper).

Beta and damping are tuned together, once for all forms of complexity, on inputs that share no source with a reported
data set: another real data set, and `synthetic_ood` inputs. The detectors use the default parameters of pytorch-ood.

The linearised hindsight probabilities ``p (1 + alpha/n IF)`` of the paper can exceed 1. Two variants do not: one caps
them at 1, and its alpha is tuned too; `bounded_complexity` solves the proximal problem of one example.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.baselines.detectors import OOD_BASELINES
from experiments.bootstrap import Counts, auroc, auroc_draws, draw_counts, interval
from experiments.recipes import PAPER, QUICK
from experiments.reproduce.ood_page import AS_PAPER, DETECTOR, JOIN, OURS, TUNED, claims, draw, percents_of, table
from experiments.reproduce.ood_scores import (
    BOUNDED,
    CAPPED,
    DEFAULT,
    HELD_OUT,
    INSIDE,
    MADE,
    PARAMETRIC,
    Choice,
    Scores,
)
from experiments.reproduce.study import Results, Step, Study
from experiments.reproduce.subject import Subject
from experiments.training import evaluate
from ifcomp.tasks.ood import ood_metrics

if TYPE_CHECKING:
    pass

RESAMPLES = 1000


@dataclass(frozen=True)
class Settings:
    """Settings of the study.

    Attributes:
        subject: Network and data.
        near: Near OOD test sets, similar to the training data.
        far: Far OOD test sets.
        images: Number of images per test set.
        tuning_near: Near OOD sets for tuning.
        tuning_far: Far OOD sets for tuning.
        tuning_images: Number of images per tuning set.
        held_out_images: Number of in-distribution images that set the scales of joined scores.
        fit_examples: Number of training examples of the curvature; None uses all. Feature detectors use all.
        input_examples: Number of training examples of detectors that read inputs.
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
    images: int
    tuning_near: tuple[str, ...]
    tuning_far: tuple[str, ...]
    tuning_images: int
    held_out_images: int
    fit_examples: int | None
    input_examples: int
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
        return (*self.near, *self.far)

    @property
    def tuning_sets(self) -> tuple[str, ...]:
        """All tuning sets."""
        return (*self.tuning_near, *self.tuning_far)


#: Detectors without those that take far longer than a forward pass: MahalanobisODIN and NAC.
_COMMON = tuple(name for name in OOD_BASELINES if name not in ("MahalanobisODIN", "NAC"))
_MNIST = Settings(
    Subject("mnist", "lenet", QUICK, 5000),
    near=("notmnist", "fashion-mnist"),
    far=("cifar10", "tinyimagenet", "textures", "photographs"),
    images=3000,
    tuning_near=("kmnist",),
    tuning_far=("made-noise", "made-clouds"),
    tuning_images=400,
    held_out_images=2000,
    fit_examples=20000,
    input_examples=20000,
    betas=(0.001, 0.2, 0.45, 0.66, 1.0, 2.0),
    dampings=(1e-8, 1e-4, 1e-2),
    alphas=(0.03, 0.1, 0.3, 1.0, 3.0),
    paper_beta=2.0,
    paper_damping=1e-30,
    detectors=tuple(OOD_BASELINES),
)
_CIFAR10 = replace(
    _MNIST,
    subject=Subject("cifar10", "resnet20", None, 2000),
    near=("tinyimagenet-near",),
    far=("mnist", "fashion-mnist", "kmnist", "notmnist", "textures", "photographs"),
    images=2000,
    tuning_near=("made-halves", "made-patches"),
    tuning_far=("made-noise", "made-clouds"),
    tuning_images=200,
    held_out_images=1000,
    fit_examples=10000,
    input_examples=10000,
    betas=(0.001, 0.3, 1.0),
    dampings=(1e-4, 1e-2, 1.0),
    alphas=(0.1, 0.3, 1.0, 3.0, 10.0, 30.0),
    paper_beta=0.001,
    paper_damping=1e-12,
    detectors=_COMMON,
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
        held_out_images=100,
        fit_examples=150,
        input_examples=150,
        betas=(0.66, 1.0),
        dampings=(1e-4, 0.1),
        alphas=(0.1, 1.0),
        detectors=("MSP", "Energy", "KNN", "ViM", "Gram"),
    ),
    "mnist": _MNIST,
    "cifar10": _CIFAR10,
    "cifar10-resnet56": replace(_CIFAR10, subject=Subject("cifar10", "resnet56", None, 2000)),
    "cifar10-resnet18": replace(_CIFAR10, subject=Subject("cifar10", "resnet18", None, 2000)),
    "paper": replace(_CIFAR10, subject=Subject("cifar10", "resnet18", PAPER, 5000), images=10000, fit_examples=None),
}


def _needs(settings: Settings) -> Iterable[tuple[str, str]]:
    in_data = settings.subject.data
    sets = (*settings.test_sets, *settings.tuning_sets)
    return (in_data, "train"), (in_data, "test"), *((name, "test") for name in sets if not name.startswith(MADE))


@lru_cache(maxsize=1)
def _scores(settings: Settings) -> Scores:
    return Scores(settings)


def _measured(scores: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return the metrics of every OOD set against the in-distribution set."""
    metrics = {name: vars(ood_metrics(scores[INSIDE], values)) for name, values in scores.items() if name != INSIDE}
    return {"sets": metrics}


def _network(settings: Settings, _: Results) -> dict[str, float]:
    subject = settings.subject
    loss, accuracy = evaluate(subject.network(), subject.batches(subject.parts()[2]))
    return {"test_accuracy": accuracy, "test_loss": loss}


def _curvature(settings: Settings, _: Results) -> dict[str, Any]:
    """Fit all betas; the factors are stored in the cache."""
    fitted = _scores(settings).predictors
    return {"betas": list(fitted), "examples": _scores(settings).count}


def _tuning(settings: Settings, beta: float, damping: float, _: Results) -> list[dict[str, Any]]:
    """Return the AUROC of all forms on the tuning sets, for one beta and damping."""
    scores, rows = _scores(settings), []
    forms = [(PARAMETRIC, None), (BOUNDED, None), *((CAPPED, alpha) for alpha in settings.alphas)]
    for form, alpha in forms:
        choice = Choice(form, beta, damping, alpha)
        inside = scores.complexity(choice, "tuning in")
        aurocs = {name: auroc(inside, scores.complexity(choice, name)) for name in settings.tuning_sets}
        near, far = (
            float(np.mean([aurocs[name] for name in names])) for names in (settings.tuning_near, settings.tuning_far)
        )
        rows.append(asdict(choice) | {"near": near, "far": far, "auroc": aurocs})
    return rows


def _best(settings: Settings, results: Results) -> dict[str, Any]:
    """Return one beta and damping for all forms: the largest mean of near and far AUROC over the forms.

    The capped form has its best alpha at every beta and damping.
    """

    def quality(row: Mapping[str, Any]) -> float:
        return row["near"] + row["far"]

    best = {
        name: {form: max((row for row in results[name] if row["form"] == form), key=quality) for form in TUNED}
        for name in _grid(settings)
    }
    return max(best.values(), key=lambda rows: sum(quality(row) for row in rows.values()))


def choices(settings: Settings, results: Results) -> dict[str, Choice]:
    """Return the settings of every complexity in the table."""
    best = {form: {key: row[key] for key in asdict(DEFAULT)} for form, row in results["tuning"].items()}
    tuned = {TUNED[form]: Choice(**row) for form, row in best.items()}
    paper = Choice(PARAMETRIC, settings.paper_beta, settings.paper_damping / settings.paper_beta**2, None, True)
    return {AS_PAPER: paper, **tuned}


def _influence(settings: Settings, name: str, results: Results) -> dict[str, int]:
    """Compute and store what all our methods need of one set."""
    scores = _scores(settings)
    for choice in {choice.key: choice for choice in (*choices(settings, results).values(), DEFAULT)}.values():
        scores.influence(choice, name)
    return {"images": scores.size(name)}


def _ours(settings: Settings, results: Results) -> dict[str, dict[str, np.ndarray]]:
    """Return the scores of our methods by set."""
    scores, chosen = _scores(settings), choices(settings, results)
    bounded = chosen[TUNED[BOUNDED]]
    return {
        **{method: scores.method(partial(scores.complexity, choice)) for method, choice in chosen.items()},
        JOIN: scores.method(partial(scores.rank_sum, bounded)),
        DETECTOR: scores.method(scores.default),
    }


def _ifcomp(settings: Settings, results: Results) -> dict[str, Any]:
    return {method: _measured(scores) for method, scores in _ours(settings, results).items()}


def _detector(settings: Settings, name: str, _: Results) -> dict[str, Any]:
    return _measured(_scores(settings).detector(name))


def _draws(settings: Settings, scores: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the AUROC of every set and of near and far in every resample, [R] each; sets share the inside images."""
    counts = {name: _counts(len(values), index) for index, (name, values) in enumerate(scores.items())}
    sets = {
        name: auroc_draws(scores[INSIDE], scores[name], counts[INSIDE], counts[name]) for name in settings.test_sets
    }
    means = {split: np.mean([sets[name] for name in getattr(settings, split)], 0) for split in ("near", "far")}
    return means | sets


@lru_cache(maxsize=16)
def _counts(size: int, index: int) -> Counts:
    """Return the resamples of a set; all methods share them."""
    return draw_counts(size, index, RESAMPLES)


def _intervals(settings: Settings, results: Results) -> dict[str, Any]:
    """Return 95 % intervals of every AUROC, and of differences of our methods to the best other, in percent."""
    all_scores = _ours(settings, results)
    all_scores |= {name: _scores(settings).detector(name) for name in settings.detectors}
    size = min(len(values) for values in all_scores[AS_PAPER].values())
    draws = {method: _draws(settings, scores) for method, scores in all_scores.items()}
    percents = percents_of(results, settings.near, settings.far)

    def percent(estimate: float, values: np.ndarray) -> list[float]:
        row = interval(estimate, 100 * values, size)
        return [round(value, 4) for value in (row.estimate, row.low, row.high)]

    intervals = {
        method: {key: percent(percents[method][key], values) for key, values in rows.items()}
        for method, rows in draws.items()
    }
    differences = {}
    for method in OURS:
        differences[method] = {}
        for key in draws[method]:
            rival = max(settings.detectors, key=lambda name: percents[name][key])
            lead = percents[method][key] - percents[rival][key]
            differences[method][key] = {"rival": rival, "lead": percent(lead, draws[method][key] - draws[rival][key])}
    return {"intervals": intervals, "differences": differences, "resamples": RESAMPLES}


def _grid(settings: Settings) -> dict[str, tuple[float, float]]:
    """Return the combinations of beta and damping by the name of their step."""
    pairs = [(beta, damping) for beta in settings.betas for damping in settings.dampings]
    return {f"tuning, beta {beta:g}, damping {damping:g}": (beta, damping) for beta, damping in pairs}


def steps(settings: Settings) -> dict[str, Step]:
    """Fit, tune and score, evaluate one detector after the other, then compare all."""
    named: dict[str, Step] = {
        "network": partial(_network, settings),
        "curvature": partial(_curvature, settings),
    }
    named |= {name: partial(_tuning, settings, *pair) for name, pair in _grid(settings).items()}
    named["tuning"] = partial(_best, settings)
    named |= {
        f"influence, {name}": partial(_influence, settings, name) for name in (INSIDE, HELD_OUT, *settings.test_sets)
    }
    named["ifcomp"] = partial(_ifcomp, settings)
    named |= {f"detector {name}": partial(_detector, settings, name) for name in settings.detectors}
    return named | {"comparison": partial(_intervals, settings)}


#: Milliseconds per image on one core: fit of one beta, influence of all labels, forward pass.
_COSTS = {"lenet": (0.4, 0.8, 0.05), "resnet20": (5, 20, 0.7), "resnet56": (15, 60, 2), "resnet18": (50, 180, 5)}


def durations(settings: Settings) -> dict[str, float]:
    """Estimate the seconds of every step on one core."""
    fit, influence, forward = (value / 1000 for value in _COSTS.get(settings.subject.model, _COSTS["resnet18"]))
    known = 50000 if settings.fit_examples is None else settings.fit_examples
    tuned = 1 + len(settings.tuning_sets)
    seconds = dict.fromkeys(steps(settings), 15.0)
    seconds["curvature"] = fit * known * len({*settings.betas, settings.paper_beta, DEFAULT.beta})
    seconds |= dict.fromkeys(_grid(settings), influence * settings.tuning_images * tuned)
    for name in (INSIDE, HELD_OUT, *settings.test_sets):
        images = settings.held_out_images if name == HELD_OUT else settings.images
        seconds[f"influence, {name}"] = influence * images * (len(TUNED) + 2)
    passes = len(settings.test_sets) * settings.images + 50000
    seconds[f"detector {settings.detectors[0]}"] = forward * passes
    for name in {"ODIN", "MahalanobisODIN", "Gram", "NAC"} & {*settings.detectors}:
        seconds[f"detector {name}"] = 4 * forward * (passes - 50000 + settings.input_examples)
    return seconds


STUDY = Study(
    "ood",
    "Out-of-distribution detection: AUROC near and far",
    PRESETS,
    _needs,
    steps,
    table,
    draw,
    claims,
    durations,
)
