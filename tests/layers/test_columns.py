"""Inputs of a recorded layer with more columns than it has: zeros, whatever was in their memory before."""

import pytest
import torch
from torch import Tensor, nn

from ifcomp.data.batches import as_batch
from ifcomp.layers.block import KroneckerBlock
from ifcomp.layers.registry import Selection
from ifcomp.layers.session import Session


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sua", [True, False])
def test_columns_that_are_added_are_zero(sua: bool, bias: bool) -> None:
    torch.manual_seed(0)
    batch = as_batch(torch.randn(3, 2, 6, 6))
    session = Session(nn.Sequential(nn.Conv2d(2, 4, 3, bias=bias), nn.Flatten()), Selection(sua=sua), batch)
    with session.attached():
        recording = session.record(batch)
    (block,) = session.recorded
    assert isinstance(block, KroneckerBlock)
    some, columns = slice(1, 3), 18 + bias
    basis = torch.randn(1, block.channels, block.channels)

    def inputs(width: int) -> Tensor:
        """[2, 1, width, 16], a copy."""
        recording.room("windows", 2, 1, 24, 16).fill_(torch.nan)
        if sua:
            return recording.rotated_windows(block, basis, some, width).transpose(2, 3).clone()
        return recording.columns(block, some, width).clone()

    found, exact = inputs(24), inputs(columns)
    assert found.shape == (2, 1, 24, 16)
    assert torch.equal(found[:, :, :columns], exact)
    assert not found[:, :, columns:].any()
