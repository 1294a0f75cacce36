"""Every form of data that a verb accepts, turned into re-iterable batches by `as_data`.

One function per form returns `Data`, or None if the object has another form. A new form is one function and one entry
of `FORMS`. Optional packages are recognised by the names of types and are not imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor

from ifcomp.data.batches import Batch, as_batch
from ifcomp.data.checks import check_endless
from ifcomp.data.forms.arrays import as_tensor, from_arrays
from ifcomp.data.forms.base import Data, DataRequest
from ifcomp.data.forms.frames import feature_columns, frame_inputs, from_frame, label_column
from ifcomp.data.forms.hugging_face import from_hugging_face
from ifcomp.data.forms.labels import read_labels
from ifcomp.data.forms.repeats import check_repeatable
from ifcomp.data.forms.torch_data import from_dataset, from_loader
from ifcomp.errors import DataError

__all__ = ["Data", "DataRequest", "as_data", "as_inputs", "check_repeatable"]


def from_batches(data: Any, request: DataRequest) -> Data | None:
    """Take an iterable of batches as it is.

    Raises:
        DataError: If it never ends, or is a list ``[X, y]`` of arrays.
    """
    check_endless(data)
    if not isinstance(data, Iterable) or isinstance(data, str | bytes | tuple | Mapping):
        return None
    if isinstance(data, list) and len(data) == 2 and _is_array_and_labels(*data):
        raise DataError(
            "A list is read as batches, but [X, y] has inputs and labels. Give the tuple (X, y), or put the batch into "
            "a list: [(x, y)]."
        )
    return Data(data)


def _is_array_and_labels(x: Any, y: Any) -> bool:
    """Whether two arrays cannot be batches of one model, and look like inputs and labels."""
    if not (isinstance(x, Tensor | np.ndarray | pd.DataFrame) and isinstance(y, Tensor | np.ndarray | pd.Series)):
        return False
    return y.ndim == 1 < x.ndim and len(x) == len(y)


#: All forms. The first function that recognises the data reads it.
FORMS: tuple[Callable[[Any, DataRequest], Data | None], ...] = (
    from_loader,
    from_frame,
    from_hugging_face,
    from_dataset,
    from_arrays,
    from_batches,
)


def as_data(data: Any, request: DataRequest) -> Data:
    """Turn any form of data into re-iterable batches. `Data` is returned unchanged.

    Args:
        data: DataLoader, Dataset, arrays ``(X, y)`` or ``X``, dict of arrays, table of pandas, data set of Hugging
            Face, or any re-iterable of batches.
        request: Requirements of the model on the batches.

    Raises:
        DataError: If the data has another form. The message names it.
    """
    if isinstance(data, Data):
        return data
    for read in FORMS:
        found = read(data, request)
        if found is not None:
            return found
    remedy = "Put a single batch into a list: [(x, y)]"
    if isinstance(data, str | os.PathLike):
        remedy = "Read the file first, such as with pandas.read_csv"
    raise DataError(
        f"Data must be batches (a DataLoader, or a list of (x, y)), a Dataset, arrays (X, y), a DataFrame or a Hugging "
        f"Face Dataset, but is {_describe(data)}. {remedy}."
    )


def as_inputs(x: Any, labels: Any, request: DataRequest) -> Batch:
    """Convert the inputs of a call, such as those of `IFComp.influence`: also a NumPy array or a table of pandas.

    Args:
        x: Inputs in a form that `ifcomp.data.batches.as_batch` accepts, an array or a DataFrame.
        labels: Labels [B], or None.
        request: Requirements of the model on the batches.
    """
    if isinstance(x, pd.DataFrame):
        x = frame_inputs(x, feature_columns(x, label_column(x, request), request), request.dtype)
    if isinstance(labels, pd.Series | pd.Categorical):
        labels = read_labels(labels)[0]
    return as_batch(as_tensor(x, request.dtype), labels=labels)


def _describe(data: Any) -> str:
    if not isinstance(data, list | tuple):
        return f"a {type(data).__name__}"
    kinds = ", ".join(type(item).__name__ for item in data[:3])
    return f"a {type(data).__name__} of length {len(data)} ({kinds})"
