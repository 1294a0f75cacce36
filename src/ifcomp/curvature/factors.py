"""The curvature of a trained model as plain, frozen data.

Everything is in beta-free units: gradients are ``J^T (p - e_y)``, so the Fisher here is the paper's divided by beta
squared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ifcomp.errors import MergeError, NonFiniteError, SettingError

#: How many times the precision rounding may leave, relative to the largest, of a gradient that should be zero.
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
    """How curvature was estimated; two fits can only be merged when these agree.

    Attributes:
        beta: Inverse temperature of the model's distribution; 0 is the uniform limit.
        fisher: Labels sampled from the model, all labels weighted by it, or the data's own labels.
        label_samples: Labels drawn per example and pass (sampled only).
        seed: Of the label samples.
    """

    beta: float = 1.0
    fisher: FisherKind = "sampled"
    label_samples: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse settings that mean nothing."""
        if str(self.beta) == "auto":
            raise SettingError(
                "beta='auto' needs held-out data, which fit does not get. Give a number of at least 0, or call "
                "ifcomp.tuning.fit_auto(model, train, held_out): its .predictor is fitted at the beta it chose."
            )
        check_number("beta", self.beta)
        if self.fisher not in ("sampled", "exact", "empirical"):
            raise SettingError(f"fisher must be 'sampled', 'exact' or 'empirical', but is {self.fisher!r}.")
        if not isinstance(self.label_samples, int) or self.label_samples < 1:
            raise SettingError(f"label_samples must be a whole number of at least 1, but is {self.label_samples!r}.")
        if not isinstance(self.seed, int):
            raise SettingError(f"seed must be a whole number, but is {self.seed!r}.")


@dataclass(frozen=True, eq=False)
class Covariance:
    """Sums over examples and positions of the outer products of a Kronecker block.

    Attributes:
        inputs: ``sum a a^T``, [G, C, C]; None for one-hot inputs.
        outputs: ``sum b b^T``, [G, O, O].
    """

    inputs: Tensor | None
    outputs: Tensor


@dataclass(frozen=True, eq=False)
class Covariances:
    """What the first pass leaves: one `Covariance` for each Kronecker block, over ``count`` examples.

    They are sums, so adding those of two disjoint data sets is always right.
    """

    blocks: Mapping[str, Covariance]
    count: int

    def merge(self, other: Covariances) -> Covariances:
        """The covariances of both data sets together."""
        _same_blocks(self.blocks, other.blocks)
        merged = {}
        for name, mine in self.blocks.items():
            theirs = other.blocks[name]
            if _shapes(mine) != _shapes(theirs):
                raise MergeError(f"The covariances of block '{name}' have different shapes.")
            inputs = None if mine.inputs is None or theirs.inputs is None else mine.inputs + theirs.inputs
            merged[name] = Covariance(inputs, mine.outputs + theirs.outputs)
        return Covariances(merged, self.count + other.count)


def covariance_sums(several: Sequence[Covariances]) -> dict[str, Tensor]:
    """The tensors of fits that were made together, by name; those that they share once."""
    inputs = {f"inputs/{name}": own.inputs for name, own in several[0].blocks.items() if own.inputs is not None}
    return inputs | {
        f"outputs/{number}/{name}": own.outputs
        for number, covariances in enumerate(several)
        for name, own in covariances.blocks.items()
    }


@dataclass(frozen=True, eq=False)
class Basis:
    """Eigenvectors of a Kronecker block's covariances, in columns.

    Attributes:
        inputs: Q_A [G, C, C]; None is the identity (one-hot inputs).
        outputs: Q_S [G, O, O].
    """

    inputs: Tensor | None
    outputs: Tensor


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
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...] | None, tuple[int, ...] | None]:
        """Shapes of second moments, input basis and output basis."""
        parts = (self.basis.inputs, self.basis.outputs) if self.basis else (None, None)
        inputs, outputs = (None if part is None else tuple(part.shape) for part in parts)
        return tuple(self.second_moments.shape), inputs, outputs

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
    """

    blocks: Mapping[str, BlockFactors]
    count: int
    num_classes: int
    settings: FitSettings

    def to(self, device: torch.device) -> Factors:
        """The same factors on another device."""

        def move(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device)

        blocks = {}
        for name, block in self.blocks.items():
            basis = block.basis and Basis(move(block.basis.inputs), block.basis.outputs.to(device))
            blocks[name] = BlockFactors(block.second_moments.to(device), basis)
        return replace(self, blocks=blocks)

    def damping_of(self, name: str, damping: Damping) -> float:
        """The absolute damping of a block in beta-free units."""
        if isinstance(damping, Relative):
            return damping.multiple * float(self.blocks[name].second_moments.double().mean())
        return float(damping)

    def effective_parameters(self, damping: Damping) -> float:
        """``sum Lambda / (Lambda + delta)``: the mean of E[IF] over the training set with the exact Fisher.

        As damping goes to 0 it is the number of covered parameters whose curvature is not zero.
        """
        total = 0.0
        for name, block in self.blocks.items():
            inverse = inverse_curvature(block.second_moments, self.damping_of(name, damping))
            total += float((block.second_moments.double() * inverse).sum())
        return total

    def merge(self, other: Factors) -> Factors:
        """The factors of two disjoint data sets together: second moments are averaged with weights n.

        This is right only when both were computed in the *same* eigenbasis, and so it is refused otherwise: second
        moments in one basis say nothing about those in another. To fit shards apart, merge their `Covariances` first,
        take the eigenbasis of the sum, run the second pass of every shard in it, and merge the results. Diagonal
        blocks can always be merged.

        Raises:
            MergeError: If blocks, settings or eigenbases differ.
        """
        _same_blocks(self.blocks, other.blocks)
        if (self.settings, self.num_classes) != (other.settings, other.num_classes):
            raise MergeError(f"The fits have different settings: {self.settings} and {other.settings}.")
        total = self.count + other.count
        merged = {}
        for name, mine in self.blocks.items():
            theirs = other.blocks[name]
            if not _same_basis(mine.basis, theirs.basis):
                raise MergeError(
                    f"The eigenbases of block '{name}' differ, so the second moments cannot be added. Merge the "
                    "Covariances of "
                    "both fits, take their eigenbasis, and run the second pass of both in it."
                )
            moments = mine.second_moments * (self.count / total) + theirs.second_moments * (other.count / total)
            merged[name] = replace(mine, second_moments=moments)
        return replace(self, blocks=merged, count=total)


def inverse_curvature(second_moments: Tensor, damping: float) -> Tensor:
    """``1 / (Lambda + delta)`` in float64.

    Without damping it is the pseudo-inverse: 0 where the second moment is no more than rounding leaves in a direction
    without curvature.
    """
    moments = second_moments.double()
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


def _same_blocks(mine: Mapping[str, object], theirs: Mapping[str, object]) -> None:
    if mine.keys() != theirs.keys():
        different = sorted(mine.keys() ^ theirs.keys())
        raise MergeError(f"The fits cover different blocks: {', '.join(different)} is in one of them only.")


def _shapes(covariance: Covariance) -> tuple[torch.Size | None, torch.Size]:
    return None if covariance.inputs is None else covariance.inputs.shape, covariance.outputs.shape


def _same_basis(mine: Basis | None, theirs: Basis | None) -> bool:
    if mine is None or theirs is None:
        return mine is theirs
    pairs = [(mine.inputs, theirs.inputs), (mine.outputs, theirs.outputs)]
    return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)
