"""Selection of examples by position."""

import pytest
import torch

from ifcomp.data.selection import select_examples
from ifcomp.errors import DataError

X, Y = torch.arange(12.0).view(6, 2), torch.arange(6)


def test_examples_come_in_the_order_of_the_positions() -> None:
    x, y = select_examples([(X[:4], Y[:4]), (X[4:], Y[4:])], [5, 0, 3])
    assert torch.equal(x, X[[5, 0, 3]])
    assert y.tolist() == [5, 0, 3]


def test_dicts_are_selected_by_key() -> None:
    x, y = select_examples([{"a": X[:4], "labels": Y[:4]}, {"a": X[4:], "labels": Y[4:]}], [4, 1])
    assert torch.equal(x["a"], X[[4, 1]])
    assert y.tolist() == [4, 1]


def test_inputs_of_different_shapes_are_refused() -> None:
    with pytest.raises(DataError, match=r"different shapes.* pad texts to the same length in every batch"):
        select_examples([(X[:4], Y[:4]), (X[4:, :1], Y[4:])], [0, 5])


def test_positions_outside_the_data_are_refused() -> None:
    with pytest.raises(DataError, match=r"There is no example 6: the data has 6 examples, 0 \.\.\. 5\."):
        select_examples([(X[:4], Y[:4]), (X[4:], Y[4:])], [0, 6])
