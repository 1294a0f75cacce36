"""Reference gradients of blocks, computed by autograd."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ifcomp.layers.layer import Layer
from ifcomp.layers.recording import Recording


@dataclass(frozen=True)
class Expected:
    """Autograd's gradients for one cotangent.

    Attributes:
        parameters: Gradient of every parameter.
        arguments: For every layer that is recorded by function, the gradients of the tensors used as each argument.
    """

    parameters: Mapping[str, Tensor]
    arguments: Mapping[str, Sequence[Sequence[Tensor]]]

    def of_layer(self, layer: Layer) -> Tensor:
        """The gradient of a layer in the order of `Block.gradients`, [P]."""
        arguments = self.arguments.get(layer.name)
        if arguments is None:
            return layer.gradient(self.parameters)
        return layer.argument_gradient([torch.stack(list(grads)).sum(0) for grads in arguments])


def expected_gradients(
    recording: Recording, layers: Sequence[Layer], parameters: Mapping[str, Tensor], cotangent: Tensor
) -> Expected:
    """Compute the gradients of parameters, and of the arguments of functions, in one backward pass.

    Args:
        recording: A recorded batch.
        layers: Layers to compare.
        parameters: Parameters by name.
        cotangent: [B, K].
    """
    used = {layer.name: used_arguments(recording, layer) for layer in layers if is_by_function(recording, layer)}
    tensors = [
        *parameters.values(),
        *(value for arguments in used.values() for values in arguments for value in values),
    ]
    if not tensors:
        return Expected({}, {})
    found = recording.gradients(tensors, cotangent)
    filled = iter(
        (torch.zeros_like(value) if grad is None else grad).detach() for value, grad in zip(tensors, found, strict=True)
    )
    of_parameters = {name: next(filled) for name in parameters}
    return Expected(of_parameters, {name: [[next(filled) for _ in values] for values in used[name]] for name in used})


def is_by_function(recording: Recording, layer: Layer) -> bool:
    """Whether all calls of a layer have the arguments of its block."""
    return bool(layer.arguments) and layer.name in recording.calls and all(used_arguments(recording, layer))


def used_arguments(recording: Recording, layer: Layer) -> list[list[Tensor]]:
    """The distinct tensors that were used as each argument of the block; empty if a call lacks the argument."""
    found = []
    for position in (("weight", "bias").index(name) for name in layer.arguments):
        values = [call.arguments[position] for call in recording.calls[layer.name]]
        present = [value for value in values if value is not None and value.requires_grad]
        found.append(list({id(value): value for value in present}.values()) if len(present) == len(values) else [])
    return found


def explains_parameters(
    recording: Recording, layer: Layer, expected: Expected, parameters: Mapping[str, Tensor], tolerance: float
) -> bool:
    """Whether the parameters of a block influence the logits through the recorded arguments only.

    Args:
        recording: A recorded batch.
        layer: A layer that is recorded by function.
        expected: Gradients of parameters and arguments.
        parameters: Parameters by name.
        tolerance: Largest relative error.
    """
    if layer.name not in expected.arguments:
        return False
    outputs = [value for values in used_arguments(recording, layer) for value in values]
    grads = [grad for values in expected.arguments[layer.name] for grad in values]
    inputs = [parameters[name] for name in layer.block.parameters]
    through = torch.autograd.grad(outputs, inputs, grads, retain_graph=True, allow_unused=True)
    for name, grad in zip(layer.block.parameters, through, strict=True):
        truth = expected.parameters[name]
        error = truth if grad is None else grad - truth
        if error.norm() > tolerance * truth.norm():
            return False
    return True
