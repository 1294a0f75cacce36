"""Calibration under shift: ECE by severity of nineteen corruptions (ECE figure of the paper).

Settings are selected on validation images by NLL: beta and the temperature on clean images, alpha on clean images and
on other perturbations than the reported corruptions (`experiments.corruptions.HELD_OUT`). The paper does not describe
the selection of its beta. Its beta alone is calibrated at severity 1 and far off at severity 5, as a temperature
selected on clean images is.

All methods except ensemble and dropout share one averaged (SWA) network. With published weights, methods that need more
than one set of weights are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from experiments.baselines.acnml import Acnml
from experiments.baselines.dropout import MonteCarloDropout
from experiments.baselines.ensemble import DeepEnsemble
from experiments.baselines.inference import model_logits
from experiments.baselines.laplace import LastLayerLaplace
from experiments.baselines.swag import Swag, WeightMoments, swa_model
from experiments.baselines.temperature import TemperatureScaling
from experiments.bootstrap import Interval, mean_interval
from experiments.corruptions import CORRUPTIONS, HELD_OUT, SEVERITIES, corrupt
from experiments.datasets import Dataset
from experiments.prepare_models import WITH_TAIL
from experiments.recipes import PAPER, PAPER_SWA, QUICK, Recipe
from experiments.reproduce.paper import ECE as PAPER_NUMBERS
from experiments.reproduce.publish import markdown
from experiments.reproduce.study import Claim, Record, Results, Step, Study
from experiments.reproduce.subject import Subject, sample
from experiments.tuning import tune
from ifcomp import IFComp
from ifcomp.complexity import pnml_distribution
from ifcomp.tasks.calibration import calibration_summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

IFCOMP, KEPT = "IF-COMP", "IF-COMP, argmax kept"
LAPLACE, SHIFTED = "Laplace, last layer", "temperature, of shifted images too"
#: Entries besides the corruptions: clean images, and the images of all corruptions as one set.
CLEAN, TOGETHER = "clean", "together"
#: Images per corruption from which claims compare the ECE of single corruptions.
ENOUGH = 400
Predict = Callable[[Tensor], Tensor]
#: Function of corruption and severity that returns probabilities [N, K].
Probabilities = Callable[[str, int], Tensor]


@dataclass(frozen=True)
class Settings:
    """Settings of the study.

    Attributes:
        subject: Network and data. The recipe must have a tail, whose weights are averaged, or be None.
        dropout: Recipe of the network with dropout; None for published weights.
        member: Recipe of the ensemble members; None for published weights.
        members: Number of ensemble members.
        samples: Number of samples of SWAG and dropout.
        images: Number of test images.
        tuning_images: Number of validation images; each is used clean and with every held-out perturbation.
        fit_examples: Number of examples of the curvature.
        corruptions: Reported corruptions.
        severities: Reported severities; 0 is clean.
    """

    subject: Subject
    dropout: Recipe | None
    member: Recipe | None
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
    **{  # published weights, without training
        name: Settings(
            Subject("cifar10", network, None, 2000),
            dropout=None,
            member=None,
            members=0,
            samples=0,
            images=25,
            tuning_images=30,
            fit_examples=800,
        )
        for name, network in (("cifar10", "resnet20"), ("cifar10-resnet56", "resnet56"))
    },
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
    """Return the data sets that the study needs."""
    return (settings.subject.data, "train"), (settings.subject.data, "test")


@cache
def _parts(subject: Subject) -> tuple[Dataset, Dataset, Dataset]:
    return subject.parts()


@cache
def corrupted(settings: Settings, name: str, severity: int) -> Dataset:
    """Return the test images with a corruption; severity 0 is clean."""
    test = sample(_parts(settings.subject)[2], settings.images)
    return replace(test, images=corrupt(test.images, name, severity))


@cache
def swa_network(subject: Subject) -> tuple[nn.Module, WeightMoments]:
    """Return the SWA network and the moments of the weights of the tail."""
    known, validation, _ = _parts(subject)
    trained = subject.training(known, validation)
    moments = WeightMoments()
    for kept in trained.tail:
        moments = moments.collect(trained.model(kept.epoch))
    return swa_model(trained.model(), moments, subject.batches(known)), moments


def base_network(subject: Subject) -> nn.Module:
    """Return the network of IF-COMP: the SWA network, or published weights."""
    return _plain(subject) if subject.recipe is None else swa_network(subject)[0]


@cache
def _plain(subject: Subject) -> nn.Module:
    """Return the network at the end of its schedule, before the tail."""
    if subject.recipe is None:
        return subject.network()
    known, validation, _ = _parts(subject)
    return subject.training(known, validation).model(subject.recipe.epochs)


def _fit_data(subject: Subject, examples: int) -> Any:
    """Return the training data of the curvature."""
    return subject.batches(sample(_parts(subject)[0], examples))


def held_out(subject: Subject, count: int) -> tuple[Any, Any]:
    """Return clean validation images, and the same with each held-out perturbation at severities 1 to 5 in turn."""
    clean = sample(_parts(subject)[1], count)
    images, labels = [], []
    for index, name in enumerate(HELD_OUT):
        for severity in SEVERITIES[1:]:
            selected = (torch.arange(len(clean)) + index) % 5 == severity - 1
            images.append(corrupt(clean.images[selected], name, severity, seed=1))
            labels.append(clean.labels[selected])
    shifted = replace(clean, name=f"{clean.name}-shifted", images=torch.cat(images), labels=torch.cat(labels))
    return subject.batches(clean), subject.batches(shifted)


@cache
def _tuned(subject: Subject, tuning_images: int, fit_examples: int) -> dict[str, Any]:
    """Select beta by NLL on clean validation images, and alpha of both forms on clean and shifted ones."""
    clean, shifted = held_out(subject, tuning_images)
    network, train = base_network(subject), _fit_data(subject, fit_examples)
    validation = subject.batches(_parts(subject)[1])
    inverse = _inverse_temperature(network, validation)
    tuned = tune(network, train, clean, shifted=shifted, betas=[inverse], fisher=subject.fisher)
    selected: dict[str, dict[str, float]] = {}
    for name, keep_argmax in ((IFCOMP, False), (KEPT, True)):
        rows = tuned.frame[(tuned.frame["keep_argmax"] == keep_argmax) & (tuned.frame["beta"] == inverse)]
        best = rows.loc[rows["nll"].idxmin()]
        selected[name] = {key: float(best[key]) for key in ("beta", "alpha", "nll", "ece", "accuracy")}
    plain = _inverse_temperature(_plain(subject), validation)
    return selected | {
        "inverse_temperature": {"SWA": inverse, "network": plain, "shifted": tuned.inverse_temperature},
        "base": {"nll": tuned.base_nll, "ece": tuned.base_ece, "accuracy": tuned.base_accuracy},
    }


def _inverse_temperature(network: nn.Module, data: Any) -> float:
    return 1 / TemperatureScaling.fit(network, data).temperature


def tuning(settings: Settings, _: Results) -> dict[str, Any]:
    """Return the settings selected on validation images."""
    return _tuned(settings.subject, settings.tuning_images, settings.fit_examples)


@cache
def _fitted(subject: Subject, fit_examples: int, beta: float) -> IFComp:
    return IFComp(base_network(subject), beta, fisher=subject.fisher).fit(_fit_data(subject, fit_examples))


@cache
def influences(settings: Settings, beta: float, kind: str, severity: int) -> tuple[Tensor, Tensor, int]:
    """Return probability at beta and influence of every label of corrupted test images, [N, K] each, and n."""
    ifc = _fitted(settings.subject, settings.fit_examples, beta)
    inputs = [x for (x,) in settings.subject.inputs(corrupted(settings, kind, severity))]
    probability = torch.cat([(beta * model_logits(ifc.model, x)).softmax(1) for x in inputs])
    return probability, torch.cat([ifc.influence(x) for x in inputs]), ifc.factors.count


def _ifcomp(settings: Settings, results: Results, name: str) -> Probabilities:
    tuned = results["tuning"][name]

    def predict(kind: str, severity: int) -> Tensor:
        probability, influence, count = influences(settings, tuned["beta"], kind, severity)
        return pnml_distribution(probability, influence, count, tuned["alpha"], name == KEPT)

    return predict


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
    return Swag(
        averaged, moments, _fit_data(settings.subject, settings.fit_examples), samples=settings.samples
    ).predict_proba


def _inverse(results: Results, which: str) -> float:
    return results["tuning"]["inverse_temperature"][which]


#: Functions that build the methods other than IF-COMP from settings and results.
_OTHERS: dict[str, Callable[[Settings, Results], Predict]] = {
    "softmax": lambda s, r: _scaled(_plain(s.subject), 1.0),
    "temperature": lambda s, r: _scaled(_plain(s.subject), _inverse(r, "network")),
    SHIFTED: lambda s, r: _scaled(base_network(s.subject), _inverse(r, "shifted")),
    "SWA": lambda s, r: _scaled(swa_network(s.subject)[0], 1.0),
    "SWA + temperature": lambda s, r: _scaled(swa_network(s.subject)[0], _inverse(r, "SWA")),
    "SWAG-D": _swag,
    "MC dropout": _dropout,
    "ensemble": _ensemble,
    LAPLACE: lambda s, r: LastLayerLaplace(base_network(s.subject), _fit_data(s.subject, s.fit_examples)).predict_proba,
    "ACNML + SWAG-D": lambda s, r: Acnml.from_swag(*swa_network(s.subject)).predict_proba,
}
#: Methods in the order of the table.
METHODS = (IFCOMP, KEPT, *_OTHERS)


def methods(settings: Settings) -> tuple[str, ...]:
    """Return the methods to run; with published weights only those that need no other training."""
    if settings.subject.recipe is None:
        return (IFCOMP, KEPT, "softmax", "temperature", SHIFTED, LAPLACE)
    return METHODS


def probabilities(settings: Settings, name: str, results: Results) -> Probabilities:
    """Return the predictions of a method."""
    if name in (IFCOMP, KEPT):
        return _ifcomp(settings, results, name)
    predict, subject = _OTHERS[name](settings, results), settings.subject

    def predictions(kind: str, severity: int) -> Tensor:
        return torch.cat([predict(x) for (x,) in subject.inputs(corrupted(settings, kind, severity))])

    return predictions


def _method(settings: Settings, name: str, results: Results) -> dict[str, dict[str, dict[str, float]]]:
    """Return accuracy, ECE and NLL by severity and corruption, and of all corruptions as one set."""
    predict = probabilities(settings, name, results)
    by_severity: dict[str, dict[str, dict[str, float]]] = {}
    for severity in settings.severities:
        kinds = settings.corruptions if severity else settings.corruptions[:1]
        parts = {kind: (predict(kind, severity), corrupted(settings, kind, severity).labels) for kind in kinds}
        by_severity[str(severity)] = {kind if severity else CLEAN: _summary(*part) for kind, part in parts.items()}
        values, labels = zip(*parts.values(), strict=True)
        by_severity[str(severity)][TOGETHER] = _summary(torch.cat(values), torch.cat(labels))
    return by_severity


def _summary(values: Tensor, labels: Tensor | None) -> dict[str, float]:
    summary = calibration_summary(values, labels)
    return {key: round(summary[key], 5) for key in ("accuracy", "ece", "nll")}


def steps(settings: Settings) -> dict[str, Step]:
    """Tune, then evaluate one method after the other, the costly ones last."""
    return {"tuning": partial(tuning, settings)} | {
        name: partial(_method, settings, name) for name in methods(settings)
    }


def quartiles(record: Record, name: str, metric: str = "ece") -> dict[int, tuple[float, float, float]]:
    """Return lower quartile, median and upper quartile over corruptions by severity."""
    return {
        int(severity): tuple(
            np.percentile([row[metric] for kind, row in kinds.items() if kind != TOGETHER], (25, 50, 75)).tolist()
        )
        for severity, kinds in record.results[name].items()
    }


def together(record: Record, name: str, metric: str = "ece") -> dict[int, float] | None:
    """Return a metric of all corruptions as one set by severity; None in older results without it."""
    rows = record.results[name]
    if not all(TOGETHER in kinds for kinds in rows.values()):
        return None
    return {int(severity): kinds[TOGETHER][metric] for severity, kinds in rows.items()}


def _mean_ece(record: Record, name: str, severity: int) -> float:
    """Return the mean of ECE over the corruptions."""
    rows = record.results[name][str(severity)]
    return float(np.mean([rows[kind]["ece"] for kind in record.settings["corruptions"]]))


def _done(record: Record) -> list[str]:
    return [name for name in METHODS if name in record.results]


def _samples(record: Record) -> str:
    settings = record.settings
    if settings["subject"]["recipe"] is None:
        return f"Curvature of {settings['fit_examples']} training images, labels sampled as in the paper. "
    return f"The ensemble has {settings['members']} members; SWAG-D and dropout draw {settings['samples']} samples. "


def not_run(record: Record) -> str:
    """Return a sentence on methods that were not run."""
    left_out = [name for name in METHODS if name not in record.results]
    if not left_out:
        return ""
    return (
        f" Not run: {', '.join(left_out)}: published weights have no tail to average and no other "
        "networks of the same training."
    )


def table(record: Record) -> str:
    """Format ECE and accuracy by severity."""
    settings, tuned = record.settings, record.results["tuning"]
    severities, rows, (metric, middles) = settings["severities"], [], _compared(record)
    for name in _done(record):
        ece, right, middle = quartiles(record, name), quartiles(record, name, "accuracy"), middles[name]
        cells = [f"{middle[s]:.3f}" + (f" ({ece[s][0]:.3f}-{ece[s][2]:.3f})" if s else "") for s in severities]
        published = PAPER_NUMBERS.get(name)
        paper = " / ".join(f"{value:.3f}" for value in published) if published else ""
        accuracy = " / ".join(f"{100 * right[s][1]:.1f}" for s in (severities[0], severities[-1]))
        rows.append([name, *cells, accuracy, paper])
    inverse = tuned["inverse_temperature"]
    text = (
        f"{metric[0].upper() + metric[1:]} (20 bins of equal size), and quartiles over "
        f"{len(settings['corruptions'])} corruptions with {settings['images']} images each "
        f"({settings['subject']['data']}, {settings['subject']['model']}). Settings were selected by NLL on validation "
        f"images: beta {tuned[IFCOMP]['beta']:.3g} (temperature {1 / inverse['SWA']:.2f}) on clean images, apparently "
        f"as in the paper; alpha {tuned[IFCOMP]['alpha']:g}, or {tuned[KEPT]['alpha']:g} with the argmax kept, on "
        f"clean images and images with {', '.join(HELD_OUT)}. The temperature for all of these is "
        f"{1 / inverse['shifted']:.2f}. {_samples(record)}Even a perfectly calibrated model has an ECE above 0 with so "
        "few images, most of all for a single corruption. The numbers of the paper are medians on CIFAR-10-C with "
        f"ResNet-18 at severities 1 to 5.{not_run(record)}\n\n"
    )
    header = ["method", *(f"severity {s}" for s in severities), "accuracy, least / most severe", "paper, 1 to 5"]
    return text + markdown(header, rows)


def draw(record: Record, figure: Figure) -> None:
    """Plot medians with quartiles over severity, and lines of the compared metric."""
    axes, names, (_, values) = figure.add_subplot(), _done(record), _compared(record)
    for index, name in enumerate(names):
        by_severity = quartiles(record, name)
        low, middle, high = np.array(list(by_severity.values())).T
        positions = np.array(list(by_severity)) + 0.06 * (index - len(names) / 2)
        style = "-" if name.startswith("IF-COMP") else "--"
        axes.errorbar(
            *(positions, middle, (middle - low, high - middle)),
            marker="o",
            markersize=3,
            linestyle="none",
            color=f"C{index}",
            label=name,
        )
        axes.plot(list(values[name]), list(values[name].values()), style, color=f"C{index}")
    axes.set(xlabel="corruption severity", ylabel="ECE, smaller is better", ylim=(0, None))
    axes.legend(loc="upper left", fontsize=8)


def _difference(record: Record, first: str, second: str, severity: int) -> Interval | None:
    """Return the mean difference of ECE over corruptions, with an interval over corruptions.

    None below `ENOUGH` images per corruption, where the ECE of one corruption is mostly noise.
    """
    rows = [record.results[name][str(severity)] for name in (first, second)]
    if record.settings["images"] < ENOUGH:
        return None
    return mean_interval([rows[0][kind]["ece"] - rows[1][kind]["ece"] for kind in record.settings["corruptions"]])


def _compared(record: Record) -> tuple[str, dict[str, dict[int, float]]]:
    """Return name and values of the compared metric: ECE of all corruptions as one set, or the median ECE."""
    names = _done(record)
    pooled = {name: together(record, name) for name in names}
    complete = {name: values for name, values in pooled.items() if values is not None}
    if len(complete) == len(names):
        return "ECE of all corruptions together", complete
    return "median ECE", {name: {s: row[1] for s, row in quartiles(record, name).items()} for name in names}


def _claimed(record: Record) -> tuple[str, dict[str, dict[int, float]]]:
    """Return name and values of the metric of the claims: mean ECE over corruptions if there are `ENOUGH` images."""
    if record.settings["images"] < ENOUGH:
        return _compared(record)
    shifts = [severity for severity in record.settings["severities"] if severity]
    means = {name: {severity: _mean_ece(record, name, severity) for severity in shifts} for name in _done(record)}
    return "mean ECE over corruptions", means


def claims(record: Record) -> list[Claim]:
    """Compare the claim of lower ECE than every other method by severity."""
    names, statements = _done(record), []
    others = [name for name in names if not name.startswith("IF-COMP")]
    base = "SWA" if "SWA" in names else "softmax"
    metric, values = _claimed(record)
    subject = record.settings["subject"]
    size = f"{len(record.settings['corruptions'])} corruptions of the same {record.settings['images']:,} images"
    for severity in (s for s in record.settings["severities"] if s >= 3):
        best = min(others, key=lambda name: values[name][severity])
        published = {name: row[severity - 1] for name, row in PAPER_NUMBERS.items()}
        ours = published.pop(IFCOMP)
        statements.append(
            Claim(
                f"{subject['data']}, {subject['model']}, severity {severity}: IF-COMP has a lower {metric} than every "
                "other method",
                f"{ours:.3f}; best other {min(published.values()):.3f}",
                f"{values[IFCOMP][severity]:.3f} (argmax kept: {values[KEPT][severity]:.3f}); best other: {best} "
                f"{values[best][severity]:.3f}; {base} {values[base][severity]:.3f}",
                size,
                _difference(record, best, IFCOMP, severity),
                digits=3,
            )
        )
    return statements


STUDY = Study("calibration", "Calibration under shift: ECE by severity", PRESETS, needs, steps, table, draw, claims)
