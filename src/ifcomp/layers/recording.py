"""One recorded forward pass: canonical inputs of every layer, and output gradients from ordinary backward passes.

The forward pass runs in eval mode, so examples are independent: one backward of the batch gives the output gradients
of every example at once. No weight gradient is formed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ifcomp.blocks.block import Block
from ifcomp.errors import ModelError, NonFiniteError
from ifcomp.layers.layer import Layer
from ifcomp.layers.layout import Layout
from ifcomp.layers.scattered import Owners, find_owners
from ifcomp.precision import as_double, as_type_of

#: The largest entry of a cotangent is scaled to this power of two for a backward in float16, whose range is 2^-24 to
#: 2^16.
_HALF_EXPONENT = 8

#: Per-example gradients [C, B, P] of parameters by name, for cotangents [C, B, K].
OtherGradients = Callable[[Sequence[str], Tensor], Mapping[str, Tensor]]


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer.

    Attributes:
        value: The input, detached.
        edge: The autograd edge of the output. It is taken at the time of the call, so later in-place operations on the
            output do not matter.
        part: Slice of the output's last axis that belongs to the block; None for all of it.
        shape: Shape of that part of the output.
        version: Version counter of the input, to detect later in-place changes.
        arguments: Weight and bias as used, for a layer that is recorded by function.
    """

    value: Tensor
    edge: GradientEdge
    part: slice | None
    shape: torch.Size
    version: int
    arguments: Sequence[Tensor | None] = ()


@dataclass(frozen=True)
class CallGrads:
    """Output gradients of layer calls for one cotangent.

    Attributes:
        by_edge: Gradient at every edge; None if the logits do not depend on it.
        scales: Factors of the cotangents in float16, [B].
    """

    by_edge: Mapping[tuple[int, int], Tensor | None]
    scales: Tensor | None


class Recording:
    """Layer calls of one forward pass."""

    def __init__(
        self,
        batch_size: int,
        layers: Sequence[Layer],
        layouts: Mapping[str, Layout],
        dtype: torch.dtype,
        others: Sequence[Block] = (),
        other_gradients: OtherGradients = lambda names, cotangents: {},
    ) -> None:
        """Start without calls; the recorder adds them.

        Args:
            batch_size: B.
            layers: Layers that are recorded.
            layouts: Batch axis of every layer.
            dtype: Precision of canonical tensors.
            others: Blocks of parameters without a layer rule.
            other_gradients: Computes the gradients of those.
        """
        self.batch_size, self.layouts, self.dtype = batch_size, layouts, dtype
        self.logits: Tensor = torch.empty(0)
        self.penultimate: Tensor | None = None
        self.backward_dtype = dtype
        self.calls: dict[str, list[LayerCall]] = {}
        self.uses: Mapping[int, int] = {}
        self._layers = {layer.name: layer for layer in layers}
        self.others, self._other_gradients = tuple(others), other_gradients
        self._inputs: dict[str, Any] = {}
        self._known_owners: dict[tuple[int, int], Owners | None] = {}

    def add(
        self,
        name: str,
        value: Tensor,
        output: Tensor,
        part: slice | None = None,
        arguments: Sequence[Tensor | None] = (),
    ) -> None:
        """Record one call of a layer."""
        shape = output.shape if part is None else output[..., part].shape
        call = LayerCall(value.detach(), get_gradient_edge(output), part, shape, value._version, arguments)
        self.calls.setdefault(name, []).append(call)

    def set_layout(self, layer: Layer, layout: Layout) -> None:
        """Use another layout for a layer."""
        self.layouts = {**self.layouts, layer.name: layout}
        self._inputs.pop(layer.name, None)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Blocks that were used in this forward pass."""
        return (*(self._layers[name].block for name in self._layers if name in self.calls), *self.others)

    def inputs(self, block: Block) -> Any:
        """Canonical inputs of a block; computed once."""
        name = block.name
        if name not in self._layers or name not in self.calls:
            return None
        if name not in self._inputs:
            layer = self._layers[name]
            sizes = [self._output_size(layer, call) for call in self.calls[name]]
            self._inputs[name] = layer.inputs(self.values(layer), sizes, self.dtype)
        return self._inputs[name]

    def values(self, layer: Layer) -> list[Tensor]:
        """Inputs [B, R, features...] of every call of a layer."""
        calls = self.calls[layer.name]
        return [self._by_example(layer, call, call.value, layer.input_axes(call.value)) for call in calls]

    def used_rows(self, layer: Layer) -> list[Tensor | None]:
        """Rows of `values` that belong to an example, bool [B, R], for every call; None if all do."""
        is_scattered = self.layouts[layer.name] is Layout.SCATTERED
        return [self._owners(call).is_used if is_scattered else None for call in self.calls[layer.name]]

    def output_grads(self, cotangents: Tensor, blocks: Iterable[Block]) -> dict[str, Tensor]:
        """Canonical output gradients [B, C, ...] of every block, from one backward per cotangent.

        Args:
            cotangents: Vectors over the logits, [C, B, K].
            blocks: Blocks to compute.
        """
        names = {block.name for block in blocks}
        layers = [layer for name, layer in self._layers.items() if name in names and name in self.calls]
        stacked: dict[str, Tensor] = {}
        scaled, scales = scale_for_half(cotangents, self.backward_dtype)
        vectors = as_type_of(scaled, self.logits)
        divisors = None if scales is None else scales.to(self.dtype).to(self.logits.device)
        for index, vector in enumerate(vectors):
            grads = self._backward(vector, layers, None if divisors is None else divisors[index])
            for layer in layers:
                grad = self.arrange(layer, grads)
                if len(cotangents) == 1:
                    stacked[layer.name] = grad.unsqueeze(1)
                    continue
                if layer.name not in stacked:
                    stacked[layer.name] = grad.new_empty(self.batch_size, len(cotangents), *grad.shape[1:])
                stacked[layer.name][:, index] = grad
        others = [block.name for block in self.others if block.name in names]
        if others:
            found = self._other_gradients(others, cotangents)
            stacked |= {name: grad.transpose(0, 1) for name, grad in found.items()}
        return stacked

    def canonical(self, cotangents: Tensor, blocks: Iterable[Block]) -> Iterator[tuple[Block, Any, Tensor]]:
        """Each block with canonical inputs and output gradients [B, C, ...]; the gradients are freed block by block."""
        blocks = list(blocks)
        output_grads = self.output_grads(cotangents, blocks)
        for block in blocks:
            yield block, self.inputs(block), output_grads.pop(block.name)

    def backward(self, cotangent: Tensor, layers: Sequence[Layer]) -> CallGrads:
        """Output gradients of every call of the layers for one cotangent [B, K]; one backward pass."""
        scaled, scales = scale_for_half(cotangent, self.backward_dtype)
        divisors = None if scales is None else scales.to(self.dtype).to(self.logits.device)
        return self._backward(as_type_of(scaled, self.logits), layers, divisors)

    def _backward(self, vector: Tensor, layers: Sequence[Layer], scales: Tensor | None) -> CallGrads:
        """Same as `backward`, for a cotangent in the dtype of the logits that is multiplied by the scales."""
        if not layers:
            return CallGrads({}, None)
        edges = {_key(call.edge): call.edge for layer in layers for call in self.calls[layer.name]}
        found = self.gradients(list(edges.values()), vector)
        if scales is not None:
            check_half(found)
        return CallGrads(dict(zip(edges, found, strict=True)), scales)

    def gradients(
        self, inputs: Sequence[Tensor] | Sequence[GradientEdge], cotangent: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Autograd's gradients of ``sum(cotangent * logits)``; None where the logits do not depend on an input."""
        return torch.autograd.grad(self.logits, inputs, cotangent, retain_graph=True, allow_unused=True)

    def arrange(self, layer: Layer, grads: CallGrads) -> Tensor:
        """Canonical output gradients [B, ...] of a layer in its layout."""
        parts = []
        for call in self.calls[layer.name]:
            grad = self._call_grad(call, grads)
            rows = self._by_example(layer, call, grad, layer.output_axes(grad)).to(self.dtype)
            if grads.scales is not None:
                rows = rows / grads.scales.view(-1, *[1] * (rows.dim() - 1))
            parts.append(rows)
        return layer.output_grads(parts, self.inputs(layer.block))

    def _call_grad(self, call: LayerCall, grads: CallGrads) -> Tensor:
        """The output gradient of one call; zeros if the logits do not depend on it."""
        grad = grads.by_edge[_key(call.edge)]
        if grad is None:
            return self.logits.new_zeros(call.shape)
        return grad if call.part is None else grad[..., call.part]

    def _by_example(self, layer: Layer, call: LayerCall, tensor: Tensor, feature_axes: int) -> Tensor:
        """An input or output gradient of one call by example, [B, R, features...]."""
        layout = self.layouts[layer.name]
        if layout is Layout.SCATTERED:
            return self._owners(call).by_example(tensor, feature_axes)
        return layout.by_example(tensor, feature_axes, self.batch_size)

    def _output_size(self, layer: Layer, call: LayerCall) -> int:
        """Number of output elements per example."""
        if self.layouts[layer.name] is not Layout.SCATTERED:
            return call.shape.numel() // self.batch_size
        axes = layer.output_axes(torch.empty(call.shape, device="meta"))
        return self._owners(call).rows * call.shape[len(call.shape) - axes :].numel()

    def _owners(self, call: LayerCall) -> Owners:
        """The example of each row of a scattered call.

        Raises:
            ModelError: If a row belongs to several examples.
        """
        if _key(call.edge) not in self._known_owners:
            scattered = {name for name, layout in self.layouts.items() if layout is Layout.SCATTERED}
            self._find_owners([layer for name, layer in self._layers.items() if name in scattered])
        owners_of_call = self._known_owners[_key(call.edge)]
        if owners_of_call is None:
            raise ModelError(
                "A row of the input of a layer influences the logits of several examples, so its gradient cannot be "
                f"assigned to an example. The row has shape {list(call.value.shape[1:])}. Leave the layer out with "
                "layers= or requires_grad_(False)."
            )
        return owners_of_call

    def _find_owners(self, layers: Sequence[Layer]) -> None:
        """Determine the example of each row, for all calls of the layers."""
        called = [layer for layer in layers if layer.name in self.calls]
        calls = [(layer, call) for layer in called for call in self.calls[layer.name]]
        cotangent = random_cotangent(self.logits)

        def row_grads(factors: Tensor) -> list[Tensor]:
            grads = self._backward(cotangent * as_type_of(factors, cotangent).unsqueeze(1), called, None)
            found = [(layer, self._call_grad(call, grads)) for layer, call in calls]
            return [_rows(grad, layer.output_axes(grad)) for layer, grad in found]

        owners = find_owners(row_grads, self.batch_size, self.logits.device)
        self._known_owners |= {_key(call.edge): found for (_, call), found in zip(calls, owners, strict=True)}

    def misarranged(self, layers: Sequence[Layer]) -> list[Layer]:
        """Layers whose layout assigns a row to another example than the one whose logits it influences."""
        self._find_owners(layers)
        return [layer for layer in layers if not all(self._is_arranged(layer, call) for call in self.calls[layer.name])]

    def _is_arranged(self, layer: Layer, call: LayerCall) -> bool:
        owners = self._known_owners[_key(call.edge)]
        leading = call.shape[: len(call.shape) - layer.output_axes(torch.empty(call.shape, device="meta"))]
        rows = torch.arange(leading.numel(), device=self.logits.device).view(leading)
        arranged = self.layouts[layer.name].by_example(rows, 0, self.batch_size)  # [B, R]
        if owners is None:
            return False
        examples = owners.examples[arranged]
        expected = torch.arange(self.batch_size, device=examples.device).unsqueeze(1)
        return bool(((examples == expected) | (examples < 0)).all())

    def check_unchanged(self, layer: Layer) -> None:
        """Raise ModelError if an input was changed in place after the layer used it."""
        calls = self.calls.get(layer.name, [])
        if layer.has_weight and any(call.value._version != call.version for call in calls):
            raise ModelError(
                f"The input of layer '{layer.name}' is changed in place after the layer used it, so its gradient "
                "cannot be formed. Use the out-of-place operation there."
            )


def random_cotangent(logits: Tensor) -> Tensor:
    """A fixed random vector over the logits of every example, [B, K]."""
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randn(logits.shape, generator=generator, device="cpu").to(logits)


def scale_for_half(cotangents: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Scaled cotangents [..., B, K] for a backward in float16, and their scales [..., B], which are powers of two.

    The residuals ``p - e_y`` of a confident model are below the range of float16. Examples are independent, so each has
    a separate scale. For other precisions the cotangents are returned unchanged, without scales.
    """
    if dtype != torch.float16:
        return cotangents, None
    double = as_double(cotangents)
    exponent = torch.frexp(double.abs().amax(-1)).exponent
    scales = torch.exp2((_HALF_EXPONENT - exponent).double())
    return double * scales.unsqueeze(-1), scales


def check_half(gradients: Iterable[Tensor | None]) -> None:
    """Raise NonFiniteError if a backward in float16 overflowed."""
    finite = [gradient.isfinite().all() for gradient in gradients if gradient is not None]
    if finite and not torch.stack(finite).all():
        raise NonFiniteError(
            "Gradients overflow in float16, whose largest number is 65,504. Use model.float() or model.bfloat16(), and "
            "inputs of the same type."
        )


def _rows(grad: Tensor, feature_axes: int) -> Tensor:
    """The rows of ``[leading..., features...]``, [N, features]."""
    return grad.reshape(-1, max(1, grad.shape[grad.dim() - feature_axes :].numel()))


def _key(edge: GradientEdge) -> tuple[int, int]:
    return id(edge.node), edge.output_nr
