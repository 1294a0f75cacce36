"""Selection of single examples from batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ifcomp.data.batches import as_batches
from ifcomp.errors import DataError


def select_examples(data: Iterable[Any], positions: Sequence[int]) -> tuple[Any, Tensor]:
    """Return inputs and labels of the examples at the given positions, in that order. One pass over the data.

    Args:
        data: Labelled batches.
        positions: Positions in the data.

    Raises:
        DataError: If a position is outside the data, or the inputs have different shapes, such as texts of different
            lengths.
    """
    selected: dict[int, tuple[Any, Tensor]] = {}
    size = 0
    for batch in as_batches(data):
        size = batch.position + batch.size
        for position in set(positions).intersection(range(batch.position, batch.position + batch.size)):
            example = batch.select(slice(position - batch.position, position - batch.position + 1))
            assert example.labels is not None
            selected[position] = example.inputs, example.labels
    missing = sorted(set(positions) - selected.keys())
    if missing:
        raise DataError(f"There is no example {missing[0]:,}: the data has {size:,} examples, 0 ... {size - 1:,}.")
    inputs, labels = zip(*(selected[position] for position in positions), strict=True)
    try:
        if isinstance(inputs[0], dict):
            return {key: torch.cat([item[key] for item in inputs]) for key in inputs[0]}, torch.cat(labels)
        return torch.cat(inputs), torch.cat(labels)
    except (RuntimeError, TypeError) as error:
        raise DataError(
            "The inputs have different shapes, such as texts of different lengths. Give all of them one shape: pad "
            "texts to the same length in every batch."
        ) from error
