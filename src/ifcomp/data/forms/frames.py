"""Tables of pandas: a DataFrame with a label column, or a DataFrame and its labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from pandas.api.types import is_numeric_dtype
from torch import Tensor

from ifcomp.data.forms.arrays import check_lengths
from ifcomp.data.forms.base import Data, DataRequest, Slices
from ifcomp.data.forms.labels import read_labels
from ifcomp.errors import DataError

#: Names of the label column of a DataFrame that is given without labels.
LABEL_COLUMNS = ("label", "labels", "target")


def from_frame(data: Any, request: DataRequest) -> Data | None:
    """Read a DataFrame, or ``(DataFrame, y)``.

    The features are all numeric columns in order, or the columns of the fit in the order of the fit. Without y, the
    column ``label``, ``labels`` or ``target`` has the labels.

    Raises:
        DataError: If columns are missing or not numeric, or the index of the labels differs from that of the table.
    """
    parts = data if isinstance(data, tuple) else (data,)
    if not (len(parts) in (1, 2) and isinstance(parts[0], pd.DataFrame)):
        return None
    frame = parts[0]
    label = label_column(frame, request) if len(parts) == 1 else None
    columns = feature_columns(frame, label, request)
    y = parts[1] if len(parts) == 2 else None if label is None else frame[label]
    labels, class_names = (None, None) if y is None else _read_labels(frame, y)

    def fetch(rows: slice) -> Any:
        x = frame_inputs(frame.iloc[rows], columns, request.dtype)
        return x if labels is None else (x, labels[rows])

    is_named = not isinstance(frame.index, pd.RangeIndex)
    names = (lambda: [str(name) for name in frame.index]) if is_named else None
    return Data(Slices(fetch, len(frame)), class_names, names, tuple(map(str, columns)))


def _read_labels(frame: pd.DataFrame, y: Any) -> tuple[Tensor, tuple[str, ...] | None]:
    if isinstance(y, pd.Series) and len(y) == len(frame) and not y.index.equals(frame.index):
        raise DataError(
            "The index of the labels differs from the index of the table, so rows may not match. Give "
            "y.loc[X.index], or call reset_index(drop=True) on both if the order is the same."
        )
    labels, class_names = read_labels(y.to_numpy() if isinstance(y, pd.DataFrame) else y)
    check_lengths(len(frame), labels)
    return labels, class_names


def label_column(frame: pd.DataFrame, request: DataRequest) -> Any:
    """Return the name of the label column, or None.

    Raises:
        DataError: If several columns could be the labels.
    """
    found = [name for name in LABEL_COLUMNS if name in frame.columns and name not in (request.columns or ())]
    if len(found) > 1:
        raise DataError(f"The columns {_quote(found)} could all be the labels. Give (X, y) instead of one table.")
    return found[0] if found else None


def feature_columns(frame: pd.DataFrame, label: Any, request: DataRequest) -> list[Any]:
    """Return the columns of the features: those of the fit, or all but the label.

    Raises:
        DataError: If columns of the fit are missing, or columns are not numeric or not unique.
    """
    present = [name for name in frame.columns if label is None or name != label]
    duplicates = sorted({str(name) for name in present if present.count(name) > 1})
    if duplicates:
        raise DataError(f"Several columns have the name {_quote(duplicates)}. Rename them.")
    by_name = {str(name): name for name in present}
    missing = [name for name in request.columns or () if name not in by_name]
    if missing:
        kind = "column" if len(missing) == 1 else "columns"
        raise DataError(f"The table has no {kind} {_quote(missing)}. The fit used {_quote(request.columns or ())}.")
    chosen = present if request.columns is None else [by_name[name] for name in request.columns]
    other = [str(name) for name in chosen if not is_numeric_dtype(frame[name].dtype)]
    if other or not chosen:
        kind = f"{_quote(other)} of the table is not numeric" if other else "The table has no column with features"
        raise DataError(
            f"{'Column ' if other else ''}{kind}. Encode texts and categories as numbers as in the training of the "
            "model, or leave such columns out. If one of them is the label, give (X, y)."
        )
    return chosen


def frame_inputs(frame: pd.DataFrame, columns: Sequence[Any], dtype: torch.dtype) -> Tensor:
    """Return the features [N, F] of a table as floats. Empty cells become NaN."""
    return torch.from_numpy(frame[list(columns)].to_numpy(np.float64, copy=True, na_value=np.nan)).to(dtype)


def _quote(names: Sequence[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:10])
    return shown if len(names) <= 10 else f"{shown} and {len(names) - 10} more"
