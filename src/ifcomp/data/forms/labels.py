"""Labels in any form of arrays, as a tensor with class names where they are known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import torch
from pandas.api.types import is_integer_dtype
from torch import Tensor

from ifcomp.errors import LabelError


def read_labels(labels: Any) -> tuple[Tensor, tuple[str, ...] | None]:
    """Return the labels as a tensor, and the names of the classes if the labels are categories of pandas.

    Whether they are one class per example is not checked here.

    Raises:
        LabelError: If the labels are texts, missing, or no array.
    """
    if isinstance(labels, Tensor):
        return labels, None
    if isinstance(labels, pd.Series | pd.Categorical | pd.Index):
        return _read_series(pd.Series(labels))
    try:
        array = np.asarray(labels)
    except ValueError as error:
        raise LabelError(f"Labels must be one integer per example, but have different lengths ({error}).") from error
    if array.dtype.kind not in "iufb":
        raise LabelError(
            f"Labels must be integers from 0, but are a {type(labels).__name__} of {array.dtype}. Number the classes "
            "in the order of the logits of the model."
        )
    return torch.from_numpy(array.astype(np.int64 if array.dtype.kind in "iu" else array.dtype.newbyteorder("="))), None


def _read_series(labels: pd.Series) -> tuple[Tensor, tuple[str, ...] | None]:
    if labels.isna().any():
        raise LabelError(f"{int(labels.isna().sum())} of {len(labels)} labels are missing. Leave these examples out.")
    if isinstance(labels.dtype, pd.CategoricalDtype) and not is_integer_dtype(labels.dtype.categories):
        names = tuple(map(str, labels.dtype.categories))
        return torch.from_numpy(labels.cat.codes.to_numpy(np.int64, copy=True)), names
    if isinstance(labels.dtype, pd.CategoricalDtype) or is_integer_dtype(labels.dtype):
        return torch.from_numpy(labels.to_numpy(np.int64, copy=True)), None
    array = labels.to_numpy()
    if array.dtype.kind not in "fb":
        raise LabelError(
            f"Labels must be integers from 0, but the column is {labels.dtype}. Give "
            "labels.astype(pandas.CategoricalDtype(class_names)), with the names in the order of the logits."
        )
    return torch.from_numpy(array.copy()), None
