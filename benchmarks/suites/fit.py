"""Fit of the curvature: time in forward passes, and time and memory against kronfluence."""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

from benchmarks.child import in_child, peak_memory
from benchmarks.networks import LENET, PLAIN, RESNET18, RESNET20, Network
from benchmarks.references import forward
from benchmarks.suite import FORWARD, Column, Goal, Measured, Section, Setup, Suite, milliseconds, times_faster
from benchmarks.timing import interleaved
from ifcomp import IFComp

CLASSES = 10
NETWORKS = {"LeNet": LENET, "plain CNN": PLAIN}


def measure_passes(network: Network, batches: tuple[int, int], setup: Setup) -> Measured:
    """Time fits over a smaller and a larger number of batches. The difference is the cost per example.

    The rest, mostly eigendecompositions, does not depend on the number of examples.
    """
    model, x = network.model(CLASSES, setup), network.images(setup.size(network.batch))
    small, large = (1, 2) if setup.tiny else batches
    functions: dict[str, Callable[[], Any]] = {
        FORWARD: lambda: forward(model, x),
        "small": lambda: IFComp(model, sua=True).fit([x] * small, progress=False),
        "large": lambda: IFComp(model, sua=True).fit([x] * large, progress=False),
    }
    measured, rounds = Measured(), setup.slow_rounds
    measured.add(interleaved({FORWARD: functions[FORWARD]}, setup.rounds, turn=setup.turn), len(x))
    timed = interleaved(functions, rounds, warm_up=False, turn=setup.turn)
    measured.add({FORWARD: timed[FORWARD]}, len(x))
    measured.add({"small": timed["small"]}, small * len(x))
    measured.add({"large": timed["large"]}, large * len(x))
    return measured


def per_example(measured: Measured) -> float:
    """Return the time of both passes in milliseconds per example."""
    small, large = measured.times["small"], measured.times["large"]
    return 1e3 * (min(large.seconds) - min(small.seconds)) / (large.examples - small.examples)


def fixed_seconds(measured: Measured) -> float:
    """Return the part of a fit that does not depend on the number of examples, in seconds."""
    small = measured.times["small"]
    return min(small.seconds) - 1e-3 * per_example(measured) * small.examples


def measure_kronfluence(name: str, count: int, setup: Setup) -> Measured:
    """Time both libraries in turns, and measure the peak memory of each in a separate process."""
    from benchmarks.kronfluence_side import Kronfluence

    network, count = NETWORKS[name], setup.size(count)
    model, batch = network.model(CLASSES, setup), setup.size(PLAIN.batch)
    data = labelled(network, count)
    batches = list(zip(*(part.split(batch) for part in data.tensors), strict=True))
    measured = Measured()
    with tempfile.TemporaryDirectory() as folder:
        theirs = Kronfluence(model, Path(folder))
        functions = {
            "ours": lambda: IFComp(model, sua=False).fit(batches, progress=False),
            "kronfluence": lambda: theirs.fit(data, batch),
        }
        measured.add(interleaved(functions, setup.slow_rounds, turn=setup.turn), count)
    for library in functions:
        peak = in_child(memory_of_fit, library, name, count, setup.threads, setup.tiny)
        measured.numbers[f"{library} bytes"] = peak
    return measured


def memory_of_fit(library: str, name: str, count: int, threads: int, tiny: bool) -> int:
    """Return the peak memory of a fit in bytes above model and data; runs in a separate process."""
    setup, network = Setup(threads, 1, tiny), NETWORKS[name]
    model, batch, data = network.model(CLASSES, setup), setup.size(PLAIN.batch), labelled(network, count)
    forward(model, data.tensors[0][:batch])
    if library == "ours":
        batches = list(zip(*(part.split(batch) for part in data.tensors), strict=True))
        ifc = IFComp(model, sua=False)
        return peak_memory(lambda: ifc.fit(batches, progress=False))
    from benchmarks.kronfluence_side import Kronfluence

    with tempfile.TemporaryDirectory() as folder:
        theirs = Kronfluence(model, Path(folder))
        return peak_memory(lambda: theirs.fit(data, batch))


def labelled(network: Network, count: int) -> TensorDataset:
    """Return random images with labels."""
    return TensorDataset(network.images(count), torch.arange(count) % CLASSES)


SUITE = Suite(
    "fit",
    "Fit",
    "fit of the curvature with the default Fisher. The cost per example is that of one additional example; "
    "eigendecompositions are computed once per fit. Kronfluence fits the same EKFAC of networks of Conv2d and Linear "
    "layers, without SUA.",
    minutes=7,
    sections=(
        Section(
            "Both passes, SUA",
            (
                milliseconds("forward", FORWARD),
                Column("per example, ms", per_example, ",.2f"),
                Column(
                    "per example, units",
                    lambda measured: per_example(measured) / measured.milliseconds(FORWARD),
                    ",.2f",
                    Goal("≤", 8.0),
                ),
                Column("once per fit, seconds", fixed_seconds, ",.2f"),
            ),
            {
                "ResNet-20": partial(measure_passes, RESNET20, (4, 12)),
                "ResNet-18": partial(measure_passes, RESNET18, (2, 8)),
            },
        ),
        Section(
            "Against kronfluence's EKFAC",
            (
                milliseconds("ours", "ours"),
                milliseconds("kronfluence", "kronfluence"),
                times_faster("kronfluence / ours", "kronfluence", "ours", Goal("≥", 2.0)),
                Column("ours, peak MB", lambda measured: measured.numbers["ours bytes"] / 1e6, ",.0f"),
                Column("kronfluence, peak MB", lambda measured: measured.numbers["kronfluence bytes"] / 1e6, ",.0f"),
                Column(
                    "memory, ours / kronfluence",
                    lambda measured: measured.numbers["ours bytes"] / max(measured.numbers["kronfluence bytes"], 1),
                    ",.2f",
                    Goal("≤", 1.0),
                ),
            ),
            {
                "LeNet": partial(measure_kronfluence, "LeNet", 2000),
                "plain CNN": partial(measure_kronfluence, "plain CNN", 1000),
            },
        ),
    ),
)
