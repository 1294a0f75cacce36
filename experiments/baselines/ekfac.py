"""EKFAC for explicit gradients: ``(F + delta)^-1 g`` by parameter name, where `IFComp` only needs quadratic forms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ifcomp.blocks.block import Basis
from ifcomp.curvature.factors import Damping, Factors, inverse_curvature
from ifcomp.curvature.holdings import factor_shapes
from ifcomp.errors import FingerprintError
from ifcomp.layers.block import Block, IndexedBlock, KroneckerBlock
from ifcomp.layers.inventory import with_known
from ifcomp.layers.registry import Selection


@dataclass(frozen=True, eq=False)
class _Part:
    """One block with its basis and the weights ``scale / (Lambda + delta)``."""

    block: Block
    basis: Basis | None
    weights: Tensor


class EkfacCovariance:
    """``Sigma = scale * (F + delta)^-1`` of all blocks of a fit, in the precision of the model."""

    def __init__(self, model: nn.Module, factors: Factors, damping: Damping, scale: float) -> None:
        """Invert the curvature.

        Args:
            model: The classifier that the factors belong to.
            factors: Its curvature F, in beta-free units.
            damping: delta.
            scale: What the inverse is multiplied by.
        """
        self._parts = []
        self.names: set[str] = set()
        for block in fitted_blocks(model, factors):
            fitted, like = factors.blocks[block.name], model.get_parameter(block.parameters[0])
            weights = scale * inverse_curvature(fitted.second_moments, factors.damping_of(block.name, damping))
            basis = fitted.basis and Basis(
                None if fitted.basis.inputs is None else fitted.basis.inputs.to(like), fitted.basis.outputs.to(like)
            )
            self._parts.append(_Part(block, basis, weights.to(like)))
            self.names |= {*block.parameters}

    def times(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``Sigma g`` in the shapes of the parameters, zero where the fit does not reach; works under ``vmap``."""
        found = {name: torch.zeros_like(gradient) for name, gradient in gradients.items()}
        for part in self._parts:
            matrix = block_matrix(part.block, gradients)
            if part.basis is None:
                matrix = matrix * part.weights
            else:
                matrix = _rotate(part.block, matrix, part.basis) * part.weights
                matrix = _rotate(part.block, matrix, _transposed(part.basis))
            _put_back(part.block, matrix, found)
        return found


def fitted_blocks(model: nn.Module, factors: Factors) -> list[Block]:
    """The model's blocks that the factors are of, in their order.

    Raises:
        FingerprintError: If a factor has no block of its shape in the model.
    """
    found: dict[str, Block] = {}
    for sua in (False, True):  # which of both was fitted is seen from the shapes
        inventory, _ = with_known(model, Selection(sua=sua, skip_uncovered=True), factors.blocks.keys())
        for block in inventory.blocks:
            if factor_shapes(block) == factors.blocks[block.name].shapes:
                found[block.name] = block
    missing = sorted(factors.blocks.keys() - found.keys())
    if missing:
        raise FingerprintError(
            f"The factors are not of this model: it has no layer of the same shape for {', '.join(missing)}. "
            "Give the model that was fitted, or fit again."
        )
    return [found[name] for name in factors.blocks]


def block_matrix(block: Block, values: Mapping[str, Tensor]) -> Tensor:
    """Values of a block's parameters in the shape of its second moments: [G, O, J], [1, D, V] or [P]."""
    if isinstance(block, KroneckerBlock):
        return block.gradient_matrix(dict(values))
    parts = [values[name] for name in block.parameters]
    if isinstance(block, IndexedBlock):
        return parts[0].T.unsqueeze(0)
    return torch.cat([part.flatten() for part in parts])


def _rotate(block: Block, matrix: Tensor, basis: Basis) -> Tensor:
    """``Q_S^T M Q_A`` of [G, O, J]; with shared offsets the channels are rotated at each, and a bias is not."""
    matrix = basis.outputs.transpose(-1, -2) @ matrix
    if basis.inputs is None:
        return matrix
    if not (isinstance(block, KroneckerBlock) and block.shared_offsets):
        return matrix @ basis.inputs
    shared, bias = matrix.tensor_split([block.channels * block.offsets], -1)
    shared = basis.inputs.transpose(-1, -2).unsqueeze(1) @ shared.unflatten(-1, (block.channels, block.offsets))
    return torch.cat([shared.flatten(-2), bias], -1)


def _transposed(basis: Basis) -> Basis:
    inputs = None if basis.inputs is None else basis.inputs.transpose(-1, -2)
    return Basis(inputs, basis.outputs.transpose(-1, -2))


def _put_back(block: Block, matrix: Tensor, found: dict[str, Tensor]) -> None:
    """The inverse of `block_matrix`; of packed parameters only the block's own rows are written."""
    if isinstance(block, IndexedBlock):
        found[block.parameters[0]] = matrix[0].T
        return
    if not isinstance(block, KroneckerBlock):
        sizes = [found[name].numel() for name in block.parameters]
        for name, part in zip(block.parameters, matrix.split(sizes), strict=True):
            found[name] = part.reshape(found[name].shape)
        return
    rows = block.groups * block.rows
    own = slice(block.first_row, block.first_row + rows)
    widths = [found[name].numel() // len(found[name]) for name in block.parameters]
    for name, part in zip(block.parameters, matrix.split(widths, -1), strict=True):
        if len(found[name]) == rows:
            found[name] = part.reshape(found[name].shape)
        else:
            found[name][own] = part.reshape(found[name][own].shape)
