"""pNML distribution against ACNML with the same EKFAC posterior."""

import math
import warnings
from functools import partial

from benchmarks.networks import LENET, RESNET18, Network
from benchmarks.references import forward
from benchmarks.suite import FORWARD, Goal, Measured, Section, Setup, Suite, milliseconds, times_faster, units
from benchmarks.suites.influence import DAMPING, fitted
from benchmarks.timing import interleaved
from experiments.baselines.acnml import Acnml
from ifcomp.errors import IfcompWarning

warnings.filterwarnings("ignore", "alpha=", IfcompWarning)  # time does not depend on alpha

STEPS = 5
#: Number of training examples that sets the width of the posterior. With the few examples of the fit, the steps of
#: ACNML would be far too long.
TRAINING_EXAMPLES = 50_000


def measure(network: Network, classes: int, count: int, few: float, setup: Setup) -> Measured:
    """Time forward pass and pNML over ``count`` examples, and ACNML over ``few`` examples.

    With ``few`` below 1, ACNML evaluates this share of the labels of one example.
    """
    ifc, x = fitted(network, classes, setup, setup.size(count))
    few, scale = min(few, 1) if setup.tiny else few, 1e-4 * len(x) / TRAINING_EXAMPLES
    acnml = Acnml.from_ekfac(ifc, damping=DAMPING, scale=scale, steps=STEPS)
    functions = {
        FORWARD: lambda: forward(ifc.model, x),
        "ours": lambda: ifc.predict_proba(x, alpha=0.15, keep_argmax=False),
    }
    measured = Measured()
    measured.add(interleaved(functions, setup.slow_rounds, turn=setup.turn), len(x))
    labels = range(round(few * classes)) if few < 1 else None  # each label is fitted alone
    slow = {"ACNML": partial(acnml.hindsight_proba, x[: math.ceil(few)], labels)}
    measured.add(interleaved(slow, setup.slow_rounds, warm_up=False, turn=setup.turn), few)
    measured.add(interleaved(functions, 1, warm_up=False, turn=setup.turn), len(x))
    return measured


SUITE = Suite(
    "acnml",
    "pNML distribution against ACNML",
    "the pNML distribution over all labels, against ACNML with 5 optimiser steps per label and the same EKFAC factors.",
    minutes=3,
    sections=(
        Section(
            "pNML distribution, K = 10",
            (
                milliseconds("forward", FORWARD, ",.3f"),
                milliseconds("ours", "ours"),
                units("ours", "ours"),
                milliseconds("ACNML", "ACNML", ",.0f"),
                units("ACNML", "ACNML"),
                times_faster("ACNML / ours", "ACNML", "ours", Goal("≥", 30.0)),
            ),
            {
                "LeNet": partial(measure, LENET, 10, 256, 32),
                "ResNet-18": partial(measure, RESNET18, 10, 16, 1),
            },
        ),
    ),
)
