"""Layouts of layers that do not run as on the verified examples.

Layers of unpadded tokens, experts and conditional layers run on different rows in every batch. Where the rows may
differ from those that were verified, their owners are determined. If the layout disagrees, the rows are scattered.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from ifcomp.errors import ModelError
from ifcomp.layers.expected import expected_gradients, explains_parameters
from ifcomp.layers.layer import Layer
from ifcomp.layers.layout import Layout
from ifcomp.layers.recording import Recording, random_cotangent

#: Layouts in which the rows of an example may be folded into the first axis.
_FOLDED = (Layout.FIRST, Layout.FOLDED_SECOND)


def settle_layouts(
    recording: Recording,
    layers: Sequence[Layer],
    verified_rows: Mapping[str, Collection[int]],
    rearranges: bool,
    reads_content: bool,
) -> None:
    """Scatter the rows of layers whose layout does not hold for a batch.

    Args:
        recording: A recorded batch.
        layers: Its layers.
        verified_rows: Rows of the first axis per example, as verified.
        rearranges: Whether the content of tensors may determine the order of rows.
        reads_content: Whether the content of tensors may determine the number of rows.
    """
    called = [layer for layer in layers if layer.name in recording.calls]
    scattered = [layer for layer in called if not _fits(layer, recording)]
    uncertain = [
        layer
        for layer in called
        if layer not in scattered
        and (rearranges or _may_differ(layer, recording, verified_rows.get(layer.name, ()), reads_content))
    ]
    uncertain = [layer for layer in uncertain if recording.layouts[layer.name] not in (Layout.SHARED, Layout.SCATTERED)]
    if uncertain and recording.batch_size > 1:
        scattered += recording.misarranged(uncertain)
    for layer in scattered:
        recording.set_layout(layer, Layout.SCATTERED)


def first_axis_rows(layer: Layer, recording: Recording) -> set[int]:
    """Rows of the first axis per example, for every call."""
    if recording.layouts.get(layer.name) not in _FOLDED:
        return set()
    return {call.value.shape[0] // recording.batch_size for call in recording.calls.get(layer.name, [])}


def check_gradient(recording: Recording, layer: Layer, parameters: Mapping[str, Tensor]) -> bool:
    """Compare the gradient of a layer with autograd, summed over the batch. Return whether there is a gradient.

    Args:
        recording: A recorded batch.
        layer: A layer that was not called on the verified examples.
        parameters: The model's parameters by name.

    Raises:
        ModelError: If they differ.
    """
    cotangent = random_cotangent(recording.logits)
    tolerance = torch.finfo(recording.logits.dtype).eps ** 0.5
    owned = {name: parameters[name] for name in layer.block.parameters}
    found = expected_gradients(recording, [layer], owned, cotangent)
    is_complete = not layer.arguments or explains_parameters(recording, layer, found, owned, tolerance)
    with torch.no_grad():
        expected = found.of_layer(layer).to(recording.dtype)
        output_grads = recording.output_grads(cotangent.unsqueeze(0), [layer.block])[layer.name]
        actual = layer.block.gradients(recording.inputs(layer.block), output_grads).sum((0, 1))
        if not is_complete or (actual - expected).norm() > tolerance * expected.norm():
            raise ModelError(
                f"Layer '{layer.name}' was not called on the examples that were verified first, and its gradient "
                "differs from that of autograd: its parameters are also used outside of the layer. Begin with a batch "
                "in which the layer runs, or leave it out with layers= or requires_grad_(False)."
            )
        return bool(expected.any())


def used_layers(recording: Recording, layers: Sequence[Layer], parameters: Mapping[str, Tensor]) -> list[Layer]:
    """Layers without a recorded call on which the logits depend.

    Args:
        recording: A recorded batch.
        layers: Layers that were not called.
        parameters: The model's parameters by name.
    """
    owned = {name: parameters[name] for layer in layers for name in layer.block.parameters}
    if not owned:
        return []
    cotangent = random_cotangent(recording.logits)
    grads = recording.gradients(list(owned.values()), cotangent)
    used = {name for name, grad in zip(owned, grads, strict=True) if grad is not None and grad.any()}
    return [layer for layer in layers if not used.isdisjoint(layer.block.parameters)]


def check_bare(layers: Sequence[Layer], bare: Sequence[Layer]) -> None:
    """Raise ModelError unless all layers are parameters without a module, whose gradients need no recorded call."""
    others = [layer for layer in layers if layer not in bare]
    if others:
        raise ModelError(
            f"The parameters of layer '{others[0].name}' are used in another way than on the examples that were "
            "verified first, so its gradient cannot be formed. Begin with a batch in which they are used in this way, "
            "or freeze them with requires_grad_(False)."
        )


def _fits(layer: Layer, recording: Recording) -> bool:
    layout = recording.layouts.get(layer.name)
    return layout is not None and all(
        layout.fits(call.value.shape, layer.input_axes(call.value), recording.batch_size, expanded=True)
        for call in recording.calls[layer.name]
    )


def _may_differ(layer: Layer, recording: Recording, verified: Collection[int], reads_content: bool) -> bool:
    """Whether the number of rows per example was not verified, or may differ between examples."""
    rows = first_axis_rows(layer, recording)
    return not rows <= set(verified) or (reads_content and max(rows, default=0) > 1)
