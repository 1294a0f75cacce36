"""Layers: how the calls of a module become the canonical tensors of a block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from ifcomp.blocks.block import Block
from ifcomp.blocks.kronecker import KroneckerBlock
from ifcomp.blocks.kronecker_inputs import KroneckerInputs, Patches

#: Positions per axis of the pooled inputs of a convolution.
FEATURE_GRID = 4


@dataclass(frozen=True)
class Layer(ABC):
    """One block of a module, read from the module's inputs and output gradients.

    Values and gradients come as one tensor [B, R, features...] per call. R rows per example are the flattened leading
    axes other than the batch.

    Attributes:
        block: The block.
        has_weight: Whether the gradient depends on the input. The gradient of a bias alone does not.
        arguments: For a layer that is recorded by function, the arguments of the function that form the block:
            ``weight``, ``bias`` or both. They may be computed from the parameters of the block.
    """

    block: Block
    has_weight: bool
    arguments: tuple[str, ...] = field(default=(), kw_only=True)

    @property
    def name(self) -> str:
        """The name of the block."""
        return self.block.name

    @abstractmethod
    def input_axes(self, value: Tensor) -> int:
        """Number of trailing axes of an input that belong to the layer rather than to batch and positions."""

    def output_axes(self, grad: Tensor) -> int:
        """The same for an output."""
        return self.input_axes(grad)

    @abstractmethod
    def inputs(self, values: Sequence[Tensor], output_sizes: Sequence[int], dtype: torch.dtype) -> Any:
        """Canonical inputs of the block.

        Args:
            values: Inputs [B, R, features...] of every call.
            output_sizes: Number of output elements per example of every call.
            dtype: Precision of canonical tensors.
        """

    @abstractmethod
    def output_grads(self, grads: Sequence[Tensor], inputs: Any) -> Tensor:
        """Canonical output gradients [B, ...] of one cotangent.

        Args:
            grads: Output gradients [B, R, features...] of every call.
            inputs: Canonical inputs.
        """

    #: Whether `features` counts tokens.
    counts_tokens: ClassVar[bool] = False

    def features(self, value: Tensor, kept: Tensor | None) -> Tensor | None:
        """Summary [B, D] of the inputs [B, R, features...] of one call; None if the layer has no weight matrix.

        Args:
            value: The inputs.
            kept: Positions that are not padding, bool [B, R]; None for all.
        """
        return None

    def kept_positions(self, value: Tensor) -> Tensor | None:
        """Positions of inputs [B, R, ...] that are not padding, [B, R]; None if the layer cannot determine them."""
        return None

    @property
    def function(self) -> Callable[..., Tensor] | None:
        """The function whose calls `ifcomp.layers.functions` reports; None if there is none."""
        return None

    def by_function(self) -> Layer | None:
        """The layer for inputs that `ifcomp.layers.functions` reports; None if it cannot be recorded by function."""
        return None

    def without_bias(self) -> Layer:
        """The layer of the weight alone, if the block can be split."""
        return self

    def argument_gradient(self, argument_grads: Sequence[Tensor]) -> Tensor:
        """Autograd's gradients of the function's arguments in the order of `Block.gradients`, [P]."""
        plain = replace(self, block=replace(self.block, parameters=self.arguments))
        return plain.gradient(dict(zip(self.arguments, argument_grads, strict=True)))

    def gradient(self, parameter_grads: Mapping[str, Tensor]) -> Tensor:
        """Autograd's gradients of the block's parameters in the order of `Block.gradients`, [P]."""
        return torch.cat([parameter_grads[name].flatten() for name in self.block.parameters])


@dataclass(frozen=True)
class KroneckerLayer(Layer):
    """A layer whose gradient is ``sum_t b_t a_t^T``."""

    block: KroneckerBlock

    @abstractmethod
    def patches(self, value: Tensor) -> Patches:
        """Inputs [B, R, features...] of one call as channels that can be unfolded."""

    @abstractmethod
    def outputs(self, rows: Tensor) -> Tensor:
        """Output gradients [N, features...] of one call as [N, G, O, T]."""

    def features(self, value: Tensor, kept: Tensor | None) -> Tensor | None:
        return mean_rows(value.flatten(2), kept) if self.has_weight else None

    def inputs(self, values: Sequence[Tensor], output_sizes: Sequence[int], dtype: torch.dtype) -> KroneckerInputs:
        shape = self.block.shape
        positions = sum(output_sizes) // (shape.groups * shape.out_features)
        calls = [self.patches(value) for value in values] if self.has_weight else []
        return KroneckerInputs(calls, shape, len(values[0]), positions, dtype, values[0].device)

    def output_grads(self, grads: Sequence[Tensor], inputs: KroneckerInputs) -> Tensor:
        parts = []
        for grad in grads:
            rows = self.outputs(grad.flatten(0, 1)).unflatten(0, grad.shape[:2])  # [B, R, G, O, T]
            parts.append(rows.squeeze(1) if grad.shape[1] == 1 else rows.permute(0, 2, 3, 1, 4).flatten(3))
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def gradient(self, parameter_grads: Mapping[str, Tensor]) -> Tensor:
        rows = self.block.shape.groups * self.block.shape.out_features
        parts = [parameter_grads[name].reshape(rows, -1) for name in self.block.parameters]
        return torch.cat(parts, 1).flatten()


def mean_rows(rows: Tensor, kept: Tensor | None) -> Tensor:
    """Mean over the kept rows of [B, R, D]; over all rows of an example without a kept one."""
    if kept is None or kept.shape != rows.shape[:2]:
        return rows.mean(1)
    weights = kept | ~kept.any(1, keepdim=True)
    return rows.masked_fill(~weights.unsqueeze(2), 0.0).sum(1) / weights.sum(1, keepdim=True)


def pool_rows(value: Tensor, kept: Tensor | None) -> Tensor:
    """Average channels [B, R, C, *S] over the kept rows and a grid of `FEATURE_GRID` positions per axis, [B, D]."""
    return pool_positions(mean_rows(value.flatten(2), kept).unflatten(1, value.shape[2:]), FEATURE_GRID)


def pool_positions(channels: Tensor, grid: int) -> Tensor:
    """Average channels [B, C, *S] over a grid of at most ``grid`` positions per axis, [B, D]."""
    sizes = [min(grid, size) for size in channels.shape[2:]]
    pool: Callable[..., Tensor] = getattr(torch.nn.functional, f"adaptive_avg_pool{len(sizes)}d")
    return pool(channels, sizes).flatten(1)


class Emit(Protocol):
    """Reports one affine map of a recording forward: ``output = emit(parts, value, output)``.

    ``parts`` maps names of blocks to their slice of the output's last axis (None: all of it). The forward pass
    continues with the returned output.
    """

    def __call__(self, parts: dict[str, slice | None], value: Tensor, output: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class TrackedModule:
    """A module that the recorder hooks, with its layers.

    Attributes:
        module: The module.
        layers: Its layers.
        forward: A replacement of the module's ``forward`` that reports inner maps through `Emit`, for modules that use
            their parameters inside (attention). None: the module's input and output suffice.
        always_replaced: Whether ``forward`` replaces that of the module even if no layer of it is recorded.
        by_function: Whether the layer is recorded by the functions that use its parameters.
    """

    module: nn.Module
    layers: tuple[Layer, ...]
    forward: Callable[..., object] | None = None
    always_replaced: bool = False
    by_function: bool = False

    def restrict(self, layers: Iterable[Layer]) -> TrackedModule | None:
        """The same module with some of its layers; None if nothing is left to track."""
        kept = tuple(layers)
        return replace(self, layers=kept) if kept or self.always_replaced else None
