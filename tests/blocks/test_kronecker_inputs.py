"""Canonical inputs of Kronecker blocks: unfolding, rotation and channels."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from ifcomp.blocks.block import Basis
from ifcomp.blocks.kronecker_inputs import KroneckerInputs, KroneckerShape, Patches, rotate

GENERATOR = torch.Generator().manual_seed(0)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64)


@pytest.mark.parametrize(("groups", "positions"), [(1, 1), (1, 32), (1, 33), (2, 3)])
def test_a_basis_rotates_every_position(groups: int, positions: int) -> None:
    """Few and many positions of one group, and several groups, are rotated by different products."""
    basis, values = random(groups, 3, 3), random(5, groups, 3, positions)
    expected = torch.einsum("gca,bgct->bgat", basis, values)
    assert_close(rotate(basis, values), expected)
    strided = values.transpose(0, 3).contiguous().transpose(0, 3)
    assert_close(rotate(basis, strided), expected)


# Two calls of a layer with G = 2 groups, C = 3 channels and 2 offsets, on B = 4 examples. The first call has R = 2 rows
# of 4 input positions, the second has one row of 3.

BATCH, GROUPS, CHANNELS = 4, 2, 3
VALUES = (random(BATCH, 2, GROUPS, CHANNELS, 4), random(BATCH, 1, GROUPS, CHANNELS, 3))
POSITIONS = 2 * 3 + 2


def neighbours(channels: Tensor) -> Tensor:
    """Patches of two adjacent positions, [N, G, C, S] to [N, G, C*2, S-1]."""
    return torch.stack([channels[..., :-1], channels[..., 1:]], 3).flatten(2, 3)


def inputs(*, shared: bool, bias: bool) -> KroneckerInputs:
    """Canonical inputs of the two calls."""
    width = CHANNELS if shared else 2 * CHANNELS + bias
    shape = KroneckerShape(GROUPS, 5, basis_size=width, offsets=2 if shared else 1, has_bias=bias)
    calls = [Patches(value, neighbours) for value in VALUES]
    return KroneckerInputs(calls, shape, BATCH, POSITIONS, torch.float64, torch.device("cpu"))


def features(values: tuple[Tensor, ...], *, bias: bool) -> Tensor:
    """Inputs [B, G, J, T], one patch at a time."""
    columns = [
        value[:, row, :, :, position : position + 2].flatten(2)
        for value in values
        for row in range(value.shape[1])
        for position in range(value.shape[4] - 1)
    ]
    stacked = torch.stack(columns, 3)
    return torch.cat([stacked, torch.ones_like(stacked[:, :, :1])], 2) if bias else stacked


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_inputs_are_the_patches_of_all_calls(shared: bool, bias: bool) -> None:
    canonical, expected = inputs(shared=shared, bias=bias), features(VALUES, bias=bias)
    assert canonical.shape.in_features == 2 * CHANNELS + bias
    assert torch.equal(canonical.unfold(), expected)
    assert torch.equal(canonical.unfold(slice(1, 3)), expected[1:3])


@pytest.mark.parametrize("bias", [True, False])
def test_inputs_are_rotated_by_their_basis(bias: bool) -> None:
    canonical, expected = inputs(shared=False, bias=bias), features(VALUES, bias=bias)
    basis = Basis(random(GROUPS, 2 * CHANNELS + bias, 2 * CHANNELS + bias), torch.empty(0))
    rotated = torch.einsum("gjk,bgjt->bgkt", basis.inputs, expected)
    assert_close(canonical.rotate(basis), rotated)
    assert_close(canonical.rotate(basis, slice(1, 3)), rotated[1:3])


@pytest.mark.parametrize("bias", [True, False])
def test_offsets_share_the_rotation_of_channels(bias: bool) -> None:
    """The bias is not rotated."""
    canonical, basis = inputs(shared=True, bias=bias), Basis(random(GROUPS, CHANNELS, CHANNELS), torch.empty(0))
    rotated = tuple(torch.einsum("gcd,brgcs->brgds", basis.inputs, value) for value in VALUES)
    assert_close(canonical.rotate(basis), features(rotated, bias=bias))
    assert_close(canonical.rotate(basis, slice(1, 3)), features(rotated, bias=bias)[1:3])


def test_channels_are_those_of_all_input_positions() -> None:
    columns = [value[:, row].unbind(-1) for value in VALUES for row in range(value.shape[1])]
    expected = torch.stack([column for row in columns for column in row], 3)
    assert torch.equal(inputs(shared=True, bias=True).channels(), expected)


def test_the_only_input_of_a_bias_is_one() -> None:
    shape = KroneckerShape(GROUPS, 5, basis_size=1, offsets=1, has_bias=True)
    canonical = KroneckerInputs([], shape, BATCH, POSITIONS, torch.float32, torch.device("cpu"))
    assert torch.equal(canonical.unfold(slice(1, 3)), torch.ones(2, GROUPS, 1, POSITIONS))


def test_inputs_have_the_precision_of_the_factors() -> None:
    half = [Patches(value.half(), neighbours) for value in VALUES]
    shape = KroneckerShape(GROUPS, 5, basis_size=CHANNELS, offsets=2, has_bias=True)
    canonical = KroneckerInputs(half, shape, BATCH, POSITIONS, torch.float32, torch.device("cpu"))
    basis = Basis(random(GROUPS, CHANNELS, CHANNELS).float(), torch.empty(0))
    assert {canonical.unfold().dtype, canonical.rotate(basis).dtype, canonical.channels().dtype} == {torch.float32}
