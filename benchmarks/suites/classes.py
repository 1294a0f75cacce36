"""Influence of every label with many classes."""

from functools import partial

from benchmarks.networks import RESNET18, Network
from benchmarks.references import forward
from benchmarks.suite import FORWARD, Goal, Measured, Section, Setup, Suite, milliseconds, units
from benchmarks.suites.influence import fitted
from benchmarks.timing import interleaved

CLASSES = 100


def measure(network: Network, setup: Setup) -> Measured:
    """Time forward pass and influence of every label."""
    ifc, x = fitted(network, CLASSES, setup, setup.size(network.batch // 2))
    measured = Measured()
    measured.add(interleaved({FORWARD: lambda: forward(ifc.model, x)}, setup.rounds, turn=setup.turn), len(x))
    functions = {"ours": lambda: ifc.influence(x), FORWARD: lambda: forward(ifc.model, x)}
    measured.add(interleaved(functions, setup.slow_rounds, warm_up=False, turn=setup.turn), len(x))
    return measured


SUITE = Suite(
    "classes",
    "influence of every label with 100 labels.",
    minutes=4,
    sections=(
        Section(
            f"All-label influence, K = {CLASSES}",
            (
                milliseconds("forward", FORWARD),
                milliseconds("ours", "ours", ",.0f"),
                units("ours", "ours", Goal("≤", 1.0 * (1 + 2 * CLASSES))),
            ),
            {"ResNet-18": partial(measure, RESNET18)},
        ),
    ),
)
