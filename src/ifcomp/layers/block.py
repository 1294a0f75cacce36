"""The canonical form: what every layer becomes, and all that the rest of the library sees of it.

Two forms are enough. A *Kronecker* block has inputs ``a [B, G, J, T]`` and output gradients ``b [B, G, O, T]`` with
groups G and shared positions T, and its per-example gradient is the matrix ``sum_t b_t a_t^T`` of shape [G, O, J]; a
bias is a last input that is always 1. A *diagonal* block has its per-example gradient as a plain vector [P].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from ifcomp.compiled import Windows
from ifcomp.layers.winograd import QuickBackward


class Layout(Enum):
    """Where the batch is among a tensor's leading axes (all axes before the layer's own features)."""

    FIRST = "first"  #: [B, ..., features], or [B*T, features] with the positions of one example together
    SECOND = "second"  #: [T, B, ..., features]
    FOLDED_SECOND = "folded second"  #: [T*B, features], the examples of one position together
    SHARED = "shared"  #: [1, ..., features]: one row for the whole batch, repeated for each example when recorded

    def fits(self, shape: torch.Size, feature_axes: int, batch: int, later: bool = False) -> bool:
        """Whether a tensor of this shape can be read with this layout; ``later``: once shared rows are repeated."""
        leading = shape[: len(shape) - feature_axes]
        if not leading:
            return False
        if self is Layout.SECOND:
            return len(leading) > 1 and leading[1] == batch
        if self is Layout.SHARED:
            return leading[0] == (batch if later else 1)
        return leading[0] % batch == 0

    def by_example(self, tensor: Tensor, feature_axes: int, batch: int) -> Tensor:
        """Rearrange ``[leading..., features...]`` to ``[B, R, features...]``, R rows an example."""
        if self is Layout.SECOND:
            tensor = tensor.transpose(0, 1)
        elif self is Layout.FOLDED_SECOND:
            tensor = tensor.unflatten(0, (-1, batch)).transpose(0, 1)
        features = tensor.shape[tensor.dim() - feature_axes :]
        return tensor.reshape(batch, -1, *features)


@dataclass(frozen=True)
class Use:
    """One call of a layer while the model was recorded.

    Attributes:
        value: The layer's input, detached.
        edge: The place in the autograd graph where the gradient of the layer's output is read.
        part: Which slice of the output's last axis belongs to the block; None for all of it.
        shape: The shape of the output.
        version: The input's version counter, to notice later in-place changes.
    """

    value: Tensor
    edge: GradientEdge
    part: slice | None
    shape: torch.Size
    version: int


@dataclass(frozen=True)
class Block(ABC):
    """A set of parameters whose curvature is treated together.

    Attributes:
        name: Unique name, that of the module (or parameter) it comes from.
        kind: What it is in words, for coverage tables.
        parameters: Full names of the model's parameters, in the order of the gradient.
        size: How many parameters the block covers.
    """

    name: str
    kind: str
    parameters: tuple[str, ...]
    size: int


@dataclass(frozen=True)
class RecordedBlock(Block):
    """A block that is read off a module's inputs and output gradients."""

    @property
    def reads_input(self) -> bool:
        """Whether the gradient depends on the layer's input; that of a bias alone does not."""
        return True

    @abstractmethod
    def input_axes(self, value: Tensor) -> int:
        """How many trailing axes of an input belong to the layer rather than to batch and positions."""

    def output_axes(self, gradient: Tensor) -> int:
        """The same for an output; most layers keep the number."""
        return self.input_axes(gradient)


@dataclass(frozen=True)
class KroneckerBlock(RecordedBlock):
    """Per-example gradient ``sum_t b_t a_t^T``, shape [G, O, J].

    Attributes:
        groups: G, independent blocks of equal shape.
        rows: O, outputs per group.
        channels: Side of the input covariance: J, or the input channels per group when offsets are shared (SUA).
        offsets: Kernel offsets that share one input basis; 1 unless SUA.
        has_weight: Whether the weight is among the parameters.
        has_bias: Whether the bias is among them; it is then the last input.
        first_row: Where the block begins on the first axis of packed parameters.
    """

    groups: int
    rows: int
    channels: int
    offsets: int
    has_weight: bool
    has_bias: bool
    first_row: int

    @property
    def reads_input(self) -> bool:
        return self.has_weight

    @property
    def columns(self) -> int:
        """J, inputs per group, with the bias."""
        return self.channels if self.offsets == 1 else self.channels * self.offsets + self.has_bias

    @property
    def shared_offsets(self) -> bool:
        """Whether the input covariance is over channels only (SUA)."""
        return self.offsets > 1

    @abstractmethod
    def positions(self, rows: Tensor) -> Tensor:
        """Layer inputs [N, features...] as columns without bias: a view [N, G, *J, *T], with one axis for J and one for
        T, or for the channels and each axis of a kernel, and for each axis of the positions.
        """

    @property
    def has_windows(self) -> bool:
        """Whether `windows` says what positions see, and gradients are best formed from that."""
        return False

    def windows(self, values: Tensor) -> Windows:
        """Layer inputs [B, R, features...] as images of B * G examples, and what all positions see of them."""
        raise NotImplementedError

    @abstractmethod
    def outputs(self, rows: Tensor) -> Tensor:
        """Output gradients [N, features...] to [N, G, O, T]."""

    def gradient_matrix(self, gradients: dict[str, Tensor]) -> Tensor:
        """Gradients of the block's parameters as one matrix [G, O, J]; of packed ones only the block's own rows."""
        own = slice(self.first_row, self.first_row + self.groups * self.rows)
        parts = [gradients[name] for name in self.parameters]
        parts = [part if len(part) == self.groups * self.rows else part[own] for part in parts]
        return torch.cat([part.reshape(self.groups, self.rows, -1) for part in parts], -1)

    def channel_rows(self, rows: Tensor) -> Tensor:
        """Layer inputs [N, G*C, ...] as the channels of every input position, [N, G, C, S]: what SUA rotates."""
        return rows.reshape(len(rows), self.groups, self.channels, -1)

    def rotated_windows(self, rows: Tensor, basis: Tensor) -> Tensor:
        """Layer inputs [N, features...] with channels in their basis [G, C, C], as what each position sees of them:
        a view [N, G, *positions, *kernel, C]. Only for shared offsets.
        """
        raise NotImplementedError

    def inside(self, sizes: torch.Size) -> Tensor:
        """Whether a position's input at an offset is none of the zeros around it, [positions, offsets].

        Only for shared offsets; ``sizes`` are those of the input without channels.
        """
        raise NotImplementedError

    def by_offset(self, values: Tensor) -> Tensor:
        """Entries [..., J] of gradients in the order of the weight, as those of rotated gradients are ordered.

        The same unless offsets are shared: then offsets are slowest rather than channels. A bias is last in both.
        """
        return self._reordered(values, (self.channels, self.offsets))

    def by_channel(self, values: Tensor) -> Tensor:
        """The way back from `by_offset`."""
        return self._reordered(values, (self.offsets, self.channels))

    def _reordered(self, values: Tensor, sizes: tuple[int, int]) -> Tensor:
        if not self.shared_offsets:
            return values
        windows, bias = values.split([self.channels * self.offsets, int(self.has_bias)], -1)
        return torch.cat([windows.unflatten(-1, sizes).transpose(-1, -2).flatten(-2), bias], -1)


@dataclass(frozen=True)
class IndexedBlock(RecordedBlock):
    """An embedding: a Kronecker block [1, D, V] whose inputs are one-hot, so that their covariance is diagonal already.

    Attributes:
        entries: V, rows of the table.
        width: D, the size of an embedding.
        padding: The index that gets no gradient, or None.
    """

    entries: int
    width: int
    padding: int | None


@dataclass(frozen=True)
class NormBlock(RecordedBlock):
    """Scale and shift after a normalisation: gradient ``sum_t b_t * z_t`` and ``sum_t b_t``, z the normalised input."""

    has_weight: bool
    has_bias: bool

    @property
    def reads_input(self) -> bool:
        return self.has_weight

    @abstractmethod
    def normalised(self, value: Tensor) -> Tensor:
        """The input before scale and shift, in the shape of the input."""

    @abstractmethod
    def reduce(self, rows: Tensor, factor: Tensor, fused: bool) -> tuple[Tensor, Tensor]:
        """Sums of [B, R, features...] times a factor, and alone, over all that shares a parameter: [B, parameters].

        Args:
            rows: Output gradients.
            factor: Normalised inputs.
            fused: Whether to take an operation that gives both at once, if there is one.
        """


class Emit(Protocol):
    """How a recording forward reports one affine map: ``output = emit(parts, value, output)``.

    ``parts`` maps names of blocks to their slice of the output's last axis (None: all of it). The output that comes
    back must be used from there on.
    """

    def __call__(self, parts: dict[str, slice | None], value: Tensor, output: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Site:
    """A module that is watched while the model runs, and the blocks that it yields.

    Attributes:
        module: The module.
        blocks: Its blocks.
        forward: A stand-in for the module's ``forward`` that reports inner maps through `Emit`, for modules whose
            parameters are used inside (attention). None: the module's own input and output are what is needed.
        quick: A quicker backward than that of PyTorch, if there is one.
    """

    module: nn.Module
    blocks: tuple[RecordedBlock, ...]
    forward: Callable[..., object] | None = None
    quick: QuickBackward | None = None


@dataclass(frozen=True)
class OtherBlock(Block):
    """Any other trainable parameter: diagonal, from per-example gradients."""
