"""The inverse EKFAC curvature of a fit, applied to explicit gradients by parameter name.

`IFComp` evaluates quadratic forms only. This file needs no more than the factors of a fit: the name of a block gives
its parameters, the shapes of its factors give its form. In the canonical form of a block with G groups, O outputs
and J inputs (the bias is the last input), a gradient is a matrix ``g`` [G, O, J] and

    ``(F + delta)^-1 g = Q_S ((Q_S^T g Q_A) / (Lambda + delta)) Q_A^T``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import EllipsisType

import torch
from torch import Tensor, nn

from ifcomp import Factors, IFComp, Relative
from ifcomp.errors import ModelError, SettingError

#: A parameter by name, and the rows of it that belong to a block.
Rows = tuple[str, slice | EllipsisType]

#: Positions of the projections in the packed parameters of ``nn.MultiheadAttention``.
_PROJECTIONS = {"q": 0, "k": 1, "v": 2}

#: Names of the blocks of a recurrent module.
_RECURRENT = re.compile(r"(?P<part>ih_|hh_)?(?P<suffix>l\d+(_reverse)?)")


class EkfacCovariance:
    """``Sigma = scale * (F + delta)^-1`` over all blocks of a fit, in the precision of the model.

    Attributes:
        names: Parameters that the fit covers.
    """

    def __init__(self, ifc: IFComp, damping: float | Relative, scale: float) -> None:
        """Invert the curvature.

        Args:
            ifc: A fitted predictor; its curvature F is in beta-free units.
            damping: delta.
            scale: Factor of the inverse.
        """
        factors = ifc.factors
        assert factors is not None
        self._blocks = [_inverse_block(ifc.model, factors, name, damping, scale) for name in factors.blocks]
        self.names = {name for block in self._blocks for name, _ in block.rows}

    def multiply(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return ``Sigma g`` in the shapes of the parameters; zero for parameters that the fit does not cover.

        Works under ``vmap``.
        """
        products = {name: torch.zeros_like(gradient) for name, gradient in gradients.items()}
        for block in self._blocks:
            block.scatter(block.multiply(block.gather(gradients)), products)
        return products


@dataclass(frozen=True, eq=False)
class _InverseBlock:
    """The inverse curvature of one block.

    Attributes:
        rows: Its parameters, in the order of the canonical form.
        weights: ``scale / (Lambda + delta)``: [G, O, J], for an embedding [1, D, V], for a diagonal block [P].
        inputs: Q_A [G, C, C]; None for one-hot inputs and diagonal blocks. C < J if one basis of the channels is
            shared over kernel offsets (SUA).
        outputs: Q_S [G, O, O]; None for diagonal blocks.
    """

    rows: list[Rows]
    weights: Tensor
    inputs: Tensor | None
    outputs: Tensor | None

    def gather(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return the values of the block's parameters in canonical form, in the shape of ``weights``."""
        parts = [values[name][rows] for name, rows in self.rows]
        if self.outputs is None:
            return torch.cat([part.flatten() for part in parts])
        if self.inputs is None:
            return parts[0].T.unsqueeze(0)
        return torch.cat([part.reshape(*self.weights.shape[:2], -1) for part in parts], -1)

    def scatter(self, matrix: Tensor, values: dict[str, Tensor]) -> None:
        """Write a matrix in canonical form to the block's parameters: the inverse of `gather`."""
        targets = [values[name][rows] for name, rows in self.rows]
        if self.outputs is not None and self.inputs is None:
            parts: tuple[Tensor, ...] = (matrix[0].T,)
        elif self.outputs is None:
            parts = matrix.split([target.numel() for target in targets])
        else:
            parts = matrix.split([target.numel() // self.weights[..., 0].numel() for target in targets], -1)
        for target, part in zip(targets, parts, strict=True):
            target.copy_(part.reshape(target.shape))

    def multiply(self, matrix: Tensor) -> Tensor:
        """Return ``scale (F + delta)^-1`` times a gradient in canonical form."""
        if self.outputs is None:
            return matrix * self.weights
        rotated = self._rotate_inputs(self.outputs.mT @ matrix, self.inputs) * self.weights
        return self._rotate_inputs(self.outputs @ rotated, None if self.inputs is None else self.inputs.mT)

    @staticmethod
    def _rotate_inputs(matrix: Tensor, basis: Tensor | None) -> Tensor:
        """Return ``matrix @ basis``. A basis of channels rotates them at every kernel offset, and no bias."""
        if basis is None or basis.shape[-1] == matrix.shape[-1]:
            return matrix if basis is None else matrix @ basis
        channels = basis.shape[-1]
        offsets = matrix.shape[-1] // channels
        windows, bias = matrix.tensor_split([channels * offsets], -1)
        windows = basis.mT.unsqueeze(1) @ windows.unflatten(-1, (channels, offsets))
        return torch.cat([windows.flatten(-2), bias], -1)


def _inverse_block(
    model: nn.Module, factors: Factors, name: str, damping: float | Relative, scale: float
) -> _InverseBlock:
    block, rows = factors.blocks[name], _block_rows(model, name)
    size = sum(model.get_parameter(parameter)[index].numel() for parameter, index in rows)
    if size != block.second_moments.numel():
        raise ModelError(
            f"The parameters of block '{name}' are not known by its name: {[parameter for parameter, _ in rows]} have "
            f"{size} elements, its second moments {block.second_moments.numel()}."
        )
    like = model.get_parameter(rows[0][0]).detach()
    delta = factors.damping_of(name, damping)
    weights = scale / (block.second_moments.double() + delta)
    if not weights.isfinite().all():
        raise SettingError(f"Block '{name}' has directions without curvature: the damping must be above 0.")
    basis = block.basis
    return _InverseBlock(
        rows,
        weights.to(like),
        None if basis is None or basis.inputs is None else basis.inputs.to(like),
        None if basis is None else basis.outputs.to(like),
    )


def _block_rows(model: nn.Module, name: str) -> list[Rows]:
    """Return the trainable parameters of a block.

    It has the name of the parameter or module, of a projection of attention, or of a projection of a recurrent module
    (``ih_l0``, ``hh_l0``, or ``l0`` for both).
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    trainable = {parameter for parameter, value in parameters.items() if value.requires_grad}
    if name in trainable:
        return [(name, ...)]
    prefix = f"{name}." if name else ""
    rows: list[Rows] = [(prefix + kind, ...) for kind in ("weight", "bias") if prefix + kind in trainable]
    module, _, projection = name.rpartition(".")
    if not rows and (found := _RECURRENT.fullmatch(projection)):
        parts = (found["part"],) if found["part"] else ("ih_", "hh_")
        names = [f"{module}.{kind}_{part}{found['suffix']}" for kind in ("weight", "bias") for part in parts]
        return [(parameter.removeprefix("."), ...) for parameter in names if parameter.removeprefix(".") in trainable]
    if rows or projection not in _PROJECTIONS:
        return rows
    attention = model.get_submodule(module)
    assert isinstance(attention, nn.MultiheadAttention)
    prefix, start = f"{module}." if module else "", _PROJECTIONS[projection] * attention.embed_dim
    packed = slice(start, start + attention.embed_dim)
    candidates: dict[str, slice | EllipsisType] = {
        "in_proj_weight": packed,
        f"{projection}_proj_weight": ...,
        "in_proj_bias": packed,
    }
    return [(prefix + kind, index) for kind, index in candidates.items() if prefix + kind in trainable]
