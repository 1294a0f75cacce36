"""Cost per example with 10, 100 and 1,000 classes, and the cost of evaluating every label."""

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.networks import RESNET18
from benchmarks.references import forward
from benchmarks.suite import FORWARD, Column, Goal, Measured, Section, Setup, Suite
from benchmarks.suites.influence import fitted
from benchmarks.timing import interleaved
from ifcomp import IFComp

#: Numbers of classes, each with the number of examples for which every label is evaluated.
EXACT_EXAMPLES = {10: 32, 100: 4, 1_000: 1}

#: Held-out inputs of the OOD detectors: the smallest allowed number.
HELD_OUT = 20

#: Examples of the audit: two per class at the largest number of classes.
AUDITED = 2_000

#: Largest cost with 1,000 classes, relative to 100 classes.
GOAL = Goal("≤", 1.3)

#: Evaluates inputs with a fitted predictor.
Verb = Callable[[IFComp, Tensor], Any]


def measure(fast: Verb, exact: Verb, setup: Setup) -> Measured:
    """Time forward pass and default form for all numbers of classes in turns, then every label on few examples."""
    count = setup.size(RESNET18.batch)
    predictors = {classes: fitted(RESNET18, classes, setup, count) for classes in EXACT_EXAMPLES}
    with warnings.catch_warnings(action="ignore"):  # few held-out inputs
        for ifc, _ in predictors.values():
            ifc.ood_detector(RESNET18.images(HELD_OUT), progress=False)
    functions: dict[str, Callable[[], Any]] = {}
    for classes, (ifc, x) in predictors.items():
        functions[f"{FORWARD} {classes}"] = partial(forward, ifc.model, x)
        functions[f"fast {classes}"] = partial(fast, ifc, x)
    measured = Measured()
    measured.add(interleaved(functions, setup.slow_rounds, turn=setup.turn), count)
    for classes, (ifc, x) in predictors.items():
        few = x[: setup.size(EXACT_EXAMPLES[classes], 1)]
        measured.add(interleaved({f"exact {classes}": partial(exact, ifc, few)}, 1, warm_up=False), len(few))
    return measured


def measure_audit(setup: Setup) -> Measured:
    """Time forward pass and audit for all numbers of classes in turns, one round."""
    count = setup.size(AUDITED, 40)
    functions: dict[str, Callable[[], Any]] = {}
    for classes in EXACT_EXAMPLES:
        model, labels = RESNET18.model(classes, setup), torch.arange(count) // 2 % classes
        size = setup.size(RESNET18.batch, 20)
        batches = list(zip(RESNET18.images(count).split(size), labels.split(size), strict=True))
        functions[f"{FORWARD} {classes}"] = partial(_forward_all, model, batches)
        functions[f"fast {classes}"] = partial(IFComp(model).audit, batches, progress=False)
    measured = Measured()
    measured.add(interleaved(functions, 1, warm_up=False), count)
    return measured


def _forward_all(model: torch.nn.Module, batches: list[tuple[Tensor, Tensor]]) -> None:
    for x, _ in batches:
        forward(model, x)


def _units(kind: str, classes: int) -> Column:
    """Return a column in forward passes of the network with the same number of classes."""

    def value(measured: Measured) -> float:
        return measured.ratio(f"{kind} {classes}", f"{FORWARD} {classes}")

    return Column(f"K = {classes:,}{', all labels' if kind == 'exact' else ''}, units", value, ",.1f")


def _milliseconds(classes: int) -> Column:
    return Column(f"K = {classes:,}, ms", lambda measured: measured.milliseconds(f"fast {classes}"), ",.1f")


_COLUMNS = (
    *map(_milliseconds, EXACT_EXAMPLES),
    *(_units("fast", classes) for classes in EXACT_EXAMPLES),
    Column("ms at K = 1,000 / K = 100", lambda measured: measured.ratio("fast 1000", "fast 100"), ",.2f", GOAL),
)


def _ood_scores(ifc: IFComp, x: Tensor) -> Tensor:
    assert ifc.detector is not None
    return ifc.detector.score(x)


_VERBS: Mapping[str, tuple[Verb, Verb]] = {
    "predict_proba": (
        lambda ifc, x: ifc.predict_proba(x),
        lambda ifc, x: ifc.predict_proba(x, alpha=0.15, keep_argmax=False),
    ),
    "ood": (_ood_scores, lambda ifc, x: ifc.bounded_complexity(x, exact=True)),
}

SUITE = Suite(
    "classes",
    "Many classes",
    "cost per example of a ResNet-18 with 10, 100 and 1,000 classes. Up to 32 classes every label is evaluated. "
    "Beyond, predictions use 3 labels and OOD scores 17. The form of the paper and exact bounded complexity "
    "evaluate every label; they are timed on few examples.",
    minutes=20,
    sections=(
        Section(
            "Predictions and OOD scores by number of classes",
            (*_COLUMNS, *(_units("exact", classes) for classes in EXACT_EXAMPLES)),
            {name: partial(measure, *verbs) for name, verbs in _VERBS.items()},
            threads=(1,),
        ),
        Section("Label audit by number of classes", _COLUMNS, {"audit": measure_audit}, threads=(1,)),
    ),
)
