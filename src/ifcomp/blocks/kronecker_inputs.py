"""Canonical inputs of Kronecker blocks, and rotations by an eigenbasis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ifcomp.blocks.block import Basis

#: Up to this number of positions a basis is applied to the positions of all examples in one matrix product.
_FEW_POSITIONS = 32


@dataclass(frozen=True)
class KroneckerShape:
    """The shape of a Kronecker block.

    Attributes:
        groups: G, independent blocks of equal shape.
        out_features: O, outputs per group.
        basis_size: Side of the input covariance: J with the bias, or the channels per group with shared offsets.
        offsets: Kernel offsets that share one input basis; 1 without shared offsets.
        has_bias: Whether a bias is the last input.
        rotates_outputs: Whether outputs have an eigenbasis; False is the identity.
    """

    groups: int
    out_features: int
    basis_size: int
    offsets: int
    has_bias: bool
    rotates_outputs: bool = True

    @property
    def shares_offsets(self) -> bool:
        """Whether one input basis over channels serves all kernel offsets (SUA)."""
        return self.offsets > 1

    @property
    def in_features(self) -> int:
        """J, inputs per group, with the bias."""
        return self.basis_size * self.offsets + self.has_bias if self.shares_offsets else self.basis_size


@dataclass(frozen=True)
class Patches:
    """Inputs of one call of a layer.

    Attributes:
        channels: [B, R, G, I, *S]: R rows per example, I input channels per group, spatial axes S.
        unfold: Maps channels [N, G, I, *S] to patches [N, G, J', T'], without the bias.
    """

    channels: Tensor
    unfold: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class KroneckerInputs:
    """Canonical inputs of a block, unfolded on demand for a few examples at a time.

    Attributes:
        calls: Inputs of every call of the layer; their positions are concatenated. Without a weight they are empty.
        shape: Shape of the block.
        batch_size: B.
        positions: T, over all calls.
        dtype: Precision of unfolded inputs.
        device: Device of unfolded inputs.
    """

    calls: Sequence[Patches]
    shape: KroneckerShape
    batch_size: int
    positions: int
    dtype: torch.dtype
    device: torch.device

    def unfold(self, examples: slice = slice(None), channel_basis: Tensor | None = None) -> Tensor:
        """Inputs a [b, G, J, T] of some examples.

        Args:
            examples: Which examples.
            channel_basis: Eigenvectors [G, I, I] by which channels are rotated before they are unfolded.
        """
        parts = []
        for call in self.calls:
            channels = call.channels[examples].to(self.dtype)
            rows = channels.flatten(0, 1)
            rows = rows if channel_basis is None else rotate(channel_basis, rows.flatten(3)).view(rows.shape)
            parts.append(_positions_last(call.unfold(rows), len(channels)))
        features = parts[0] if len(parts) == 1 else torch.cat(parts, -1) if parts else None
        if not self.shape.has_bias:
            assert features is not None
            return features
        count = len(range(self.batch_size)[examples])
        ones = torch.ones(count, self.shape.groups, 1, self.positions, dtype=self.dtype, device=self.device)
        return ones if features is None else torch.cat([features, ones], 2)

    def rotate(self, basis: Basis, examples: slice = slice(None)) -> Tensor:
        """Inputs of some examples in the eigenbasis, [b, G, J, T]. With shared offsets the bias is not rotated."""
        assert basis.inputs is not None
        if self.shape.shares_offsets:
            return self.unfold(examples, basis.inputs)
        return rotate(basis.inputs, self.unfold(examples))

    def channels(self) -> Tensor:
        """The channels of all input positions, [B, G, I, N] with N positions."""
        parts = [call.channels.to(self.dtype).flatten(4).permute(0, 2, 3, 1, 4).flatten(3) for call in self.calls]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def active_channels(self, active: Tensor) -> Tensor:
        """Whether an input position is in the patch of an active output position, [B, G, N] in the order of `channels`.

        Args:
            active: [B, G, T].
        """
        parts, first = [], 0
        for call in self.calls:
            rows = call.channels[:, :, :, :1].to(self.dtype).flatten(0, 1)  # [B*R, G, 1, *S]
            patches, fold = torch.func.vjp(call.unfold, rows)[:2]
            count = call.channels.shape[1] * patches.shape[3]
            by_row = active[..., first : first + count].unflatten(2, (-1, patches.shape[3]))  # [B, G, R, T']
            chosen = by_row.transpose(1, 2).flatten(0, 1).unsqueeze(2).expand_as(patches)
            pixels = fold(chosen.to(self.dtype))[0].reshape(call.channels[:, :, :, 0].shape)  # [B, R, G, *S]
            parts.append(pixels.flatten(3).transpose(1, 2).flatten(2) > 0)
            first += count
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def rotate(basis: Tensor | None, values: Tensor) -> Tensor:
    """``Q^T v`` at every position; the values themselves if the basis is the identity.

    Args:
        basis: Q [G, side, side]; None is the identity.
        values: v [B, G, side, T].
    """
    if basis is None:
        return values
    if values.shape[1] == 1 and values.shape[3] <= _FEW_POSITIONS:
        flat = values[:, 0].transpose(1, 2)  # [B, T, C]
        return (flat.reshape(-1, flat.shape[2]) @ basis[0]).view(flat.shape).transpose(1, 2).unsqueeze(1)
    return basis.transpose(1, 2) @ values


def _positions_last(rows: Tensor, batch: int) -> Tensor:
    """Rearrange [B*R, G, J, T] to [B, G, J, R*T]."""
    return rows if len(rows) == batch else rows.unflatten(0, (batch, -1)).permute(0, 2, 3, 1, 4).flatten(3)
