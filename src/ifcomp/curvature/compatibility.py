"""Whether factors from a file or another source belong to a model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ifcomp.curvature.factors import Factors
from ifcomp.data.batches import Batch
from ifcomp.errors import FingerprintError
from ifcomp.layers.inventory import Inventory
from ifcomp.layers.layout import Layout
from ifcomp.layers.recorder import Recorder
from ifcomp.layers.verification import verified_recorder


def check_factors(
    factors: Factors, inventory: Inventory, dtype: torch.dtype, complete: bool, what: str, advice: str
) -> None:
    """Raise FingerprintError unless the factors match the blocks of a model in name, shape and type.

    Args:
        factors: The factors.
        inventory: All blocks of the model.
        dtype: Type of the factors of this model.
        complete: Whether every parameter must have factors.
        what: Subject of the message.
        advice: End of the message.
    """
    blocks = inventory.demote_to(factors.blocks).blocks
    needed = {block.name: block.factor_shapes for block in blocks if block.name in factors.blocks}
    given = {name: block.shapes for name, block in factors.blocks.items()}
    missing = {name for block in blocks if block.name not in factors.blocks for name in block.parameters}
    problems = {
        f"factors that are not {dtype}": {name for name, own in factors.blocks.items() if own.dtypes != {dtype}},
        "parameters without factors": missing if complete else set(),
        "factors without a layer": given.keys() - needed.keys(),
        "factors of another shape": {name for name in needed if needed[name] != given[name]},
    }
    lines = [f"  {title}: {', '.join(sorted(names))}" for title, names in problems.items() if names]
    if lines:
        raise FingerprintError("\n".join([f"{what} do not fit the layers of this model:", *lines, advice]))


def recorder_of_factors(
    model: nn.Module, inventory: Inventory, factors: Factors, first: Batch, layouts: Mapping[str, Layout]
) -> Recorder:
    """Verify the layers that factors exist for, and return their recorder.

    Args:
        model: The classifier.
        inventory: All of its blocks.
        factors: Factors that were not fitted by this process.
        first: A batch of real data.
        layouts: Layouts at the time of the fit.

    Raises:
        FingerprintError: If the number of classes or the treatment of a layer differs.
    """
    names = factors.blocks.keys()
    recorder = verified_recorder(model, inventory.demote_to(names).keep(names), first, likely=layouts)
    if recorder.num_classes != factors.num_classes:
        raise FingerprintError(
            f"The factors are for {factors.num_classes} classes, but the model has {recorder.num_classes} "
            "logits. Fit again."
        )
    changed = names - {block.name for block in recorder.blocks}
    if changed:
        raise FingerprintError(
            f"Layers do not run as they did when the factors were fitted: {', '.join(sorted(changed))}. Fit again."
        )
    return recorder
