"""Expected influence from two probes instead of all labels."""

from functools import partial

from benchmarks.networks import LENET, RESNET18, Network
from benchmarks.references import forward
from benchmarks.suite import FORWARD, Goal, Measured, Section, Setup, Suite, milliseconds, times_faster, units
from benchmarks.suites.influence import fitted
from benchmarks.timing import interleaved

PROBES = 2
#: Largest number of classes for which all labels are timed.
_MAX_CLASSES = 100


def measure(network: Network, classes: int, setup: Setup) -> Measured:
    """Time forward pass, two probes and all labels."""
    ifc, x = fitted(network, classes, setup, setup.size(network.batch))
    measured = Measured()
    functions = {
        FORWARD: lambda: forward(ifc.model, x),
        "probes": lambda: ifc.parametric_complexity(x, probes=PROBES),
    }
    measured.add(interleaved(functions, setup.rounds, turn=setup.turn), len(x))
    if classes <= _MAX_CLASSES:
        functions |= {"all labels": lambda: ifc.parametric_complexity(x)}
        measured.add(interleaved(functions, setup.slow_rounds, warm_up=False, turn=setup.turn), len(x))
    return measured


def _section(title: str, subjects: dict[str, tuple[Network, int]], compared: bool, goal: Goal | None = None) -> Section:
    columns = [
        milliseconds("forward", FORWARD, ",.3f"),
        milliseconds("two probes", "probes", ",.3f"),
        units("two probes", "probes", Goal("≤", 6.5)),
    ]
    if compared:
        columns += [
            milliseconds("all labels", "all labels"),
            times_faster("all labels / two probes", "all labels", "probes", goal),
        ]
    return Section(title, tuple(columns), {name: partial(measure, *arguments) for name, arguments in subjects.items()})


SUITE = Suite(
    "probes",
    "Expected influence from two probes",
    "expected influence from two probes: an unbiased estimate, worth 1 + 2 · 2 units for any K.",
    minutes=8,
    sections=(
        _section(
            "Expected influence",
            {
                "LeNet, K = 10": (LENET, 10),
                "LeNet, K = 100": (LENET, 100),
                "ResNet-18, K = 10": (RESNET18, 10),
                "ResNet-18, K = 100": (RESNET18, 100),
            },
            True,
            Goal("≥", {"LeNet, K = 100": 25, "ResNet-18, K = 100": 25}),
        ),
        _section("Expected influence, a thousand classes", {"ResNet-18, K = 1,000": (RESNET18, 1000)}, False),
    ),
)
