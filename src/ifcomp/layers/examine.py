"""Check every rule against autograd on a few examples of the user's own data before trusting it.

A rule can be wrong for a model although it is right for the module: the batch may not be the first axis, a weight may
also be used by a function call elsewhere, a row may be shared by the whole batch. So the gradient that each block
gives for one example is compared with autograd's. A block finds its layout in this way, and a block for which none
fits is demoted: its parameters become *other* parameters, which are slower but always exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from ifcomp.batches import Batch, run_model
from ifcomp.errors import ModelError
from ifcomp.layers.block import IndexedBlock, KroneckerBlock, Layout, NormBlock, RecordedBlock
from ifcomp.layers.capture import Gradients, Recording, Tape
from ifcomp.layers.inventory import Inventory

#: Examples in the check: more than two, so that few other axes have the same length.
_EXAMPLES = 3


def examine(
    model: nn.Module, inventory_without: Callable[[Iterable[str]], Inventory], batch: Batch, dtype: torch.dtype
) -> tuple[Inventory, dict[str, Layout]]:
    """Find the layout of every block, and which blocks' rules hold.

    Args:
        model: The classifier.
        inventory_without: The model's inventory with the named blocks demoted to other parameters.
        batch: A batch of real data; three of its examples are used.
        dtype: The precision of canonical forms.

    Returns:
        The inventory, and where the batch axis of each recorded block is.

    Raises:
        ModelError: If an example's logits depend on the other examples of its batch.
    """
    batch = batch.select(torch.arange(_EXAMPLES) % batch.size)
    demoted: set[str] = set()
    while True:
        inventory = inventory_without(demoted)
        tape = Tape(model, inventory.sites, dict.fromkeys(_names(inventory), Layout.FIRST), dtype)
        try:
            with tape.attached():
                recording = tape.record(batch, "first batch")
                _check_independence(model, batch, recording.logits)
                layouts = _find_layouts(model, inventory, recording)
        except RuntimeError:
            if not tape.broadcast - demoted:
                raise
            demoted |= tape.broadcast  # the model cannot take a row that was repeated for the batch
            continue
        failed = {name for name, layout in layouts.items() if layout is None}
        if not failed:
            return inventory, {name: layout for name, layout in layouts.items() if layout is not None}
        demoted |= failed


def _names(inventory: Inventory) -> list[str]:
    return [block.name for block in inventory.recorded]


def _check_independence(model: nn.Module, batch: Batch, logits: Tensor) -> None:
    alone = run_model(model, batch.select(slice(batch.size - 1, batch.size)), "first batch")[0]
    if not _close(alone.detach(), logits[-1].detach()):
        raise ModelError(
            "The logits of an example depend on the other examples of its batch, so examples have no gradients of "
            "their own. "
            "Usual causes: BatchNorm with track_running_stats=False, or an axis other than the first as the batch. "
            f"Difference in the first batch: {float((alone - logits[-1]).detach().abs().max()):.3g}."
        )


def _find_layouts(model: nn.Module, inventory: Inventory, recording: Recording) -> dict[str, Layout | None]:
    logits = recording.logits
    generator = torch.Generator().manual_seed(0)
    cotangent = torch.zeros(logits.shape, dtype=logits.dtype)
    cotangent[-1] = torch.randn(logits.shape[1], generator=generator).to(logits.dtype)
    cotangent = cotangent.to(logits.device)
    names = sorted({name for block in inventory.recorded for name in block.parameters})
    parameters = [model.get_parameter(name) for name in names]
    found = torch.autograd.grad(logits, parameters, cotangent, retain_graph=True, allow_unused=True) if names else ()
    truth = {
        name: (torch.zeros_like(parameter) if gradient is None else gradient).detach()
        for name, parameter, gradient in zip(names, parameters, found, strict=True)
    }
    floor = max((float(gradient.double().norm()) for gradient in truth.values()), default=0.0)
    gradients = recording.backward(cotangent)
    return {block.name: _find_layout(block, recording, gradients, truth, floor) for block in inventory.recorded}


def _find_layout(
    block: RecordedBlock, recording: Recording, gradients: Gradients, truth: Mapping[str, Tensor], floor: float
) -> Layout | None:
    """The first layout with which the block reproduces autograd's gradient of the last example."""
    uses = recording.uses.get(block.name, [])
    for layout in Layout:
        if not all(layout.fits(use.value.shape, block.input_axes(use.value), recording.batch) for use in uses):
            continue
        recording.layouts = {**recording.layouts, block.name: layout}
        if _reproduces(block, recording, gradients, truth, floor):
            return layout
    return None


def _reproduces(
    block: RecordedBlock, recording: Recording, gradients: Gradients, truth: Mapping[str, Tensor], floor: float
) -> bool:
    if not recording.used(block):
        return all(not truth[name].any() for name in block.parameters)
    if isinstance(block, KroneckerBlock):
        a, b = recording.columns(block)[-1], recording.rows(block, gradients)[-1]
        return _close(b @ a.transpose(-1, -2), block.gradient_matrix(dict(truth)), floor)
    if isinstance(block, IndexedBlock):
        indices, b = recording.indices(block)[-1], recording.looked_up(block, gradients)[-1]
        table = b.new_zeros(block.entries, block.width).index_add(0, indices, b)
        return _close(table, truth[block.parameters[0]], floor)
    assert isinstance(block, NormBlock)
    vector = torch.cat([truth[name].flatten() for name in block.parameters])
    return _close(recording.scale_and_shift(block, gradients)[-1], vector, floor)


def _close(value: Tensor, truth: Tensor, floor: float = 0.0) -> bool:
    """Equal up to rounding in the coarser of the two precisions; ``floor`` is the size of the largest gradient."""
    precision = max(torch.finfo(value.dtype).eps, torch.finfo(truth.dtype).eps)
    error = float((value.double() - truth.double()).norm())
    size = float(truth.double().norm())
    return error <= math.sqrt(precision) * size + 10 * precision * floor
