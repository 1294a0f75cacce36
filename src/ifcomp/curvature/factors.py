"""The fitted curvature of a model as plain, frozen data.

All quantities are in beta-free units: gradients are ``J^T (p - e_y)``, so the Fisher is that of the paper divided by
beta squared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from ifcomp.blocks.block import Basis, FactorShapes
from ifcomp.errors import NonFiniteError, SettingError
from ifcomp.io.fingerprints import digest_tensors
from ifcomp.precision import as_double

#: A direction has no curvature if its gradients are below this multiple of eps times the largest gradient.
_ROUNDINGS = 128

FisherKind = Literal["sampled", "exact", "empirical"]


@dataclass(frozen=True)
class Relative:
    """Damping as a multiple of each block's mean second moment: ``delta = multiple * mean(Lambda)``."""

    multiple: float


#: Absolute damping in beta-free units (the paper's delta over beta squared), or a multiple of each block's mean
#: curvature.
Damping = float | Relative


@dataclass(frozen=True)
class FitSettings:
    """Settings of the estimate of the curvature.

    Attributes:
        beta: Inverse temperature of the model's distribution; 0 is the uniform limit.
        fisher: Labels sampled from the model, all labels weighted by it, or the data's own labels.
        label_samples: Labels drawn per example and pass (sampled only).
        seed: Seed of the label samples.
    """

    beta: float = 1.0
    fisher: FisherKind = "sampled"
    label_samples: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        """Validate the settings."""
        if str(self.beta) == "auto":
            raise SettingError(
                "beta='auto' needs held-out data, which fit does not get. Give a number of at least 0. After the fit, "
                "IFComp.calibrate(held_out) chooses the temperature of predictions."
            )
        check_number("beta", self.beta)
        if self.fisher not in ("sampled", "exact", "empirical"):
            raise SettingError(f"fisher must be 'sampled', 'exact' or 'empirical', but is {self.fisher!r}.")
        if not isinstance(self.label_samples, int) or self.label_samples < 1:
            raise SettingError(f"label_samples must be a whole number of at least 1, but is {self.label_samples!r}.")
        if not isinstance(self.seed, int):
            raise SettingError(f"seed must be a whole number, but is {self.seed!r}.")


@dataclass(frozen=True, eq=False)
class BlockFactors:
    """The curvature of one block: ``Q diag(Lambda) Q^T``.

    Attributes:
        second_moments: Lambda: mean over examples of the squared gradient in the eigenbasis. [G, O, J] for a
            Kronecker block ([1, D, V] for an embedding), [P] for a diagonal one.
        basis: The eigenbasis; None for a diagonal block.
    """

    second_moments: Tensor
    basis: Basis | None = None

    @property
    def shapes(self) -> FactorShapes:
        """Shapes of second moments, input basis and output basis."""
        parts = (self.basis.inputs, self.basis.outputs) if self.basis else (None, None)
        inputs, outputs = (None if part is None else tuple(part.shape) for part in parts)
        return FactorShapes(tuple(self.second_moments.shape), inputs, outputs)

    @property
    def dtypes(self) -> set[torch.dtype]:
        """Types of second moments and bases."""
        parts = (self.second_moments, *((self.basis.inputs, self.basis.outputs) if self.basis else ()))
        return {part.dtype for part in parts if part is not None}


@dataclass(frozen=True, eq=False)
class Factors:
    """The fitted curvature of a model.

    Attributes:
        blocks: Factors by block name.
        count: n, the number of training examples.
        num_classes: K.
        settings: How they were estimated.
        training_accuracy: Share of the labelled training examples whose label is the model's prediction; None without
            labels.
        reference: Normalised penultimate features [R, D] of a sample of the training examples, on the CPU; None if the
            model has none, or if the factors are not from `IFComp.fit`.
    """

    blocks: Mapping[str, BlockFactors]
    count: int
    num_classes: int
    settings: FitSettings
    training_accuracy: float | None = None
    reference: Tensor | None = None

    def to(self, device: torch.device) -> Factors:
        """The same factors on another device."""

        def move(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device)

        blocks = {}
        for name, block in self.blocks.items():
            basis = block.basis and Basis(move(block.basis.inputs), move(block.basis.outputs))
            blocks[name] = BlockFactors(block.second_moments.to(device), basis)
        return replace(self, blocks=blocks)

    def damping_of(self, name: str, damping: Damping) -> float:
        """The absolute damping of a block in beta-free units."""
        if isinstance(damping, Relative):
            return damping.multiple * float(as_double(self.blocks[name].second_moments).mean())
        return float(damping)

    def digest(self) -> str:
        """A digest of all second moments and eigenbases."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        blocks = self.blocks.values()
        bases = [(block.basis.inputs, block.basis.outputs) for block in blocks if block.basis is not None]
        tensors = [*(block.second_moments for block in blocks), *(part for pair in bases for part in pair)]
        return digest_tensors(tensor for tensor in tensors if tensor is not None)[:16]

    def effective_parameters(self, damping: Damping) -> float:
        """``sum Lambda / (Lambda + delta)``: the mean of E[IF] over the training set with the exact Fisher.

        In the limit of no damping it is the number of covered parameters with curvature.
        """
        total = 0.0
        for name, block in self.blocks.items():
            inverse = inverse_curvature(block.second_moments, self.damping_of(name, damping))
            total += float((as_double(block.second_moments) * inverse).sum())
        return total


def inverse_curvature(second_moments: Tensor, damping: float) -> Tensor:
    """``1 / (Lambda + delta)`` in float64; on the CPU unless the second moments are float64.

    Without damping it is the pseudo-inverse: 0 where the second moment is below the rounding error of a direction
    without curvature.
    """
    moments = as_double(second_moments)
    if damping > 0 or not moments.numel():
        return (moments + damping).reciprocal()
    rounding = _ROUNDINGS * torch.finfo(second_moments.dtype).eps
    curved = moments > rounding**2 * moments.max()
    return moments.reciprocal().where(curved, 0.0)


def check_finite(factors: Factors) -> None:
    """Raise NonFiniteError if second moments have overflowed; names the layers."""
    wrong = [name for name, block in factors.blocks.items() if not block.second_moments.isfinite().all()]
    if wrong:
        raise NonFiniteError(
            f"The squared gradients of {', '.join(wrong)} overflow. Scale the inputs, use model.double(), or leave the "
            "layers out with layers= or requires_grad_(False)."
        )


def check_damping(damping: Damping) -> Damping:
    """Return the damping, or raise SettingError if it is negative or not a number."""
    check_number("damping", damping.multiple if isinstance(damping, Relative) else damping, " or Relative(number)")
    return damping


def check_number(name: str, value: float, alternative: str = "") -> None:
    """Raise SettingError unless the value is a finite number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value >= 0):
        raise SettingError(f"{name} must be a finite number of at least 0{alternative}, but is {value!r}.")
