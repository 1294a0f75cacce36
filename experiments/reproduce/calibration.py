"""Calibration under shift: ECE by severity of nineteen corruptions (the paper's figure of ECE).

Every setting is chosen on validation images, clean and altered in other ways than the reported corruptions
(`experiments.corruptions.HELD_OUT`), by NLL. All methods but ensemble and dropout share one averaged (SWA) network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from experiments.corruptions import CORRUPTIONS, HELD_OUT, SEVERITIES, corrupt
from experiments.datasets import Dataset
from experiments.prepare_models import WITH_TAIL
from experiments.recipes import PAPER, PAPER_SWA, QUICK, Recipe
from experiments.reproduce.paper import ECE as PAPER_NUMBERS
from experiments.reproduce.publish import markdown
from experiments.reproduce.study import Claim, Record, Results, Step, Study
from experiments.reproduce.subject import Subject, sample
from ifcomp import IFComp
from ifcomp.baselines.acnml import Acnml
from ifcomp.baselines.dropout import MonteCarloDropout
from ifcomp.baselines.ensemble import DeepEnsemble
from ifcomp.baselines.laplace import LastLayerLaplace
from ifcomp.baselines.swag import Swag, WeightMoments, swa_model
from ifcomp.baselines.temperature import TemperatureScaling
from ifcomp.tasks.calibration import calibration_summary
from ifcomp.tuning import tune

if TYPE_CHECKING:
    from matplotlib.figure import Figure

IFCOMP, KEPT = "IF-COMP", "IF-COMP, argmax kept"
Predict = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Settings:
    """Settings of the study.

    Attributes:
        subject: The network; its recipe must have a tail, whose weights are averaged.
        dropout: Recipe of the network with dropout.
        member: Recipe of the ensemble's members.
        members: How many.
        samples: Of SWAG and dropout.
        images: Test images.
        tuning_images: Validation images; each is used clean, and once for every held-out perturbation.
        fit_examples: For the curvature.
        corruptions: What is reported on.
        severities: 0 is clean.
    """

    subject: Subject
    dropout: Recipe
    member: Recipe
    members: int
    samples: int
    images: int
    tuning_images: int
    fit_examples: int
    corruptions: tuple[str, ...] = CORRUPTIONS
    severities: tuple[int, ...] = SEVERITIES


_TINY = replace(QUICK, epochs=3, batch_size=32)
PRESETS = {
    "digits": Settings(
        Subject("digits", "lenet", replace(_TINY, tail_epochs=2, checkpoint_every=1), 200, 600),
        dropout=_TINY,
        member=_TINY,
        members=1,
        samples=2,
        images=40,
        tuning_images=20,
        fit_examples=100,
        corruptions=("gaussian_noise", "pixelate"),
        severities=(0, 5),
    ),
    "mnist": Settings(
        Subject("fashion-mnist", "lenet", WITH_TAIL, 5000),
        dropout=replace(QUICK, epochs=12),
        member=QUICK,
        members=30,
        samples=30,
        images=500,
        tuning_images=200,
        fit_examples=5000,
    ),
    "cifar10": Settings(
        Subject(
            "cifar10",
            "resnet18-width32",
            Recipe("one-cycle", 20, 0.1, augment=True, tail_epochs=20, checkpoint_every=20),
            5000,
        ),
        dropout=Recipe("one-cycle", 20, 0.1, augment=True),
        member=Recipe("one-cycle", 20, 0.1, augment=True),
        members=5,
        samples=30,
        images=500,
        tuning_images=100,
        fit_examples=5000,
    ),
    "paper": Settings(
        Subject("cifar10", "resnet18", PAPER_SWA, 5000),
        dropout=PAPER,
        member=replace(PAPER, milestones=(60, 120, 160)),
        members=30,
        samples=30,
        images=10000,
        tuning_images=1000,
        fit_examples=45000,
    ),
}


def needs(settings: Settings) -> Iterable[tuple[str, str]]:
    """Training and test data."""
    return (settings.subject.data, "train"), (settings.subject.data, "test")


@cache
def _parts(subject: Subject) -> tuple[Dataset, Dataset, Dataset]:
    return subject.parts()


@cache
def altered(settings: Settings, name: str, severity: int) -> Dataset:
    """Test images with a corruption; severity 0 leaves them as they are."""
    test = sample(_parts(settings.subject)[2], settings.images)
    return replace(test, images=corrupt(test.images, name, severity))


@cache
def swa_network(subject: Subject) -> tuple[nn.Module, WeightMoments]:
    """The SWA network, and the moments of the weights in the tail."""
    known, validation, _ = _parts(subject)
    trained = subject.training(known, validation)
    moments = WeightMoments()
    for kept in trained.tail:
        moments = moments.collect(trained.model(kept.epoch))
    return swa_model(trained.model(), moments, subject.batches(known)), moments


@cache
def _plain(subject: Subject) -> nn.Module:
    """The network at the end of its schedule, before the tail."""
    known, validation, _ = _parts(subject)
    return subject.training(known, validation).model(subject.recipe.epochs)


def fit_data(settings: Settings) -> Any:
    """What the curvature is estimated on."""
    return settings.subject.batches(sample(_parts(settings.subject)[0], settings.fit_examples))


def held_out(settings: Settings) -> tuple[Any, Any]:
    """Validation images, clean, and altered by each held-out perturbation at severities 1 to 5 in turn."""
    clean = sample(_parts(settings.subject)[1], settings.tuning_images)
    images, labels = [], []
    for index, name in enumerate(HELD_OUT):
        for severity in SEVERITIES[1:]:
            chosen = (torch.arange(len(clean)) + index) % 5 == severity - 1
            images.append(corrupt(clean.images[chosen], name, severity, seed=1))
            labels.append(clean.labels[chosen])
    shifted = replace(clean, name=f"{clean.name}-shifted", images=torch.cat(images), labels=torch.cat(labels))
    return settings.subject.batches(clean), settings.subject.batches(shifted)


def _tuning(settings: Settings, _: Results) -> dict[str, Any]:
    """Beta and alpha by held-out NLL, with and without the argmax kept, and temperatures."""
    clean, shifted = held_out(settings)
    averaged, _ = swa_network(settings.subject)
    found = tune(averaged, fit_data(settings), clean, shifted=shifted)
    chosen = {}
    for name, keep_argmax in ((IFCOMP, False), (KEPT, True)):
        rows = found.frame[found.frame["keep_argmax"] == keep_argmax]
        best = rows.loc[rows["nll"].idxmin()]
        chosen[name] = {key: float(best[key]) for key in ("beta", "alpha", "nll", "ece", "accuracy")}
    plain = TemperatureScaling.fit(_plain(settings.subject), [*clean, *shifted])
    return chosen | {
        "inverse_temperature": {"SWA": found.inverse_temperature, "network": 1 / plain.temperature},
        "base": {"nll": found.base_nll, "ece": found.base_ece, "accuracy": found.base_accuracy},
    }


def _ifcomp(settings: Settings, results: Results, name: str) -> Predict:
    tuned = results["tuning"][name]
    ifc = IFComp(swa_network(settings.subject)[0], tuned["beta"], fisher="exact").fit(fit_data(settings))
    return partial(ifc.predict_proba, alpha=tuned["alpha"], keep_argmax=name == KEPT)


def _scaled(model: nn.Module, inverse: float) -> Predict:
    return TemperatureScaling(model, 1 / inverse).predict_proba


def _ensemble(settings: Settings, results: Results) -> Predict:
    subjects = [replace(settings.subject, recipe=settings.member, seed=1 + seed) for seed in range(settings.members)]
    known, validation, _ = _parts(settings.subject)
    return DeepEnsemble([subject.training(known, validation).model() for subject in subjects]).predict_proba


def _dropout(settings: Settings, results: Results) -> Predict:
    subject = replace(settings.subject, model=f"{settings.subject.model}-dropout", recipe=settings.dropout)
    known, validation, _ = _parts(settings.subject)
    return MonteCarloDropout(subject.training(known, validation).model(), settings.samples).predict_proba


def _swag(settings: Settings, results: Results) -> Predict:
    averaged, moments = swa_network(settings.subject)
    return Swag(averaged, moments, fit_data(settings), samples=settings.samples).predict_proba


def _inverse(results: Results, which: str) -> float:
    return results["tuning"]["inverse_temperature"][which]


#: How every method is made from settings and what was tuned, in the order of the table.
METHODS: dict[str, Callable[[Settings, Results], Predict]] = {
    IFCOMP: partial(_ifcomp, name=IFCOMP),
    KEPT: partial(_ifcomp, name=KEPT),
    "softmax": lambda s, r: _scaled(_plain(s.subject), 1.0),
    "temperature": lambda s, r: _scaled(_plain(s.subject), _inverse(r, "network")),
    "SWA": lambda s, r: _scaled(swa_network(s.subject)[0], 1.0),
    "SWA + temperature": lambda s, r: _scaled(swa_network(s.subject)[0], _inverse(r, "SWA")),
    "SWAG-D": _swag,
    "MC dropout": _dropout,
    "ensemble": _ensemble,
    "Laplace, last layer": lambda s, r: LastLayerLaplace(swa_network(s.subject)[0], fit_data(s)).predict_proba,
    "ACNML + SWAG-D": lambda s, r: Acnml.from_swag(*swa_network(s.subject)).predict_proba,
}


def probabilities(predict: Predict, subject: Subject, data: Dataset) -> Tensor:
    """Of every image, [N, K]."""
    return torch.cat([predict(x) for (x,) in subject.inputs(data)])


def _method(settings: Settings, name: str, results: Results) -> dict[str, dict[str, dict[str, float]]]:
    """For every severity and corruption accuracy, ECE and NLL."""
    predict = METHODS[name](settings, results)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for severity in settings.severities:
        found[str(severity)] = {}
        for kind in settings.corruptions if severity else settings.corruptions[:1]:
            data = altered(settings, kind, severity)
            summary = calibration_summary(probabilities(predict, settings.subject, data), data.labels)
            row = {key: round(summary[key], 5) for key in ("accuracy", "ece", "nll")}
            found[str(severity)][kind if severity else "clean"] = row
    return found


def steps(settings: Settings) -> dict[str, Step]:
    """Tune, then one method after the other, the costly ones last."""
    return {"tuning": partial(_tuning, settings)} | {name: partial(_method, settings, name) for name in METHODS}


def quartiles(record: Record, name: str, what: str = "ece") -> dict[int, tuple[float, float, float]]:
    """Lower quartile, median and upper quartile over corruptions, by severity."""
    return {
        int(severity): tuple(np.percentile([row[what] for row in kinds.values()], (25, 50, 75)).tolist())
        for severity, kinds in record.results[name].items()
    }


def _done(record: Record) -> list[str]:
    return [name for name in METHODS if name in record.results]


def table(record: Record) -> str:
    """Median ECE and accuracy by severity."""
    settings, tuned = record.settings, record.results["tuning"]
    severities, rows = settings["severities"], []
    for name in _done(record):
        ece, right = quartiles(record, name), quartiles(record, name, "accuracy")
        cells = [f"{ece[s][1]:.3f}" + (f" ({ece[s][0]:.3f}-{ece[s][2]:.3f})" if s else "") for s in severities]
        published = PAPER_NUMBERS.get(name)
        paper = " / ".join(f"{value:.3f}" for value in published) if published else ""
        accuracy = " / ".join(f"{100 * right[s][1]:.1f}" for s in (severities[0], severities[-1]))
        rows.append([name, *cells, accuracy, paper])
    words = (
        f"ECE (20 bins of equal size), median and quartiles over {len(settings['corruptions'])} corruptions, "
        f"{settings['images']} images ({settings['subject']['data']}, {settings['subject']['model']}). Tuned on "
        f"validation images, clean and with {', '.join(HELD_OUT)}, by NLL: IF-COMP beta {tuned[IFCOMP]['beta']:g}, "
        f"alpha {tuned[IFCOMP]['alpha']:g}; with the argmax kept beta {tuned[KEPT]['beta']:g}, alpha "
        f"{tuned[KEPT]['alpha']:g}; temperature of SWA {1 / tuned['inverse_temperature']['SWA']:.2f}. The ensemble "
        f"has {settings['members']} members; SWAG-D and dropout draw {settings['samples']} samples. With so few "
        "images, a perfectly calibrated model has an ECE of a few hundredths too. The paper: CIFAR-10-C, ResNet-18, "
        "severities 1 to 5.\n\n"
    )
    header = ["method", *(f"severity {s}" for s in severities), "accuracy, least / most severe", "paper, 1 to 5"]
    return words + markdown(header, rows)


def draw(record: Record, figure: Figure) -> None:
    """Medians with quartiles over severity."""
    axes, names = figure.add_subplot(), _done(record)
    for index, name in enumerate(names):
        found = quartiles(record, name)
        low, middle, high = np.array(list(found.values())).T
        places = np.array(list(found)) + 0.06 * (index - len(names) / 2)
        style = "-" if name.startswith("IF-COMP") else "--"
        axes.errorbar(
            places, middle, (middle - low, high - middle), marker="o", markersize=3, linestyle=style, label=name
        )
    axes.set(xlabel="corruption severity", ylabel="ECE, smaller is better", ylim=(0, None))
    axes.legend(loc="upper left", fontsize=8)


def claims(record: Record) -> list[Claim]:
    """Lower ECE than every other method, by severity."""
    names, made = _done(record), []
    medians = {name: {s: row[1] for s, row in quartiles(record, name).items()} for name in names}
    others = [name for name in names if not name.startswith("IF-COMP")]
    for severity in (s for s in record.settings["severities"] if s >= 3):
        best = min(others, key=lambda name: medians[name][severity])
        published = {name: row[severity - 1] for name, row in PAPER_NUMBERS.items()}
        ours = published.pop(IFCOMP)
        made.append(
            Claim(
                f"{record.settings['subject']['data']}, severity {severity}: IF-COMP has a lower ECE than every other "
                "method",
                f"{ours:.3f}; best other {min(published.values()):.3f}",
                f"{medians[IFCOMP][severity]:.3f}; best other: {best} {medians[best][severity]:.3f}; SWA "
                f"{medians['SWA'][severity]:.3f}",
                medians[IFCOMP][severity] < medians[best][severity],
            )
        )
    return made


STUDY = Study("calibration", "Calibration under shift: ECE by severity", PRESETS, needs, steps, table, draw, claims)
