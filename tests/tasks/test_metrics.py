"""AUROC against values computed by hand."""

import math

import pytest
import torch

from ifcomp.errors import DataError
from ifcomp.tasks.metrics import auroc


def test_auroc_by_hand() -> None:
    """Three of four pairs are in order, one is a tie."""
    assert auroc([1.0, 2.0, 2.0, 3.0], [False, False, True, True]) == pytest.approx(3.5 / 4)
    assert auroc(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([False, False, True])) == 1


def test_unusable_scores_are_refused() -> None:
    with pytest.raises(DataError, match="one kind"):
        auroc([1.0, 2.0], [True, True])
    with pytest.raises(DataError, match="one shape"):
        auroc([1.0, 2.0], [True])
    with pytest.raises(DataError, match="1 of 2 are NaN"):
        auroc([1.0, math.nan], [True, False])
