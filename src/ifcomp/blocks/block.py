"""The interface of a block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor


class FactorShapes(NamedTuple):
    """Shapes of the factors of a block; None where the block has no such factor.

    Attributes:
        second_moments: Lambda.
        input_basis: Q_A, also the shape of the input covariance.
        output_basis: Q_S, also the shape of the output covariance.
    """

    second_moments: tuple[int, ...]
    input_basis: tuple[int, ...] | None
    output_basis: tuple[int, ...] | None


@dataclass(frozen=True, eq=False)
class Basis:
    """Eigenvectors of the covariances of a block, in columns.

    Attributes:
        inputs: Q_A [G, side, side]; None is the identity (one-hot inputs).
        outputs: Q_S [G, O, O]; None is the identity (more outputs than `ifcomp.layers.registry.MAX_OUTPUT_BASIS`).
    """

    inputs: Tensor | None
    outputs: Tensor | None


class Form(Protocol):
    """The inverse curvature of a block, bound to the inputs of one microbatch.

    Output gradients have shape [B, C, ...] with C cotangents per example. Results are multiplied by
    `ifcomp.influence.weights.Weights.scale` afterwards.
    """

    def quadratic(self, output_grads: Tensor) -> Tensor:
        """``g^T W g`` for every example and cotangent, [B, C]."""
        ...

    def bilinear(self, output_grads: Tensor) -> Tensor:
        """``g_c^T W g_d`` for every example and pair of cotangents, [B, C, C]."""
        ...


@dataclass(frozen=True)
class Block(ABC):
    """A set of parameters whose curvature is treated together.

    Canonical inputs and output gradients are those of one block kind; code outside `ifcomp.blocks` passes them on.

    Attributes:
        name: Name of the module or parameter. It is unique in a model.
        kind: Kind of the module, for coverage tables.
        parameters: Full names of the model's parameters, in the order of the gradient.
        size: Number of parameters.
    """

    name: str
    kind: str
    parameters: tuple[str, ...]
    size: int

    @property
    @abstractmethod
    def treatment(self) -> str:
        """Representation of the curvature, for coverage tables."""

    @property
    @abstractmethod
    def factor_shapes(self) -> FactorShapes:
        """Shapes of second moments and eigenbases."""

    @property
    def has_eigenbasis(self) -> bool:
        """Whether the first pass over the training data accumulates covariances of this block."""
        return any(shape is not None for shape in self.factor_shapes[1:])

    def limit_output_basis(self, maximum: int) -> Block:
        """Return the block with the identity as output basis if it has more than ``maximum`` outputs."""
        return self

    def plan(self, inputs: Any, chunk_size: int, cotangents: int = 1, condition: float = float("inf")) -> Any:
        """Choose how gradients are rotated and which kernel evaluates the form. Blocks without a choice return None.

        Args:
            inputs: Canonical inputs of a microbatch.
            chunk_size: Number of cotangents per call.
            cotangents: Number of cotangents in all calls.
            condition: Largest inverse curvature times the mean curvature.
        """
        return None

    def active_positions(self, output_grads: Tensor) -> Tensor | None:
        """Whether the output gradient of a position is not zero, [B, G, T]; None without an input basis.

        Inactive positions, such as padded tokens, contribute nothing to gradients.

        Args:
            output_grads: Output gradients of cotangents from `ifcomp.curvature.labels.directions_and_sizes`, which do
                not underflow.
        """
        return None

    def input_covariance(self, inputs: Any, active: Tensor | None) -> Tensor | None:
        """``sum a a^T`` over examples and active positions, [G, side, side]; None without an input basis.

        Args:
            inputs: Canonical inputs.
            active: Result of `active_positions`.
        """
        return None

    def output_covariance(self, output_grads: Tensor) -> Tensor | None:
        """``sum b b^T`` over examples, cotangents and positions, [G, O, O]; None without an output basis."""
        return None

    @abstractmethod
    def add_second_moments(
        self, total: Tensor, inputs: Any, output_grads: Tensor, basis: Basis | None, plan: Any
    ) -> None:
        """Add the squared gradients in the eigenbasis, summed over examples and cotangents, to ``total``."""

    @abstractmethod
    def form(self, inputs: Any, basis: Basis | None, weights: Tensor, plan: Any) -> Form:
        """Bind the inverse curvature to the inputs of a microbatch.

        Args:
            inputs: Canonical inputs.
            basis: Eigenbasis.
            weights: W, the inverse curvature in the eigenbasis, in the shape of the second moments.
            plan: Result of `plan`.
        """

    def label_forms(
        self, inputs: Any, basis: Basis | None, weights: Tensor, residual: Tensor, top: Tensor
    ) -> Tensor | None:
        """``g^T W g`` of the block for the residual ``p - e_y`` of every label y, [B, K], without a backward pass.

        None unless the block has one output per label, at one position. The outputs are taken to be the logits.

        Args:
            inputs: Canonical inputs.
            basis: Eigenbasis.
            weights: W, as for `form`.
            residual: ``p - e_top`` in the dtype of the weights, [B, K].
            top: The most probable label, [B].
        """
        return None

    @abstractmethod
    def gradients(self, inputs: Any, output_grads: Tensor, basis: Basis | None = None) -> Tensor:
        """Per-example gradients in the eigenbasis, or in parameter space without one, [B, C, P].

        This forms every gradient. Influence of an example on itself does not need it.
        """


@dataclass(frozen=True)
class VectorForm:
    """A form of gradients that are small enough to be written out.

    Attributes:
        whiten: Maps output gradients [B, C, ...] to ``W^(1/2) g``, [B, C, N].
    """

    whiten: Callable[[Tensor], Tensor]

    def quadratic(self, output_grads: Tensor) -> Tensor:
        """``g^T W g``, [B, C]."""
        return self.whiten(output_grads).square_().sum(2)

    def bilinear(self, output_grads: Tensor) -> Tensor:
        """``g_c^T W g_d``, [B, C, C]."""
        whitened = self.whiten(output_grads)
        return whitened @ whitened.transpose(1, 2)
