"""Influence of the last layer only."""

from functools import partial

from benchmarks.networks import LENET, RESNET18, RESNET20, Network
from benchmarks.references import forward
from benchmarks.suite import FORWARD, Goal, Measured, Section, Setup, Suite, milliseconds, units
from benchmarks.suites.influence import CLASSES, DAMPING
from benchmarks.timing import interleaved
from ifcomp import IFComp


def measure(network: Network, setup: Setup) -> Measured:
    """Time forward pass and influence."""
    x = network.images(setup.size(network.batch))
    ifc = IFComp(network.model(CLASSES, setup), layers="last", damping=DAMPING).fit([x], progress=False)
    measured = Measured()
    functions = {FORWARD: lambda: forward(ifc.model, x), "ours": lambda: ifc.influence(x)}
    measured.add(interleaved(functions, 2 * setup.rounds, turn=setup.turn), len(x))
    return measured


SUITE = Suite(
    "last",
    "Influence of the last layer",
    'influence of every label with layers="last".',
    minutes=1,
    sections=(
        Section(
            f"All-label influence of the last layer, K = {CLASSES}",
            (
                milliseconds("forward", FORWARD, ",.3f"),
                milliseconds("ours", "ours", ",.3f"),
                units("ours", "ours", Goal("≤", 1.3)),
            ),
            {
                "LeNet": partial(measure, LENET),
                "ResNet-20": partial(measure, RESNET20),
                "ResNet-18": partial(measure, RESNET18),
            },
        ),
    ),
)
