"""Verification: every layer rule is compared with autograd on a few examples of the user's data.

A rule can be wrong for a model although it is right for the module: the batch may not be the first axis, a weight may
also be used by a function call elsewhere, one row may be shared by the whole batch. So the per-example gradients of
each block are compared with those of autograd, relative to the size of the block's gradients. Every layer gets the
layout with the smallest error. A module that is not called although its weight is used is recorded by function
(`ifcomp.layers.functions`). A layer for which no layout fits is demoted: its parameters get diagonal blocks from
per-example gradients, which are slower but always exact.

Models of half precision are compared in float32, unless they cannot run in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from ifcomp.data.batches import Batch, map_tensors
from ifcomp.data.checks import check_inputs
from ifcomp.errors import IfcompError, LogitsError, ModelError
from ifcomp.layers.expected import Expected, expected_gradients, explains_parameters
from ifcomp.layers.forward import HALF, in_float32
from ifcomp.layers.head import find_head
from ifcomp.layers.inputs import shared_inputs
from ifcomp.layers.inventory import Inventory
from ifcomp.layers.layer import Layer
from ifcomp.layers.layout import Layout
from ifcomp.layers.logit_checks import check_logits, plain_logits
from ifcomp.layers.recorder import Recorder, Verified
from ifcomp.layers.recording import CallGrads, Recording, random_cotangent
from ifcomp.layers.settling import first_axis_rows
from ifcomp.layers.threads import exclusive
from ifcomp.precision import as_double

#: Examples per comparison: more than two, so that few other axes have the same length.
_EXAMPLES = 3

#: Largest number of groups of examples that are tried until every layer has a gradient.
_ATTEMPTS = 8

#: A gradient whose error is below this multiple of eps times the largest gradient of the model may be a rounding error.
_ROUNDINGS = 10

#: Layouts that are compared; a shared row is compared once it is expanded.
_COMPARED = (Layout.FIRST, Layout.SECOND, Layout.FOLDED_SECOND, Layout.SCATTERED)


@dataclass
class _Comparison:
    """Results of the groups of examples so far.

    Attributes:
        layouts: Layout of every decided layer; None if no layout fits.
        rows: Rows of the first axis per example.
        unverified: Layouts of undecided layers without a gradient, if only one fits.
        rounding: Undecided blocks whose gradients are rounding errors, with their best layout.
        wrong: Parameters without a layer rule whose gradients are wrong.
        uncalled: Layers that have a gradient but no recorded call.
        order: Names of the layers in the order of calls.
        num_classes: K.
        largest: Norm of the largest gradient of a parameter.
        uses: Uses of the parameters of every layer by functions, per call.
    """

    layouts: dict[str, Layout | None] = field(default_factory=dict)
    rows: dict[str, set[int]] = field(default_factory=dict)
    unverified: dict[str, Layout] = field(default_factory=dict)
    rounding: dict[str, Layout] = field(default_factory=dict)
    wrong: set[str] = field(default_factory=set)
    uncalled: set[str] = field(default_factory=set)
    order: tuple[str, ...] = ()
    num_classes: int = 0
    largest: float = 0.0
    uses: dict[str, float] = field(default_factory=dict)


def verify(
    model: nn.Module, inventory: Inventory, batch: Batch, likely: Mapping[str, Layout] | None = None
) -> Verified:
    """Determine the layout of every layer and demote layers whose rule does not hold.

    Args:
        model: The classifier.
        inventory: Its blocks.
        batch: A batch of real data; three of its examples are used at a time.
        likely: Layouts of layers that the batch does not determine, from an earlier verification.

    Raises:
        ModelError: If logits depend on other examples of the batch, are random, or do not depend on a parameter, or if
            the gradient of a parameter cannot be computed.
    """
    check_inputs(batch)
    halves = any(parameter.dtype in HALF for parameter in model.parameters())
    if not halves:
        return _verify(model, inventory, batch, likely or {})
    try:
        with exclusive(model), in_float32(model):
            return _verify(model, inventory, _as_float32(batch), likely or {})
    except (RuntimeError, IfcompError):  # the model converts to half precision itself
        return _verify(model, inventory, batch, likely or {})


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
    batch = replace(batch, shared=shared)
    verified = replace(verify(model, inventory, batch, likely), shared=shared, head=find_head(model, batch))
    if layers is not None:
        selected = verified.inventory.keep(inventory.select(layers, verified.order))
        verified = replace(verified, inventory=selected)
    return Recorder(model, verified)


def _verify(model: nn.Module, inventory: Inventory, batch: Batch, likely: Mapping[str, Layout]) -> Verified:
    names = {layer.name for layer in inventory.layers}
    shared = {name for name, layout in likely.items() if layout is Layout.SHARED and name in names}
    order: tuple[str, ...] = ()
    uses_vmap = True
    while True:
        assumed = {layer.name: Layout.SHARED if layer.name in shared else Layout.FIRST for layer in inventory.layers}
        try:
            result = _compare(model, Verified(inventory, assumed, uses_vmap=uses_vmap), batch)
        except CheckpointError:  # a checkpointed module runs again without the mode that records functions
            recorded = {layer.name for layer in inventory.layers if layer.arguments or layer in inventory.bare}
            if not recorded:
                raise
            inventory = inventory.demote(recorded)
            continue
        except (RuntimeError, LogitsError, ModelError):
            if not shared:
                raise
            inventory, shared = inventory.demote(shared), set()  # expanding a shared row broke or changed the model
            continue
        order = order or result.order  # of all layers, before any is demoted
        failed = {name for name, layout in result.layouts.items() if layout is None}
        newly_shared = {name for name, layout in result.layouts.items() if layout is Layout.SHARED} - shared
        if result.wrong and not uses_vmap:
            raise ModelError(
                f"The per-example gradients of {', '.join(sorted(result.wrong))} differ from those of autograd: the "
                "model keeps a value computed from them between calls. Disable the cache, or freeze the parameters."
            )
        if not failed and not newly_shared and not result.wrong:
            layouts = _final_layouts(result, inventory, likely)
            return Verified(
                inventory,
                layouts,
                order,
                result.num_classes,
                result.rows,
                frozenset(result.rounding),
                uses_vmap,
                uses=result.uses,
            )
        uses_vmap = uses_vmap and not result.wrong
        by_function = inventory.by_function(result.uncalled)
        known = {layer.name for layer in inventory.layers if layer.arguments}
        converted = {layer.name for layer in by_function.layers if layer.arguments} - known
        inventory = by_function.demote(failed - converted)
        shared = (shared | newly_shared) & {layer.name for layer in inventory.layers}


def _final_layouts(result: _Comparison, inventory: Inventory, likely: Mapping[str, Layout]) -> dict[str, Layout]:
    """Layout of every layer that was called; scattered if the examples do not determine it."""
    return {
        layer.name: result.layouts.get(layer.name)
        or result.rounding.get(layer.name)
        or result.unverified.get(layer.name)
        or likely.get(layer.name)
        or Layout.SCATTERED
        for layer in inventory.layers
        if layer.name in result.order
    }


def _compare(model: nn.Module, verified: Verified, batch: Batch) -> _Comparison:
    """Compare all gradients with autograd, for groups of examples until every layer is decided.

    The last group is compared again in reverse order, because a group may be in the order in which a model sorts it.
    """
    recorder, result = Recorder(model, verified), _Comparison()
    layers = verified.inventory.layers
    with torch.autocast(recorder.device.type, enabled=False):
        for examples in _example_groups(batch):
            with _checked_recording(recorder, examples) as recording:
                result.order = result.order or tuple(recording.calls)
                result.num_classes = recording.logits.shape[1]
                result.uses |= {name: uses for name, uses in recorder.uses_per_call(recording).items() if uses}
                undecided = [layer for layer in layers if layer.name not in result.layouts]
                _compare_group(model, undecided, recording, result)
            del recording
            if len(result.layouts) == len(layers):
                break
        with _checked_recording(recorder, examples.select(torch.tensor([2, 1, 0], device="cpu"))) as recording:
            _confirm(model, layers, recording, result)
    return result


@contextmanager
def _checked_recording(recorder: Recorder, examples: Batch) -> Iterator[Recording]:
    """Record a group of examples and check the logits."""
    plain = plain_logits(recorder.model, examples.to(recorder.device))
    with recorder.attached():
        recording = recorder.record(examples.to(recorder.device), settle=False)
        check_logits(recorder.model, examples, recording.logits, plain)
        yield recording


def _confirm(model: nn.Module, layers: Sequence[Layer], recording: Recording, result: _Comparison) -> None:
    """Scatter the rows of layers whose layout does not hold for other examples."""
    decided = [
        layer for layer in layers if layer.name in recording.calls and result.layouts.get(layer.name) in _COMPARED
    ]
    comparison = _Comparison(largest=result.largest)
    _compare_group(model, decided, recording, comparison)
    result.wrong |= comparison.wrong
    for name, layout in comparison.layouts.items():
        if layout is not result.layouts[name]:
            result.layouts[name] = None if layout is None else Layout.SCATTERED


def _compare_group(model: nn.Module, layers: Sequence[Layer], recording: Recording, result: _Comparison) -> None:
    """Decide the layouts of layers by one group of examples, and compare the gradients of other parameters."""
    cotangent = random_cotangent(recording.logits)
    blocks = [*(layer.block for layer in layers), *recording.others]
    owned = dict(model.named_parameters(remove_duplicate=False))  # scripted models lack get_parameter
    parameters = {name: owned[name] for block in blocks for name in block.parameters}
    examples = torch.eye(len(cotangent), dtype=torch.bool, device=cotangent.device).unsqueeze(2)
    expected = [expected_gradients(recording, layers, parameters, cotangent * mask) for mask in examples]
    sizes = [float(as_double(grad).norm()) for own in expected for grad in own.parameters.values()]
    result.largest = max(result.largest, *sizes) if sizes else result.largest
    precision = max(torch.finfo(recording.logits.dtype).eps, torch.finfo(recording.dtype).eps)
    tolerance = _Tolerance(precision, result.largest)
    with torch.no_grad():
        called = [layer for layer in layers if layer.name in recording.calls]
        grads = recording.backward(cotangent, called)
        for layer in layers:
            if layer not in called:
                if any(own.parameters[name].any() for own in expected for name in layer.block.parameters):
                    result.layouts[layer.name] = None  # used, but not by a recorded call
                    result.uncalled.add(layer.name)
            elif layer.arguments and not all(
                explains_parameters(recording, layer, own, parameters, math.sqrt(precision)) for own in expected
            ):
                result.layouts[layer.name] = None  # the parameters are also used elsewhere
            else:
                truth = torch.stack([own.of_layer(layer) for own in expected])
                errors = _layout_errors(layer, recording, grads, truth, tolerance)
                _decide(layer, recording, errors, truth, tolerance, result)
        _compare_others(recording, cotangent, expected, tolerance, result)


def _compare_others(
    recording: Recording,
    cotangent: Tensor,
    expected: Sequence[Expected],
    tolerance: _Tolerance,
    result: _Comparison,
) -> None:
    """Compare the gradients of parameters without a layer rule."""
    gradients = recording.output_grads(cotangent.unsqueeze(0), recording.others)
    for block in recording.others:
        truth = torch.stack([own.parameters[block.parameters[0]].flatten() for own in expected])
        error = _Error.between(gradients[block.name].squeeze(1), truth)
        result.rounding.pop(block.name, None)
        if tolerance.is_rounding(error):
            result.rounding[block.name] = Layout.FIRST
        elif not tolerance.is_equal(error):
            result.wrong.add(block.name)


@dataclass(frozen=True)
class _Error:
    """Norm of a difference, and of the expected gradients."""

    error: float
    size: float

    @classmethod
    def between(cls, actual: Tensor, expected: Tensor) -> _Error:
        truth = as_double(expected)
        return cls(float((as_double(actual) - truth).norm()), float(truth.norm()))


@dataclass(frozen=True)
class _Tolerance:
    """Distinguishes right gradients, wrong gradients and rounding errors.

    Attributes:
        precision: eps of the coarsest type of the comparison.
        largest: Norm of the largest gradient of a parameter.
    """

    precision: float
    largest: float

    def is_equal(self, error: _Error) -> bool:
        """Whether two gradients agree, relative to their size."""
        return error.error <= math.sqrt(self.precision) * error.size

    def is_rounding(self, error: _Error) -> bool:
        """Whether a gradient is so small that its difference from autograd may be rounding."""
        return not self.is_equal(error) and error.error <= _ROUNDINGS * self.precision * self.largest


def _layout_errors(
    layer: Layer, recording: Recording, grads: CallGrads, truth: Tensor, tolerance: _Tolerance
) -> dict[Layout, _Error]:
    """Error of the gradients of a layer for every layout that fits its calls."""
    is_shared = recording.layouts[layer.name] is Layout.SHARED
    errors: dict[Layout, _Error] = {}
    for layout in (Layout.SHARED,) if is_shared else _COMPARED:
        if layout is Layout.SCATTERED and any(map(tolerance.is_equal, errors.values())):
            break
        if not is_shared and not _fits(layout, layer, recording):
            continue
        recording.set_layout(layer, layout)
        try:
            output_grads = recording.arrange(layer, grads).unsqueeze(1)
        except ModelError:  # a row belongs to several examples
            continue
        gradients = layer.block.gradients(recording.inputs(layer.block), output_grads).squeeze(1)
        errors[layout] = _Error.between(gradients, truth)
    return errors


def _decide(
    layer: Layer,
    recording: Recording,
    errors: Mapping[Layout, _Error],
    truth: Tensor,
    tolerance: _Tolerance,
    result: _Comparison,
) -> None:
    """Choose the layout with the smallest error. A layer stays undecided if the examples do not determine it."""
    name = layer.name
    is_shared = recording.layouts[name] is Layout.SHARED
    best = min(errors, key=lambda layout: errors[layout].error, default=None)
    result.rounding.pop(name, None)
    if best is not None and tolerance.is_equal(errors[best]):
        recording.set_layout(layer, best)
        if truth.any():
            result.layouts[name], result.rows[name] = best, first_axis_rows(layer, recording)
        elif is_shared or _arrangements(layer, recording) == 1:
            result.unverified[name] = best
    elif best is not None and tolerance.is_rounding(errors[best]):
        result.rounding[name] = best
    else:
        result.layouts[name] = Layout.SHARED if not is_shared and _fits(Layout.SHARED, layer, recording) else None


def _fits(layout: Layout, layer: Layer, recording: Recording) -> bool:
    """Whether all calls of a layer can have a layout."""
    return all(
        layout.fits(call.value.shape, layer.input_axes(call.value), recording.batch_size)
        for call in recording.calls[layer.name]
    )


def _arrangements(layer: Layer, recording: Recording) -> int:
    """Number of layouts that fit the calls of a layer and assign rows differently."""
    fitting = [layout for layout in (*_COMPARED[:3], Layout.SHARED) if _fits(layout, layer, recording)]
    is_folded = any(call.value.shape[0] > recording.batch_size for call in recording.calls[layer.name])
    return sum(layout is not Layout.FOLDED_SECOND or is_folded for layout in fitting)


def _example_groups(batch: Batch) -> Iterator[Batch]:
    """A few examples at a time, large inputs first: a blank input has no gradient, and every layout would fit."""
    sizes = torch.zeros(batch.size, device="cpu")
    for value, has_axis in zip(batch.tensors(), batch.batched().values(), strict=True):
        if value.is_floating_point() and has_axis:
            sizes += value.detach().reshape(batch.size, -1).float().norm(dim=1).cpu()
    order = sizes.argsort(descending=True, stable=True)
    for first in range(0, min(batch.size, _ATTEMPTS * _EXAMPLES), _EXAMPLES):
        yield batch.select(order[(first + torch.arange(_EXAMPLES, device="cpu")) % batch.size])


def _as_float32(batch: Batch) -> Batch:
    def convert(value: Tensor) -> Tensor:
        return value.float() if value.dtype in HALF else value

    return replace(batch, args=map_tensors(convert, batch.args), kwargs=map_tensors(convert, batch.kwargs))
