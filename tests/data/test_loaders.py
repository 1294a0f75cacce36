"""DataLoaders with worker processes."""

import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ifcomp import IFComp

X = torch.randn(22, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(22) % 3


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_do_not_change_scores(workers: int) -> None:
    serial = DataLoader(TensorDataset(X, Y), batch_size=5)
    parallel = DataLoader(TensorDataset(X, Y), batch_size=5, num_workers=workers, persistent_workers=True)
    expected, scores = (IFComp(network()).fit(loader).score(loader).frame for loader in (serial, parallel))
    pd.testing.assert_frame_equal(scores, expected, rtol=0, atol=0)
