"""Check every rule against autograd on a few examples of the user's own data before trusting it.

A rule can be wrong for a model although it is right for the module: the batch may not be the first axis, a weight may
also be used by a function call elsewhere, a row may be shared by the whole batch. So the gradients that each block
gives for single examples are compared with autograd's. A block finds its layout in this way, and a block for which
none fits is demoted: its parameters become *other* parameters, which are slower but always exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ifcomp.data.batches import Batch
from ifcomp.errors import LogitsError, ModelError
from ifcomp.layers.backward import Gradients
from ifcomp.layers.block import IndexedBlock, KroneckerBlock, Layout, NormBlock, RecordedBlock, Use
from ifcomp.layers.capture import Recording
from ifcomp.layers.forward import run_model
from ifcomp.layers.inventory import Inventory
from ifcomp.layers.tape import Tape

#: Examples in the check: more than two, so that few other axes have the same length.
_EXAMPLES = 3

#: How often other examples are tried when those so far say nothing about a block.
_TRIES = 8


@dataclass(frozen=True)
class Examined:
    """What the check found.

    Attributes:
        inventory: All blocks, those whose rule does not hold demoted.
        layouts: Where each recorded block that ran has its batch axis.
        order: Names of the recorded blocks in the order in which the model ran them.
    """

    inventory: Inventory
    layouts: Mapping[str, Layout]
    order: tuple[str, ...]


@dataclass(frozen=True)
class _Truth:
    """Autograd's gradients for one example alone, and the output gradients to reproduce them from."""

    example: int
    parameters: Mapping[str, Tensor]
    outputs: Gradients
    largest: float


def examine(
    model: nn.Module,
    inventory_without: Callable[[Iterable[str]], Inventory],
    batch: Batch,
    dtype: torch.dtype,
    likely: Mapping[str, Layout],
) -> Examined:
    """Find the layout of every block, and which blocks' rules hold.

    Args:
        model: The classifier.
        inventory_without: The model's inventory with the named blocks demoted to other parameters.
        batch: A batch of real data; three of its examples are used.
        dtype: The precision of canonical forms.
        likely: Layouts that are tried first: those found before.

    Raises:
        ModelError: If an example's logits depend on the other examples of its batch, on chance, or on no parameter.
    """
    device = next(model.parameters()).device
    demoted: set[str] = set()
    shared = {name for name, layout in likely.items() if layout is Layout.SHARED}
    order: tuple[str, ...] = ()
    while True:
        inventory = inventory_without(demoted)
        names = [block.name for block in inventory.recorded]
        assumed = {name: Layout.SHARED if name in shared else likely.get(name, Layout.FIRST) for name in names}
        tape = Tape(model, inventory.sites, assumed, dtype)
        found: dict[str, Layout | None] = {}
        try:
            with tape.attached():
                for examples in _telling(batch):
                    recording = tape.record(examples.to(device))
                    _check_logits(model, examples, recording.logits)
                    order = order or tuple(recording.uses)
                    open_blocks = [block for block in inventory.recorded if block.name not in found]
                    found |= _find_layouts(model, open_blocks, recording)
                    if len(found) == len(names):
                        break
        except (RuntimeError, LogitsError, ModelError):
            if not shared - demoted:
                raise
            demoted |= shared  # it was no row for the whole batch: repeated, it breaks the model or changes its logits
            continue
        layouts = {name: found.get(name, likely.get(name)) for name in names}
        failed = {name for name, layout in layouts.items() if layout is None}
        newly_shared = {name for name, layout in layouts.items() if layout is Layout.SHARED} - shared
        if not newly_shared and not failed:
            ran = {name: layout for name, layout in layouts.items() if layout and name in order}
            return Examined(inventory, ran, order)
        shared |= newly_shared
        demoted |= failed


def _telling(batch: Batch) -> Iterator[Batch]:
    """A few examples at a time, large inputs first: a blank one has no gradient, and every layout would do."""
    sizes = torch.zeros(batch.size, device="cpu")
    for value in batch.tensors():
        if value.is_floating_point() and value.dim() and len(value) == batch.size:
            sizes += value.detach().reshape(batch.size, -1).norm(dim=1).float().cpu()
    order = sizes.argsort(descending=True, stable=True)
    for first in range(0, min(batch.size, _TRIES * _EXAMPLES), _EXAMPLES):
        yield batch.select(order[(first + torch.arange(_EXAMPLES, device="cpu")) % batch.size])


def _check_logits(model: nn.Module, batch: Batch, logits: Tensor) -> None:
    if not logits.requires_grad:
        raise ModelError(
            "The logits carry no gradient: the model detaches them or runs under no_grad. Return logits that autograd "
            "can follow back to the parameters."
        )
    with torch.no_grad():
        alone = torch.cat([run_model(model, example.to(logits.device)) for example in batch.split(1)]).detach()
        again = run_model(model, batch.to(logits.device)).detach()
    if not _close(again, logits.detach()):
        raise ModelError(
            "The logits of the same batch differ from run to run, so the model is random even in eval mode. "
            "Usual cause: functional.dropout without training=self.training."
        )
    if not all(map(_close, alone, logits.detach())):
        raise ModelError(
            "The logits of an example depend on the other examples of its batch, so examples have no gradients of "
            "their own. Usual causes: BatchNorm with track_running_stats=False, an axis other than the first as the "
            "batch, a decision that is made once for the whole batch. "
            f"Difference in the first batch: {float((alone - logits.detach()).abs().max()):.3g}."
        )


def _find_layouts(model: nn.Module, blocks: Sequence[RecordedBlock], recording: Recording) -> dict[str, Layout | None]:
    """The layout of every block, None where none fits; blocks that the examples say nothing about are left out."""
    names = sorted({name for block in blocks for name in block.parameters})
    truths = [_truth(model, names, recording, example) for example in range(recording.batch)]
    telling = [block for block in blocks if not _ambiguous(block, recording, truths)]
    return {block.name: _find_layout(block, recording, truths) for block in telling}


def _ambiguous(block: RecordedBlock, recording: Recording, truths: list[_Truth]) -> bool:
    """Whether no example has a gradient and the rows of a call could belong to the examples in several ways."""
    if any(truth.parameters[name].any() for truth in truths for name in block.parameters):
        return False
    if recording.layouts[block.name] is Layout.SHARED:
        return False
    return any(len(_arrangements(block, use, recording.batch)) > 1 for use in recording.uses.get(block.name, []))


def _arrangements(block: RecordedBlock, use: Use, batch: int) -> list[Layout]:
    """The layouts that fit a call and sort its rows differently."""
    shape, axes = use.value.shape, block.input_axes(use.value)
    fitting = [layout for layout in Layout if layout.fits(shape, axes, batch)]
    return [layout for layout in fitting if layout is not Layout.FOLDED_SECOND or shape[0] > batch]


def _truth(model: nn.Module, names: list[str], recording: Recording, example: int) -> _Truth:
    logits = recording.logits
    cotangent = torch.zeros_like(logits)
    generator = torch.Generator("cpu").manual_seed(0)
    cotangent[example] = torch.randn(logits.shape[1], generator=generator, device="cpu").to(logits)
    owned = dict(model.named_parameters(remove_duplicate=False))  # a scripted model has no get_parameter
    parameters = [owned[name] for name in names]
    found = torch.autograd.grad(logits, parameters, cotangent, retain_graph=True, allow_unused=True) if names else ()
    gradients = {
        name: (torch.zeros_like(parameter) if gradient is None else gradient).detach()
        for name, parameter, gradient in zip(names, parameters, found, strict=True)
    }
    largest = max((float(gradient.double().norm()) for gradient in gradients.values()), default=0.0)
    return _Truth(example, gradients, recording.backward(cotangent), largest)


def _find_layout(block: RecordedBlock, recording: Recording, truths: list[_Truth]) -> Layout | None:
    """The first layout with which the block reproduces autograd's gradient of every example.

    A row that may be shared by the batch, and is not repeated yet, is taken at its word: the next round checks it.
    """
    uses = recording.uses.get(block.name, [])
    if not uses:
        unused = all(not truth.parameters[name].any() for truth in truths for name in block.parameters)
        return Layout.FIRST if unused else None
    likely = recording.layouts[block.name]
    repeated = likely is Layout.SHARED
    for layout in [likely] if repeated else dict.fromkeys([likely, *Layout]):
        shapes = [(use.value.shape, block.input_axes(use.value)) for use in uses]
        if layout is Layout.SHARED and not repeated:
            return layout if all(layout.fits(shape, axes, recording.batch) for shape, axes in shapes) else None
        if not repeated and not all(layout.fits(shape, axes, recording.batch) for shape, axes in shapes):
            continue
        recording.layouts = {**recording.layouts, block.name: layout}
        if all(_reproduces(block, recording, truth) for truth in truths):
            return layout
    return None


def _reproduces(block: RecordedBlock, recording: Recording, truth: _Truth) -> bool:
    example, outputs = truth.example, truth.outputs
    if isinstance(block, KroneckerBlock):
        a, b = recording.columns(block)[example], recording.rows(block, outputs)[example]
        return _close(b @ a.transpose(-1, -2), block.gradient_matrix(dict(truth.parameters)), truth.largest)
    if isinstance(block, IndexedBlock):
        indices, b = recording.indices(block)[example], recording.looked_up(block, outputs)[example]
        table = b.new_zeros(block.entries, block.width).index_add(0, indices, b)
        return _close(table, truth.parameters[block.parameters[0]], truth.largest)
    assert isinstance(block, NormBlock)
    vector = torch.cat([truth.parameters[name].flatten() for name in block.parameters])
    return _close(recording.scale_and_shift(block, outputs)[example], vector, truth.largest)


def _close(value: Tensor, truth: Tensor, largest: float = 0.0) -> bool:
    """Equal up to rounding in the coarser of the two precisions; ``largest`` is the size of the largest gradient."""
    precision = max(torch.finfo(value.dtype).eps, torch.finfo(truth.dtype).eps)
    error = float((value.double() - truth.double()).norm())
    size = float(truth.double().norm())
    return error <= math.sqrt(precision) * size + 10 * precision * largest
