"""Table of inference times of the paper (tab:timing): GradNorm, ACNML-EKFAC and IF-COMP, with the published ratios."""

from collections.abc import Mapping
from functools import partial

from benchmarks.networks import LENET, RESNET18, Network
from benchmarks.references import vmap_gradient_norm
from benchmarks.suite import Column, Measured, Section, Setup, Suite, milliseconds, times_faster
from benchmarks.suites import acnml
from benchmarks.timing import timed
from experiments.baselines.gradients import identity_curvature

#: Published seconds per input on an A40 GPU.
PAPER: Mapping[str, Mapping[str, float]] = {
    "LeNet, K = 10": {"GradNorm": 0.000226, "ACNML": 0.001770, "IF-COMP": 0.000241},
    "ResNet-18, K = 10": {"GradNorm": 0.00336, "ACNML": 0.23183, "IF-COMP": 0.01576},
    "ResNet-18, K = 100": {"GradNorm": 0.03783, "ACNML": 2.33628, "IF-COMP": 0.18883},
}


def measure(name: str, network: Network, classes: int, count: int, few: float, setup: Setup) -> Measured:
    """Time the functions of the suite acnml and the gradient norm with and without vmap; add the published ratios."""
    measured = acnml.measure(network, classes, count, few, setup)
    model, x = network.model(classes, setup), network.images(setup.size(count))
    few_examples = x[: setup.size(max(1, int(few)), 1)]
    chunk = max(1, 80 // classes)  # one example at a time for 100 labels, as in the paper
    ours = partial(identity_curvature(model, x[:1]).influence, x)
    vmapped = partial(vmap_gradient_norm, model, few_examples, chunk=chunk)
    measured.add({"GradNorm, ours": timed(ours, setup.slow_rounds, setup.turn)}, len(x))
    measured.add({"GradNorm": timed(vmapped, setup.slow_rounds, setup.turn)}, len(few_examples))
    paper = PAPER[name]
    measured.numbers["paper's ACNML / IF-COMP"] = paper["ACNML"] / paper["IF-COMP"]
    measured.numbers["paper's GradNorm / IF-COMP"] = paper["GradNorm"] / paper["IF-COMP"]
    return measured


def _published(ratio: str) -> Column:
    return Column(f"in the paper, {ratio}", lambda measured: measured.numbers[f"paper's {ratio}"], ",.2f")


_SUBJECTS: Mapping[str, tuple[Network, int, int, float]] = {
    "LeNet, K = 10": (LENET, 10, 256, 32),
    "ResNet-18, K = 10": (RESNET18, 10, 16, 1),
    "ResNet-18, K = 100": (RESNET18, 100, 4, 0.1),
}

SUITE = Suite(
    "table1",
    "The paper's table of inference times",
    "the paper's table of inference times for the pNML distribution. GradNorm and ACNML use vmap as there. GradNorm "
    "without vmap is the library's influence with identity curvature. ACNML fits 10 of the 100 labels, and its time is "
    "multiplied by ten.",
    minutes=6,
    sections=(
        Section(
            "Time per input",
            (
                milliseconds("GradNorm", "GradNorm"),
                milliseconds("ACNML-EKFAC", "ACNML"),
                milliseconds("IF-COMP", "ours"),
                times_faster("ACNML / IF-COMP", "ACNML", "ours"),
                _published("ACNML / IF-COMP"),
                times_faster("GradNorm / IF-COMP", "GradNorm", "ours"),
                _published("GradNorm / IF-COMP"),
                milliseconds("GradNorm without vmap", "GradNorm, ours"),
            ),
            {name: partial(measure, name, *arguments) for name, arguments in _SUBJECTS.items()},
        ),
    ),
)
