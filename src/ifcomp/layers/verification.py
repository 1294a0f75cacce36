"""Verification: every layer rule is compared with autograd on a few examples of the user's data.

A rule can be wrong for a model although it is right for the module: the batch may not be the first axis, a weight may
also be used by a function call elsewhere, one row may be shared by the whole batch. So the per-example gradients of
each layer are compared with those of autograd. This determines the layout of each layer. A layer for which no layout
fits is demoted: its parameters get diagonal blocks from per-example gradients, which are slower but always exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ifcomp.data.batches import Batch
from ifcomp.data.checks import check_inputs
from ifcomp.errors import LogitsError, ModelError
from ifcomp.layers.forward import run_model
from ifcomp.layers.inputs import shared_inputs
from ifcomp.layers.inventory import Inventory
from ifcomp.layers.layer import Layer
from ifcomp.layers.layout import Layout
from ifcomp.layers.recorder import Recorder
from ifcomp.layers.recording import LayerCall, Recording

#: Examples per comparison: more than two, so that few other axes have the same length.
_EXAMPLES = 3

#: Largest number of groups of examples that are tried until every layer has a gradient.
_ATTEMPTS = 8


@dataclass(frozen=True)
class Verified:
    """The result of a verification.

    Attributes:
        inventory: All blocks; layers whose rule does not hold are demoted.
        layouts: Batch axis of every layer that was called.
        order: Names of the layers in the order of the forward pass.
        num_classes: K, the number of logits.
    """

    inventory: Inventory
    layouts: Mapping[str, Layout]
    order: tuple[str, ...]
    num_classes: int


def verify(
    model: nn.Module, inventory: Inventory, batch: Batch, likely: Mapping[str, Layout] | None = None
) -> Verified:
    """Determine the layout of every layer and demote layers whose rule does not hold.

    Args:
        model: The classifier.
        inventory: Its blocks.
        batch: A batch of real data; three of its examples are used at a time.
        likely: Layouts to try first, from an earlier verification.

    Raises:
        ModelError: If logits depend on other examples of the batch, are random, or do not depend on a parameter.
    """
    check_inputs(batch)
    known = dict(likely or {})
    names = {layer.name for layer in inventory.layers}
    shared = {name for name, layout in known.items() if layout is Layout.SHARED and name in names}
    order: tuple[str, ...] = ()
    while True:
        try:
            layouts, called, classes = _compare(model, inventory, batch, known, shared)
        except (RuntimeError, LogitsError, ModelError):
            if not shared:
                raise
            inventory, shared = inventory.demote(shared), set()  # expanding a shared row broke or changed the model
            continue
        order = order or called  # of all layers, before any is demoted
        failed = {name for name, layout in layouts.items() if layout is None}
        newly_shared = {name for name, layout in layouts.items() if layout is Layout.SHARED} - shared
        if not failed and not newly_shared:
            found = {name: layout for name, layout in layouts.items() if layout and name in order}
            return Verified(inventory, found, order, classes)
        inventory = inventory.demote(failed)
        shared = (shared | newly_shared) & {layer.name for layer in inventory.layers}


def verified_recorder(
    model: nn.Module,
    inventory: Inventory,
    batch: Batch,
    layers: str | tuple[str, ...] | None = None,
    likely: Mapping[str, Layout] | None = None,
) -> Recorder:
    """Verify an inventory and return the recorder of the selected layers.

    Args:
        model: The classifier.
        inventory: Its blocks.
        batch: A batch of real data.
        layers: None for all; ``"last"``; or names and shell-style patterns.
        likely: Layouts to try first, from an earlier verification.
    """
    check_inputs(batch)
    shared = shared_inputs(model, batch)
    verified = verify(model, inventory, replace(batch, shared=shared), likely)
    selected = verified.inventory
    if layers is not None:
        selected = selected.keep(inventory.select(layers, verified.order))
    return Recorder(model, selected, verified.layouts, verified.num_classes, shared)


def _compare(
    model: nn.Module, inventory: Inventory, batch: Batch, known: Mapping[str, Layout], shared: set[str]
) -> tuple[dict[str, Layout | None], tuple[str, ...], int]:
    """Layout of every layer (None: no layout fits), names of the layers in the order of calls, number of classes."""
    names = [layer.name for layer in inventory.layers]
    assumed = {name: Layout.SHARED if name in shared else known.get(name, Layout.FIRST) for name in names}
    recorder = Recorder(model, inventory, assumed)
    found: dict[str, Layout | None] = {}
    order: tuple[str, ...] = ()
    classes = 0
    with torch.autocast(recorder.device.type, enabled=False), recorder.attached():
        for examples in _example_groups(batch):
            recording = recorder.record(examples.to(recorder.device), check_layouts=False)
            _check_logits(model, examples, recording.logits)
            order, classes = order or tuple(recording.calls), recording.logits.shape[1]
            undecided = [layer for layer in inventory.layers if layer.name not in found]
            found |= _find_layouts(model, undecided, recording)
            if len(found) == len(names):
                break
    return {name: found.get(name, known.get(name)) for name in names}, order, classes


def _example_groups(batch: Batch) -> Iterator[Batch]:
    """A few examples at a time, large inputs first: a blank input has no gradient, and every layout would fit."""
    sizes = torch.zeros(batch.size, device="cpu")
    for value, has_axis in zip(batch.tensors(), batch.batched().values(), strict=True):
        if value.is_floating_point() and has_axis:
            sizes += value.detach().reshape(batch.size, -1).norm(dim=1).float().cpu()
    order = sizes.argsort(descending=True, stable=True)
    for first in range(0, min(batch.size, _ATTEMPTS * _EXAMPLES), _EXAMPLES):
        yield batch.select(order[(first + torch.arange(_EXAMPLES, device="cpu")) % batch.size])


def _check_logits(model: nn.Module, batch: Batch, logits: Tensor) -> None:
    """Raise ModelError unless logits are deterministic, differentiable and independent across examples."""
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
            "The logits of an example depend on the other examples of its batch, so per-example gradients do "
            "not exist. Usual causes: BatchNorm with track_running_stats=False, an axis other than the first as the "
            "batch, a decision that is made once for the whole batch. "
            f"Difference in the first batch: {float((alone - logits.detach()).abs().max()):.3g}."
        )


def _find_layouts(model: nn.Module, layers: Sequence[Layer], recording: Recording) -> dict[str, Layout | None]:
    """Layout of every layer; None where no layout fits. Layers that the examples do not decide are left out."""
    cotangent = _random_cotangent(recording.logits)
    expected = _parameter_grads(model, layers, recording.logits, cotangent)
    largest = [max((float(grad.double().norm()) for grad in grads.values()), default=0.0) for grads in expected]
    candidates = {
        layer.name: _candidates(layer, recording) for layer in layers if not _ambiguous(layer, recording, expected)
    }
    found: dict[str, Layout | None] = {}
    while any(name not in found for name in candidates):
        trials: list[Layer] = []
        for layer in layers:
            if layer.name not in candidates or layer.name in found:
                continue
            options = candidates[layer.name]
            if not options or (options[0] is Layout.SHARED and recording.layouts[layer.name] is not Layout.SHARED):
                found[layer.name] = options[0] if options else None  # a shared row is compared once it is expanded
            elif layer.name not in recording.calls:
                unused = all(not grads[name].any() for grads in expected for name in layer.block.parameters)
                found[layer.name] = Layout.FIRST if unused else None
            else:
                recording.set_layout(layer, options.pop(0))
                trials.append(layer)
        with torch.no_grad():
            output_grads = recording.output_grads(cotangent.unsqueeze(0), [layer.block for layer in trials])
            for layer in trials:
                block, inputs = layer.block, recording.inputs(layer.block)
                gradients = block.gradients(inputs, output_grads.pop(layer.name)).squeeze(1)
                if all(map(_close, gradients, map(layer.gradient, expected), largest)):
                    found[layer.name] = recording.layouts[layer.name]
    return found


def _candidates(layer: Layer, recording: Recording) -> list[Layout]:
    """Layouts that fit the calls of a layer, the likely one first."""
    likely = recording.layouts[layer.name]
    if likely is Layout.SHARED:
        return [likely]
    calls = recording.calls.get(layer.name, [])
    return [
        layout
        for layout in dict.fromkeys([likely, *Layout])
        if all(layout.fits(call.value.shape, layer.input_axes(call.value), recording.batch_size) for call in calls)
    ]


def _ambiguous(layer: Layer, recording: Recording, expected: Sequence[Mapping[str, Tensor]]) -> bool:
    """Whether the examples cannot decide the layout: all gradients are zero, and several layouts fit."""
    if any(grads[name].any() for grads in expected for name in layer.block.parameters):
        return False
    if recording.layouts[layer.name] is Layout.SHARED:
        return False
    return any(_arrangements(layer, call, recording.batch_size) > 1 for call in recording.calls.get(layer.name, []))


def _arrangements(layer: Layer, call: LayerCall, batch: int) -> int:
    """Number of layouts that fit a call and assign its rows differently."""
    shape, axes = call.value.shape, layer.input_axes(call.value)
    fitting = [layout for layout in Layout if layout.fits(shape, axes, batch)]
    return sum(layout is not Layout.FOLDED_SECOND or shape[0] > batch for layout in fitting)


def _random_cotangent(logits: Tensor) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randn(logits.shape, generator=generator, device="cpu").to(logits)


def _parameter_grads(
    model: nn.Module, layers: Sequence[Layer], logits: Tensor, cotangent: Tensor
) -> list[dict[str, Tensor]]:
    """Autograd's gradients of all parameters of the layers, for each example alone."""
    names = sorted({name for layer in layers for name in layer.block.parameters})
    owned = dict(model.named_parameters(remove_duplicate=False))  # scripted models lack get_parameter
    parameters = [owned[name] for name in names]
    found = []
    for example in range(len(logits)):
        masked = torch.zeros_like(cotangent)
        masked[example] = cotangent[example]
        grads = torch.autograd.grad(logits, parameters, masked, retain_graph=True, allow_unused=True) if names else ()
        found.append(
            {
                name: (torch.zeros_like(parameter) if grad is None else grad).detach()
                for name, parameter, grad in zip(names, parameters, grads, strict=True)
            }
        )
    return found


def _close(value: Tensor, truth: Tensor, largest: float = 0.0) -> bool:
    """Equal up to rounding in the coarser precision; ``largest`` is the norm of the largest gradient of the example."""
    precision = max(torch.finfo(value.dtype).eps, torch.finfo(truth.dtype).eps)
    error = float((value.double() - truth.double()).norm())
    size = float(truth.double().norm())
    return error <= math.sqrt(precision) * size + 10 * precision * largest
