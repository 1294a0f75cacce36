"""Digests of data: what they depend on, and what they do not."""

import pytest
import torch
from torch import Tensor

from ifcomp.data.batches import Batch, as_batches
from ifcomp.data.digests import DataDigest

X, Y = torch.arange(24.0).view(8, 3), torch.arange(8) % 3
ORDER = torch.tensor([3, 1, 7, 0, 2, 6, 5, 4])


def digest(x: Tensor = X, y: Tensor | None = Y, size: int = 4) -> DataDigest:
    parts = x.split(size)
    items = parts if y is None else list(zip(parts, y.split(size), strict=True))
    return DataDigest.of(as_batches(items))


def test_of_the_same_data() -> None:
    first, second = digest(), digest(size=2)
    assert (first.in_order, first.count) == (second.in_order, 8)
    assert first.in_batches == digest().in_batches != second.in_batches
    assert first.has_same_examples(second)
    assert digest(y=None).in_order == digest(y=None, size=3).in_order


def test_of_another_order() -> None:
    first, second = digest(), digest(X[ORDER], Y[ORDER])
    assert first.in_order != second.in_order
    assert first.has_same_examples(second)


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (X + (X == 5), Y),
        (X, (Y + (X[:, 0] == 9)) % 3),
        (X, Y[ORDER]),
        (X.double(), Y),
        (X.view(8, 3, 1), Y),
        (X[:7], Y[:7]),
        (torch.cat([X[:7], X[:1]]), torch.cat([Y[:7], Y[:1]])),
        (X, None),
        (X.flip(1), Y),
    ],
    ids=["value", "label", "labels_of_others", "dtype", "shape", "fewer", "duplicate", "unlabelled", "axis"],
)
def test_of_other_data(x: Tensor, y: Tensor | None) -> None:
    assert digest(x, y).in_order != digest().in_order
    assert not digest(x, y).has_same_examples(digest())


def test_padding_depends_on_the_batch() -> None:
    """Texts of several lengths in another order have other padding: only their labels are compared."""
    texts = [torch.ones(length, dtype=torch.int64) for length in (1, 2, 3, 4)]

    def padded(order: list[int], labels: list[int]) -> DataDigest:
        items = [
            {
                "tokens": torch.nn.utils.rnn.pad_sequence([texts[place] for place in pair], batch_first=True),
                "labels": torch.tensor([labels[place] for place in pair]),
            }
            for pair in (order[:2], order[2:])
        ]
        return DataDigest.of(as_batches(items))

    assert padded([0, 1, 2, 3], [0, 1, 0, 2]).has_same_examples(padded([0, 3, 2, 1], [0, 1, 0, 2]))
    assert not padded([0, 1, 2, 3], [0, 1, 0, 2]).has_same_examples(padded([0, 1, 2, 3], [0, 1, 0, 1]))
    assert padded([0, 1, 2, 3], [0] * 4).has_same_examples(padded([0, 3, 2, 1], [0] * 4))  # no sign of an order


def test_several_shapes_in_the_same_order() -> None:
    """If the labels show that the order is the same, so must be the inputs."""
    parts = [torch.arange(float(width * 4)).view(4, width) for width in (2, 3)]
    changed = [parts[0], parts[1] + (parts[1] == 7)]
    given, other = (DataDigest.of(as_batches(zip(both, Y.split(4), strict=True))) for both in (parts, changed))
    assert given.has_same_examples(given)
    assert not given.has_same_examples(other)


def test_names_and_plain_values_of_inputs() -> None:
    """Two inputs that swap their names, and a number that the model receives, are other data."""

    def named(**entries: object) -> DataDigest:
        return DataDigest.of(as_batches([{**entries, "labels": Y}]))

    assert not named(a=X, b=X + 1).has_same_examples(named(b=X, a=X + 1))
    assert not named(a=X, scale=1.0).has_same_examples(named(a=X, scale=2.0))
    assert named(a=X, scale=1.0, mode="x", mask=None).has_same_examples(named(a=X, scale=1.0, mode="x", mask=None))


def test_inputs_without_a_batch_axis() -> None:
    table = torch.arange(5.0)
    batches = [Batch((X[:4], table), {}, None, 4), Batch((X[4:], table), {}, None, 4)]
    others = [Batch((X[:4], table), {}, None, 4), Batch((X[4:], table + 1), {}, None, 4)]
    assert not DataDigest.of(batches).has_same_examples(DataDigest.of(others))


@pytest.mark.parametrize("x", [torch.zeros(4, 0), torch.ones(4, dtype=torch.bfloat16), X[:4].to_sparse(), X[:4].mT])
def test_every_kind_of_tensor_has_a_digest(x: Tensor) -> None:
    assert len(DataDigest.of([Batch((x,), {}, None, len(x))]).in_order) == 64
