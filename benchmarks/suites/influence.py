"""Influence of every label against explicit gradients as in the paper, and against the gradient norm."""

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
    median_units,
    milliseconds,
    number,
    times_faster,
    units,
)
from benchmarks.timing import interleaved
from ifcomp import IFComp, Relative

CLASSES = 10
DAMPING = Relative(0.1)

#: Number of examples of the float64 reference.
_EXACT = 2


def fitted(network: Network, classes: int, setup: Setup, count: int) -> tuple[IFComp, Tensor]:
    """Return a predictor fitted on ``count`` random inputs, and the inputs."""
    x = network.images(count)
    return IFComp(network.model(classes, setup), damping=DAMPING, sua=network.sua).fit([x], progress=False), x


def measure(network: Network, setup: Setup) -> Measured:
    """Time forward pass, library, explicit gradients and gradient norm; compare with explicit gradients in float64.

    In float32 the reference sums millions of squares and is off by up to 2e-4 on some processors.
    """
    ifc, x = fitted(network, CLASSES, setup, setup.size(network.batch))
    few, factors = x[: network.few], reference_factors(ifc)
    fast = interleaved(
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
    for timed in (fast, slow):
        measured.add({name: result for name, result in timed.items() if name in (FORWARD, "ours")}, len(x))
    measured.add({name: slow[name] for name in ("paper", "gradient norm")}, len(few))
    factors = reference_factors(ifc, torch.float64)
    exact = paper_influence(ifc.model.double(), few[:_EXACT].double(), factors, 1.0, chunk=1)
    measured.numbers["difference"] = relative_difference(slow["ours"].value[:_EXACT], exact)
    return measured


def relative_difference(values: Tensor, reference: Tensor) -> float:
    """Return the largest difference relative to the largest reference value."""
    return float((values - reference).abs().max() / reference.abs().max())


def reference_factors(ifc: IFComp, dtype: torch.dtype = torch.float32) -> dict[str, LayerFactors]:
    """Convert the fitted factors of a network without grouped convolutions to the format of the references."""
    assert ifc.factors is not None
    return {name: _layer_factors(ifc, name, dtype) for name in ifc.factors.blocks}


def _layer_factors(ifc: IFComp, name: str, dtype: torch.dtype) -> LayerFactors:
    assert ifc.factors is not None
    block, delta = ifc.factors.blocks[name], ifc.factors.damping_of(name, DAMPING)
    weights = 1 / (block.second_moments.to(dtype) + delta)
    if block.basis is None or block.basis.inputs is None:
        return {"input_basis": None, "output_basis": None, "weights": weights, "offsets": 1}
    inputs, outputs, weights = block.basis.inputs[0].to(dtype), block.basis.outputs[0].to(dtype), weights[0]
    shares_basis = inputs.shape[1] < weights.shape[1]  # SUA: the basis covers the channels of one kernel offset
    kernel = ifc.model.get_submodule(name).get_parameter("weight").shape[2:]
    offsets = kernel.numel() if shares_basis else 1
    return {"input_basis": inputs, "output_basis": outputs, "weights": weights, "offsets": offsets}


SUITE = Suite(
    "influence",
    "Influence of every label",
    "influence of every label, against explicit gradients with vmap over examples (8 at a time) and labels as in the "
    "paper, and against the vmap gradient norm of every label. Per-example gradients of all labels are worth 1 + 2K "
    "units.",
    minutes=6,
    sections=(
        Section(
            f"All-label influence, K = {CLASSES}",
            (
                milliseconds("forward", FORWARD, ",.3f"),
                milliseconds("ours", "ours"),
                units("ours", "ours", Goal("≤", 1.2 * (1 + 2 * CLASSES))),
                median_units("ours", "ours"),
                milliseconds("paper", "paper", ",.1f"),
                times_faster(
                    "paper / ours", "paper", "ours", Goal("≥", {"LeNet": 20, "ResNet-20": 2, "ResNet-18": 20})
                ),
                milliseconds("gradient norm", "gradient norm", ",.1f"),
                times_faster("gradient norm / ours", "gradient norm", "ours", Goal("≥", 1.0)),
                number("difference to float64 reference", "difference", ".0e", Goal("≤", 1e-4)),
            ),
            {
                "LeNet": partial(measure, LENET),
                "ResNet-20": partial(measure, RESNET20),
                "ResNet-18": partial(measure, RESNET18),
            },
        ),
    ),
)
