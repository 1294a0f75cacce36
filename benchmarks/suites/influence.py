"""Influence of every label, against the paper's way and the gradient norm, both with ``vmap``."""

from functools import partial

import torch
from torch import Tensor

from benchmarks.networks import LENET, RESNET18, RESNET20, Network
from benchmarks.references import LayerFactors, forward, paper_influence, vmap_gradient_norm
from benchmarks.suite import (
    FORWARD,
    Goal,
    Measured,
    Section,
    Setup,
    Suite,
    milliseconds,
    number,
    times_faster,
    typical_units,
    units,
)
from benchmarks.timing import interleaved
from ifcomp import IFComp, Relative
from ifcomp.layers.block import KroneckerBlock

CLASSES = 10
DAMPING = Relative(0.1)

#: Examples for which the paper's way is done in float64 too.
_EXACT = 2


def fitted(network: Network, classes: int, setup: Setup, count: int) -> tuple[IFComp, Tensor]:
    """A network with curvature from as many examples as will be scored, and these examples."""
    x = network.images(count)
    return IFComp(network.model(classes, setup), damping=DAMPING, sua=network.sua).fit([x], progress=False), x


def measure(network: Network, setup: Setup) -> Measured:
    """Forward pass, ours, the paper's way, the gradient norm, and how far ours is from the paper's in float64.

    In float32 the paper's way sums millions of squares of one gradient: on some processors it is 2e-4 off by itself.
    """
    ifc, x = fitted(network, CLASSES, setup, setup.size(network.batch))
    few, factors = x[: network.few], plain_factors(ifc)
    quick = interleaved(
        {FORWARD: lambda: forward(ifc.model, x), "ours": lambda: ifc.influence(x)},
        setup.rounds,
        turn=setup.turn,
    )
    slow = interleaved(
        {
            "paper": lambda: paper_influence(ifc.model, few, factors, 1.0),
            "gradient norm": lambda: vmap_gradient_norm(ifc.model, few),
            "ours": lambda: ifc.influence(x),
            FORWARD: lambda: forward(ifc.model, x),
        },
        setup.slow_rounds,
        warm_up=False,
        turn=setup.turn,
    )
    measured = Measured()
    for timed in (quick, slow):
        measured.add({name: own for name, own in timed.items() if name in (FORWARD, "ours")}, len(x))
    measured.add({name: slow[name] for name in ("paper", "gradient norm")}, len(few))
    exact = paper_influence(ifc.model.double(), few[:_EXACT].double(), plain_factors(ifc, torch.float64), 1.0, chunk=1)
    measured.numbers["difference"] = relative_difference(slow["ours"].value[:_EXACT], exact)
    return measured


def relative_difference(values: Tensor, reference: Tensor) -> float:
    """The largest difference, in parts of the largest value."""
    return float((values - reference).abs().max() / reference.abs().max())


def plain_factors(ifc: IFComp, dtype: torch.dtype = torch.float32) -> dict[str, LayerFactors]:
    """The library's factors in the references' form."""
    assert ifc.factors is not None
    assert ifc._session is not None
    plain: dict[str, LayerFactors] = {}
    for block in ifc._session.recorded:
        factors = ifc.factors.blocks[block.name]
        weights = 1 / (factors.second_moments.to(dtype) + ifc.factors.damping_of(block.name, DAMPING))
        basis = factors.basis
        plain[block.name] = {
            "input_basis": None if basis is None or basis.inputs is None else basis.inputs[0].to(dtype),
            "output_basis": None if basis is None else basis.outputs[0].to(dtype),
            "weights": (weights if basis is None else weights[0]).to(dtype),
            "offsets": block.offsets if isinstance(block, KroneckerBlock) else 1,
        }
    return plain


SUITE = Suite(
    "influence",
    "influence of every label, against the same with vmap over examples (8 at a time) and labels as in the paper, and "
    "against the vmap gradient norm of every label. Per-example gradients of all labels are worth 1 + 2K units.",
    minutes=6,
    sections=(
        Section(
            f"All-label influence, K = {CLASSES}",
            (
                milliseconds("forward", FORWARD, ",.3f"),
                milliseconds("ours", "ours"),
                units("ours", "ours", Goal("≤", 1.2 * (1 + 2 * CLASSES))),
                typical_units("ours", "ours"),
                milliseconds("paper's way", "paper", ",.1f"),
                times_faster(
                    "paper / ours", "paper", "ours", Goal("≥", {"LeNet": 20, "ResNet-20": 2, "ResNet-18": 20})
                ),
                milliseconds("gradient norm", "gradient norm", ",.1f"),
                times_faster("gradient norm / ours", "gradient norm", "ours", Goal("≥", 1.0)),
                number("difference to the paper's way in float64", "difference", ".0e", Goal("≤", 1e-4)),
            ),
            {
                "LeNet": partial(measure, LENET),
                "ResNet-20": partial(measure, RESNET20),
                "ResNet-18": partial(measure, RESNET18),
            },
        ),
    ),
)
