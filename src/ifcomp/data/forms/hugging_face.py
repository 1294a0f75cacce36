"""Data sets of the package ``datasets`` of Hugging Face. The package is not imported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ifcomp.data.batches import LABEL_KEYS
from ifcomp.data.forms.base import Data, DataRequest, is_from, kept_random_state
from ifcomp.data.forms.rows import SelectedRows, Selection, batch_rows, select_entries
from ifcomp.errors import DataError, LabelError


def from_hugging_face(data: Any, request: DataRequest) -> Data | None:
    """Read a ``datasets.Dataset``, with or without a format or transform.

    The label is the column ``label`` or ``labels``. The inputs are the columns that ``forward`` takes, see
    `select_entries`; other columns are ignored.

    Raises:
        DataError: If it is a stream or several splits, or no column is an input.
        LabelError: If the labels are texts.
    """
    if is_from("datasets", "DatasetDict", data) or is_from("datasets", "IterableDatasetDict", data):
        splits = ", ".join(map(repr, data))
        raise DataError(f"A DatasetDict has several splits: {splits}. Give one of them, such as data['train'].")
    if is_from("datasets", "IterableDataset", data):
        raise DataError(
            "A streamed data set cannot be read by position. Load it without streaming=True, or give a DataLoader."
        )
    if not is_from("datasets", "Dataset", data):
        return None
    if not len(data):
        return Data([])
    with kept_random_state():
        selection = select_entries(data[0], request)
    _check_label(data, selection.label)
    rows = SelectedRows(_formatted(data, selection, request), selection)
    names = getattr(data.features.get(selection.label), "names", None)
    classes = tuple(map(str, names)) if isinstance(names, list) else None
    return Data(batch_rows(rows, request, request.dtype), classes, _texts(data))


def _check_label(data: Any, label: str | None) -> None:
    if label is not None and getattr(data.features.get(label), "dtype", None) in ("string", "large_string"):
        raise LabelError(
            f"Labels must be integers from 0, but column '{label}' has texts. Number them in the order of the logits "
            f"of the model, for instance with data.class_encode_column('{label}')."
        )


def _formatted(data: Any, selection: Selection, request: DataRequest) -> Any:
    """Return the data set with tensors in the selected columns. A transform of the user stays."""
    kind = data.format["type"]
    if kind == "custom" or selection.inputs is None:
        return data
    columns = [*selection.inputs, *([] if selection.label is None else [selection.label])]
    if request.collate_fn is not None or kind == "torch":
        return data.with_format(kind, columns=columns, **data.format["format_kwargs"])
    return data.with_format("torch", columns=columns)


def _texts(data: Any) -> Callable[[], Sequence[str]] | None:
    """Return a function for the texts of the examples, if exactly one column has texts."""
    columns = [
        name
        for name, feature in data.features.items()
        if getattr(feature, "dtype", None) in ("string", "large_string") and name not in LABEL_KEYS
    ]
    return (lambda: list(map(str, data.with_format(None)[columns[0]]))) if len(columns) == 1 else None
