"""Data comes as people load it: worker processes, pinned memory, tensors inside of lists and dicts."""

from collections import namedtuple
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ifcomp import IFComp
from ifcomp.data.batches import as_batch

X = torch.randn(22, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(22) % 3


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


class TwoInputs(nn.Module):
    """Takes a pair by position, a dict by name, and has a parameter that no rule covers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = network(), nn.Parameter(torch.full((6,), 1.1, dtype=torch.float64))

    def forward(self, pair: Any, extra: dict[str, Any] | None = None) -> Tensor:
        one, other = pair
        shift = 0 if extra is None else extra["shifts"][0]
        found: Tensor = self.inner(torch.cat([one, other], 1) * self.scale + shift)
        return found


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_give_the_same_numbers(workers: int) -> None:
    alone = DataLoader(TensorDataset(X, Y), batch_size=5)
    loader = DataLoader(TensorDataset(X, Y), batch_size=5, num_workers=workers, persistent_workers=True)
    expected, found = IFComp(network()).fit(alone), IFComp(network()).fit(loader)
    pd.testing.assert_frame_equal(found.score(loader).frame, expected.score(alone).frame, rtol=0, atol=0)


Pair = namedtuple("Pair", "one other")


def nested(x: Tensor, y: Tensor, form: str) -> Any:
    one, other = x[:, :2].contiguous(), x[:, 2:].contiguous()
    if form == "dict":
        return {"pair": [one, other], "extra": {"shifts": (x, 3), "name": "a"}, "labels": y}
    return {"tuple": ((one, other), y), "list": ([one, other], y), "named": (Pair(one, other), y)}[form]


@pytest.mark.parametrize("form", ["tuple", "list", "named", "dict"])
def test_tensors_inside_of_others_are_split_and_moved(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = IFComp(TwoInputs(), damping=1e-2).fit([nested(X, Y, form)])
    expected = whole.score([nested(X, Y, form)]).frame
    batches = [nested(X[first : first + 5], Y[first : first + 5], form) for first in range(0, 22, 5)]
    monkeypatch.setattr("ifcomp.layers.session.PIECE_BYTES", 1)  # one example at a time
    found = IFComp(TwoInputs(), damping=1e-2).fit(batches).score(batches).frame
    pd.testing.assert_frame_equal(found, expected, rtol=1e-9)


def test_every_tensor_is_asked_to_move_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[tuple[int, ...], Any, Any]] = []
    plain = Tensor.to

    def noted(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        asked.append((tuple(tensor.shape), kwargs.get("non_blocking"), kwargs.get("copy")))
        return plain(tensor, *args, **kwargs)

    monkeypatch.setattr(Tensor, "to", noted)
    batch = as_batch(nested(X, Y, "dict"))
    moved = batch.to(torch.device("cpu"))
    assert asked == [((22, 2), True, True), ((22, 4), True, True), ((22, 6), True, True)]
    assert moved.kwargs["extra"]["shifts"][1] == 3
    assert moved.kwargs["extra"]["name"] == "a"
    for one, other in zip(moved.tensors(), batch.tensors(), strict=True):
        assert torch.equal(one, other)
        assert one.data_ptr() != other.data_ptr()
