"""Detection of random transforms and shuffling: the same examples are read twice and compared."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from ifcomp.data.forms.base import Data, Slices, kept_random_state
from ifcomp.errors import DataError

#: Examples of a data set that are read twice.
_TRIALS = 8

#: Largest relative and absolute difference of floats between two reads.
_TOLERANCES = {"rtol": 1e-4, "atol": 1e-6}


def check_repeatable(data: Data, *, in_order: bool) -> None:
    """Raise DataError if a second read of the same examples gives other inputs or labels.

    A few examples of the data set of a DataLoader without workers are read. Other batches are compared only where the
    order matters, by the first batch. Lists and iterators are not read.

    Args:
        data: The data.
        in_order: Whether the examples must come in the same order each time.
    """
    batches = data.batches
    if isinstance(batches, DataLoader) and batches.num_workers:
        return  # a data set may depend on the worker process
    if isinstance(batches, DataLoader) and not isinstance(batches.dataset, IterableDataset):
        with kept_random_state():
            dataset: Any = batches.dataset
            for index in _spread(len(dataset)):
                if not _is_same(dataset[index], dataset[index]):
                    raise _not_repeatable(f"Example {index} of the data differs")
    elif in_order and not isinstance(batches, list | Slices | Iterator):
        with kept_random_state():
            if not _is_same(next(iter(batches), None), next(iter(batches), None)):
                raise _not_repeatable("The first batch of the data differs")


def _not_repeatable(what: str) -> DataError:
    return DataError(
        f"{what} when it is read a second time: the data is shuffled, or its inputs are transformed at random. Give "
        "data that is the same each time: shuffle=False, and the transforms of the evaluation."
    )


def _spread(count: int) -> list[int]:
    """Positions of a few examples between the first and the last."""
    return sorted({round(step * (count - 1) / (_TRIALS - 1)) for step in range(_TRIALS)}) if count else []


def _is_same(first: Any, second: Any) -> bool:
    """Whether two examples or batches are equal. Values that are not numbers, texts or arrays count as equal."""
    if type(first) is not type(second):
        return False
    if isinstance(first, Mapping):
        return first.keys() == second.keys() and all(_is_same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(_is_same, first, second))
    if isinstance(first, np.ndarray):
        return first.dtype.kind not in "fiub" or _is_same(
            torch.from_numpy(first.copy()), torch.from_numpy(second.copy())
        )
    if isinstance(first, Tensor):
        return _is_same_tensor(first, second)
    if isinstance(first, float):
        return math.isnan(first) or math.isclose(
            first, second, rel_tol=_TOLERANCES["rtol"], abs_tol=_TOLERANCES["atol"]
        )
    return not isinstance(first, int | str) or first == second


def _is_same_tensor(first: Tensor, second: Tensor) -> bool:
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if not first.is_floating_point():
        return torch.equal(first, second)
    return torch.allclose(first, second, equal_nan=True, **_TOLERANCES)
