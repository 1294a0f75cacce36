"""Influence of the given label, picked from that of all labels, against kronfluence's self-influence."""

import tempfile
from functools import partial
from pathlib import Path

import torch

from benchmarks.networks import PLAIN
from benchmarks.references import forward
from benchmarks.suite import FORWARD, Goal, Measured, Section, Setup, Suite, milliseconds, number, times_faster, units
from benchmarks.suites.fit import CLASSES, NETWORKS, labelled
from benchmarks.suites.influence import relative_difference
from benchmarks.timing import interleaved
from ifcomp import IFComp, Relative
from ifcomp.integrations.kronfluence import factors_from_kronfluence


def measure(name: str, setup: Setup) -> Measured:
    """Time forward pass and both libraries with the factors of kronfluence, and compare their results."""
    from benchmarks.kronfluence_side import Kronfluence

    network, count, batch = NETWORKS[name], setup.size(2000), setup.size(PLAIN.batch)
    model, data = network.model(CLASSES, setup), labelled(network, count)
    batches = list(zip(*(part.split(batch) for part in data.tensors), strict=True))
    measured = Measured()
    with tempfile.TemporaryDirectory() as folder:
        theirs = Kronfluence(model, Path(folder))
        factors = factors_from_kronfluence(theirs.fit(data, batch), model, num_classes=CLASSES)
        ifc = IFComp.from_factors(model, factors, damping=Relative(0.1), sua=False)
        functions = {
            FORWARD: lambda: [forward(model, x) for x, _ in batches],
            "ours": lambda: torch.cat([ifc.influence(x).gather(1, y[:, None])[:, 0] for x, y in batches]),
            "kronfluence": lambda: theirs.self_influence(data, batch),
        }
        timed = interleaved(functions, setup.slow_rounds, turn=setup.turn)
    measured.add(timed, count)
    ours, reference = timed["ours"].value, timed["kronfluence"].value.double()
    measured.numbers["difference"] = relative_difference(ours, reference)
    return measured


SUITE = Suite(
    "self",
    "Self-influence",
    "self-influence of 2,000 examples, against kronfluence's with the same factors and damping. Ours is picked from "
    "the influence of all ten labels, worth 21 units; kronfluence evaluates the given label alone.",
    minutes=4,
    sections=(
        Section(
            "Self-influence",
            (
                milliseconds("forward", FORWARD, ",.3f"),
                milliseconds("ours", "ours", ",.3f"),
                units("ours", "ours"),
                milliseconds("kronfluence", "kronfluence"),
                times_faster("kronfluence / ours", "kronfluence", "ours", Goal("≥", 2.0)),
                number("difference", "difference", ".0e", Goal("≤", 1e-3)),
            ),
            {name: partial(measure, name) for name in NETWORKS},
        ),
    ),
)
