"""Arrays and tensors in memory: ``(X, y)``, ``X`` and dicts of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from ifcomp.data.batches import LABEL_KEY, LABEL_KEYS
from ifcomp.data.forms.base import Data, DataRequest, Slices
from ifcomp.data.forms.labels import read_labels
from ifcomp.errors import DataError, LabelError


def from_arrays(data: Any, request: DataRequest) -> Data | None:
    """Read ``X``, ``(X,)``, ``(X, y)`` or a dict of arrays. X is an array or a tensor [N, ...].

    A list is never read as arrays, because it is a list of batches.
    """
    if isinstance(data, Tensor | np.ndarray):
        return _pair(data, None, request)
    if isinstance(data, tuple) and len(data) in (1, 2) and isinstance(data[0], Tensor | np.ndarray):
        return _pair(data[0], data[1] if len(data) == 2 else None, request)
    if isinstance(data, Mapping) and data and all(isinstance(value, Tensor | np.ndarray) for value in data.values()):
        return _columns(data, request)
    return None


def as_tensor(values: Any, dtype: torch.dtype) -> Any:
    """Convert a NumPy array to a tensor of the model's type: floats to ``dtype``, integers to int64.

    ``uint8`` is kept, because its scale is unknown. Tensors are returned unchanged.

    Raises:
        DataError: If the array has no numbers.
    """
    if not isinstance(values, np.ndarray):
        return values
    if values.dtype.kind not in "fiub":
        raise DataError(f"Inputs must be numbers, but the array has dtype {values.dtype}. Convert it to float32.")
    if values.dtype.kind == "f":
        return torch.from_numpy(values.astype(np.float64 if dtype == torch.float64 else np.float32)).to(dtype)
    return torch.from_numpy(values.astype(values.dtype if values.dtype in (np.uint8, np.bool_) else np.int64))


def check_lengths(inputs: int, labels: Tensor) -> None:
    """Raise LabelError if there is not one label per example."""
    if not labels.dim() or len(labels) != inputs:
        raise LabelError(
            f"A tuple is read as (X, y), but X has {inputs} examples and y has shape {list(labels.shape)}. Give one "
            "label per example. Put batches into a list."
        )


def _pair(x: Any, y: Any, request: DataRequest) -> Data:
    if not x.ndim:
        raise DataError("X must be an array [N, ...] of examples, but has no axis.")
    if y is None:
        return Data(Slices(lambda rows: as_tensor(x[rows], request.dtype), len(x)))
    if isinstance(y, pd.DataFrame):
        y = y.to_numpy()
    labels, class_names = read_labels(y)
    check_lengths(len(x), labels)
    return Data(Slices(lambda rows: (as_tensor(x[rows], request.dtype), labels[rows]), len(x)), class_names)


def _columns(data: Mapping[str, Any], request: DataRequest) -> Data:
    """Read a dict of arrays as the keyword inputs of all examples."""
    lengths = {str(name): len(values) if values.ndim else 0 for name, values in data.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(
            f"A dict of arrays must have one row per example in each of them, but the lengths are {lengths}. Put a "
            "single batch into a list: [batch]."
        )
    label = next((name for name in LABEL_KEYS if name in data), None)

    def fetch(rows: slice) -> dict[str, Any]:
        batch = {name: as_tensor(values[rows], request.dtype) for name, values in data.items() if name != label}
        return batch if label is None else {**batch, LABEL_KEY: read_labels(data[label][rows])[0]}

    return Data(Slices(fetch, next(iter(lengths.values()))))
