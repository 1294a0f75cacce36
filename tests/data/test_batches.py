"""Batches: items of a loader in one form, with nested tensors, split and moved."""

from collections import namedtuple
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from ifcomp import IFComp
from ifcomp.data.batches import Batch, as_batch, as_batches
from ifcomp.errors import DataError, LabelError

X = torch.randn(22, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(22) % 3

Pair = namedtuple("Pair", "first second")


class NestedInputs(nn.Module):
    """A model with a pair of tensors, an optional dict, and a parameter that no rule covers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        self.scale = nn.Parameter(torch.full((6,), 1.1, dtype=torch.float64))

    def forward(self, pair: Any, extra: dict[str, Any] | None = None) -> Tensor:
        shift = 0 if extra is None else extra["shifts"][0]
        logits: Tensor = self.inner(torch.cat(list(pair), 1) * self.scale + shift)
        return logits


def nested(x: Tensor, y: Tensor, form: str) -> Any:
    first, second = x[:, :2].contiguous(), x[:, 2:].contiguous()
    if form == "dict":
        return {"pair": [first, second], "extra": {"shifts": (x, 3), "name": "a"}, "labels": y}
    return {"tuple": ((first, second), y), "list": ([first, second], y), "named": (Pair(first, second), y)}[form]


FORMS = ["tuple", "list", "named", "dict"]


def logits(model: nn.Module, batch: Batch) -> Tensor:
    output: Tensor = model(*batch.args, **batch.kwargs)
    return output.detach()


@pytest.mark.parametrize("form", FORMS)
def test_nested_tensors_are_split(form: str) -> None:
    model, batch = NestedInputs(), as_batch(nested(X, Y, form))
    for size in (1, 5, 22, 100):
        microbatches = list(batch.split(size))
        assert max(microbatch.size for microbatch in microbatches) <= size
        assert [part.position for part in microbatches] == [
            sum(p.size for p in microbatches[:i]) for i in range(len(microbatches))
        ]
        assert torch.equal(torch.cat([part.labels for part in microbatches]), Y)
        parts = torch.cat([logits(model, microbatch) for microbatch in microbatches])
        torch.testing.assert_close(parts, logits(model, batch), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_batch_size_of_nested_inputs_does_not_change_scores(form: str) -> None:
    expected = IFComp(NestedInputs(), damping=1e-2).fit([nested(X, Y, form)]).score([nested(X, Y, form)]).frame
    batches = [nested(X[start : start + 5], Y[start : start + 5], form) for start in range(0, 22, 5)]
    scores = IFComp(NestedInputs(), damping=1e-2).fit(batches).score(batches).frame
    pd.testing.assert_frame_equal(scores, expected, rtol=1e-9)


def test_tensors_are_copied_asynchronously(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[tuple[int, ...], Any, Any]] = []
    original = Tensor.to

    def record(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        calls.append((tuple(tensor.shape), kwargs.get("non_blocking"), kwargs.get("copy")))
        return original(tensor, *args, **kwargs)

    monkeypatch.setattr(Tensor, "to", record)
    batch = as_batch(nested(X, Y, "dict"))
    moved = batch.to(torch.device("cpu"))
    assert calls == [((22, 2), True, True), ((22, 4), True, True), ((22, 6), True, True)]
    assert moved.kwargs["extra"]["shifts"][1] == 3
    assert moved.kwargs["extra"]["name"] == "a"
    for copy, tensor in zip(moved.tensors(), batch.tensors(), strict=True):
        assert torch.equal(copy, tensor)
        assert copy.data_ptr() != tensor.data_ptr()


def test_selected_examples_know_their_position() -> None:
    batches = list(as_batches([X[:0], X[:9], (X[9:], Y[9:])]))
    assert [(batch.name, batch.start, batch.size) for batch in batches] == [("batch 1", 0, 9), ("batch 2", 9, 13)]
    selected = batches[1].select(slice(2, 9)).select(torch.tensor([3, 4]))
    assert (selected.offset, selected.position, selected.size) == (5, 14, 2)
    assert torch.equal(selected.args[0], X[[14, 15]])
    assert selected.labels is not None
    assert selected.labels.tolist() == Y[[14, 15]].tolist()
    assert selected.describe_example(torch.tensor([False, True])) == "example 6"


def test_inputs_without_a_batch_axis_are_kept() -> None:
    batch = as_batch({"x": X, "mask": X[:, :1], "scale": torch.tensor(2.0), "table": torch.eye(3), "labels": Y})
    selected = batch.select(slice(0, 4))
    assert batch.size == 22
    assert {name: tuple(value.shape) for name, value in selected.kwargs.items()} == {
        "x": (4, 6),
        "mask": (4, 1),
        "scale": (),
        "table": (3, 3),
    }


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ((X, Y, Y), "but is a tuple of length 3. For a model with several inputs yield dicts"),
        ("text", "but is a str. "),
        ({"x": [1, 2]}, "no input tensor with a batch axis"),
        (torch.tensor(1.0), "no input tensor with a batch axis"),
    ],
)
def test_other_forms_are_refused(item: Any, message: str) -> None:
    with pytest.raises(DataError, match=f"batch 7: .*{message}"):
        as_batch(item, name="batch 7")


def test_labels_that_are_no_integers_are_refused() -> None:
    with pytest.raises(LabelError, match="batch 0: labels must be integers from 0, but are a list"):
        as_batch((X, ["cat"] * 22))


@pytest.mark.filterwarnings("error")
def test_read_only_labels_are_copied() -> None:
    """Arrays of pandas are read-only; PyTorch warns of tensors that share their memory."""
    labels = np.arange(3)
    labels.flags.writeable = False
    (batch,) = as_batches([(torch.zeros(3, 2), labels)])
    assert batch.labels is not None
    assert batch.labels.tolist() == [0, 1, 2]
