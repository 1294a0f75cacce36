"""Data sets that are read example by example: selection of dict entries, and stacking of examples into batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from ifcomp.data.batches import LABEL_KEY, LABEL_KEYS, map_tensors
from ifcomp.data.forms.base import BATCH_SIZE, DataRequest
from ifcomp.errors import DataError


@dataclass(frozen=True)
class Selection:
    """Entries of a dict example that are used.

    Attributes:
        inputs: Names of the inputs; None keeps all entries, for a collator that builds the inputs.
        label: Name of the label, or None.
        is_positional: Whether the only input is passed without its name.
    """

    inputs: tuple[str, ...] | None
    label: str | None
    is_positional: bool = False

    def __call__(self, row: Mapping[str, Any]) -> Any:
        """Return the example with its selected entries. The label is named ``labels``, unless all entries are kept."""
        if self.inputs is None:
            return dict(row)
        if self.is_positional:
            x = row[self.inputs[0]]
            return x if self.label is None else (x, row[self.label])
        selected = {name: row[name] for name in self.inputs}
        return selected if self.label is None else {**selected, LABEL_KEY: row[self.label]}


def select_entries(row: Mapping[str, Any], request: DataRequest) -> Selection:
    """Choose the entries of a dict example that the model takes.

    These are the arguments of ``forward``. If no entry has the name of an argument, a collator receives all entries, a
    ``forward`` with ``**kwargs`` all numeric entries, and a model with one input the only numeric entry.

    Raises:
        DataError: If no entry can be an input, or two entries could be the label.
    """
    labels = [name for name in LABEL_KEYS if name in row]
    if len(labels) > 1:
        raise DataError(f"The entries {' and '.join(map(repr, labels))} could both be the label. Remove one.")
    label = labels[0] if labels else None
    names, takes_any = request.keywords()
    others = [name for name in row if name != label]
    inputs = tuple(name for name in others if name in names)
    numeric = tuple(name for name in others if _is_numeric(row[name]))
    if inputs:
        return Selection(inputs, label)
    if request.collate_fn is not None:
        return Selection(None, label)
    if numeric and takes_any:
        return Selection(numeric, label)
    if len(numeric) == 1:
        return Selection(numeric, label, is_positional=True)
    raise DataError(
        f"The examples have the entries {', '.join(map(repr, row))}, but forward of the model takes "
        f"{', '.join(sorted(names))}. Rename or compute the inputs, for instance with a tokenizer, or give "
        "IFComp(model, collate_fn=...)."
    )


def _is_numeric(value: Any) -> bool:
    """Whether an entry is a number, an array or a nested list of numbers."""
    while isinstance(value, list | tuple) and value:
        value = value[0]
    return isinstance(value, Tensor | int | float | np.number) or (
        isinstance(value, np.ndarray) and value.dtype.kind in "fiub"
    )


class SelectedRows(Dataset[Any]):
    """The examples of a data set of dicts, with selected entries."""

    def __init__(self, dataset: Any, select: Selection) -> None:
        self.dataset, self.select = dataset, select

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.select(self.dataset[index])

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """Read several examples at once, if the data set can."""
        read = getattr(self.dataset, "__getitems__", None)
        rows = read(indices) if callable(read) else [self.dataset[index] for index in indices]
        return [self.select(row) for row in rows]


@dataclass(frozen=True)
class Stack:
    """Default collate function.

    Attributes:
        dtype: Type of all floating-point tensors; None keeps their types.
    """

    dtype: torch.dtype | None = None

    def __call__(self, examples: Sequence[Any]) -> Any:
        """Stack examples into a batch.

        Raises:
            DataError: If the examples have different shapes, or are not numbers.
        """
        try:
            batch = default_collate(list(examples))
        except (RuntimeError, TypeError, ValueError, KeyError) as error:
            reason = str(error).partition("\n")[0]
            raise DataError(
                f"The examples cannot be stacked into a batch ({reason}). Give all examples one shape and convert "
                "images to tensors, or give IFComp(model, collate_fn=...), for instance a DataCollatorWithPadding of "
                "transformers."
            ) from error
        return batch if self.dtype is None else map_tensors(self._cast, batch)

    def _cast(self, value: Tensor) -> Tensor:
        return value.to(self.dtype) if value.is_floating_point() else value


def batch_rows(dataset: Any, request: DataRequest, dtype: torch.dtype | None = None) -> DataLoader[Any]:
    """Put the examples of a data set into batches, in order.

    Args:
        dataset: Map-style data set.
        request: Its collate function is used if there is one.
        dtype: Type of floating-point tensors that are stacked here; None keeps their types.
    """
    return DataLoader(dataset, BATCH_SIZE, collate_fn=request.collate_fn or Stack(dtype))
