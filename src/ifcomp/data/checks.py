"""Checks of the user's data before it reaches the model: form, order, inputs and labels."""

from __future__ import annotations

import itertools
import operator
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ifcomp.data.batches import LABEL_KEY, Batch
from ifcomp.data.loaders import is_shuffled
from ifcomp.errors import DataError, IfcompWarning, LabelError, LengthChangedError, NonFiniteError

#: Largest deviation of a row of soft labels from a sum of 1.
_SUM_TOLERANCE = 1e-2


def check_endless(data: Any) -> None:
    """Raise DataError if the data is known to be endless."""
    if isinstance(data, itertools.cycle) or (isinstance(data, itertools.repeat) and operator.length_hint(data, -1) < 0):
        raise DataError(
            f"The data never ends: it is an itertools.{type(data).__name__}. Pass the batches themselves, or "
            "ifcomp.data.loaders.FirstExamples(data, count)."
        )


def check_data(data: Any) -> None:
    """Raise DataError if the data is a single batch, not iterable, or known to be endless."""
    check_endless(data)
    if isinstance(data, Tensor | tuple | Mapping | str) or not isinstance(data, Iterable):
        raise DataError(
            f"Data must be batches: a DataLoader or a list of (x, y), but is a {type(data).__name__}. "
            "Put a single batch into a list: [(x, y)]."
        )


def check_not_shuffled(data: Any) -> None:
    """Raise DataError if a checkpoint is requested for a DataLoader that shuffles."""
    if is_shuffled(data):
        raise DataError(
            "A checkpoint needs the data in the same order on every pass, but the DataLoader shuffles. Create it with "
            "shuffle=False."
        )


def check_same_order(data: Any, reader: str) -> None:
    """Raise an error if data that is read twice is an iterator or a DataLoader that shuffles.

    Args:
        data: The data.
        reader: Subject of the message.

    Raises:
        LengthChangedError: If it is an iterator.
        DataError: If it shuffles.
    """
    if isinstance(data, Iterator):
        raise LengthChangedError(
            f"{reader} reads the data twice, but a {type(data).__name__} can be iterated over only once. Give a "
            "DataLoader or a list of batches."
        )
    if is_shuffled(data):
        raise DataError(
            f"{reader} reads the data twice in the same order, but the DataLoader shuffles. Create it with "
            "shuffle=False."
        )


def check_reiterable(data: Any, work: str) -> None:
    """Raise DataError if the data is an iterator.

    Args:
        data: The batches.
        work: Start of the message: the work that reads the data several times.
    """
    if isinstance(data, Iterator):
        raise DataError(
            f"{work}, but an iterator is exhausted after one pass. Give a DataLoader, a list of batches, or an object "
            "whose __iter__ starts anew."
        )


def warn_if_shuffled(data: Any) -> None:
    """Warn if the rows of a score table would be in random order."""
    if is_shuffled(data):
        warnings.warn(
            "The DataLoader shuffles, so row i of the table is not example i of the data set. Score a DataLoader with "
            "shuffle=False.",
            IfcompWarning,
            stacklevel=4,
        )


def check_inputs(batch: Batch) -> None:
    """Raise NonFiniteError if an input has a NaN or infinite value."""
    for index, value in enumerate(batch.tensors()):
        if value.is_floating_point() and not _all_finite(value):
            mask = (~value.isfinite()).reshape(len(value), -1).any(1) if value.dim() else ~value.isfinite().reshape(1)
            raise NonFiniteError(
                f"{batch.name}: input tensor {index} has a NaN or infinite value, first in "
                f"{batch.describe_example(mask)} of the batch. Clean the data, or leave the example out."
            )


def _all_finite(value: Tensor) -> bool:
    """Whether all elements are finite. A finite sum proves it in a tenth of the time; sums can overflow."""
    return bool(value.sum().isfinite()) or bool(value.isfinite().all())


def check_labels(batch: Batch, num_classes: int) -> Tensor:
    """Return the labels [B] as int64.

    Raises:
        LabelError: If labels are missing, not one class per example, or outside 0 ... ``num_classes`` - 1.
    """
    name, labels = batch.name, check_labelled(batch)
    if len(labels) != batch.size:
        raise LabelError(f"{name}: {len(labels)} labels for {batch.size} examples. Give each example one label.")
    labels = labels.long()
    invalid = (labels < 0) | (labels >= num_classes)
    if invalid.any():
        raise LabelError(
            f"{name}: label {int(labels[invalid][0])} at {batch.describe_example(invalid)} of the batch is outside "
            f"0 ... {num_classes - 1}, the range of this model with {num_classes} logits. Number the classes from 0, "
            "and leave out examples without a label, such as those marked -1 or -100."
        )
    return labels


def check_labelled(batch: Batch) -> Tensor:
    """Return the labels as given. Raise LabelError if they are missing or not one class per example."""
    if batch.labels is None:
        raise LabelError(
            f"{batch.name}: labels are needed here, but the batch has none. Give (x, y), dicts with '{LABEL_KEY}', or "
            "a table with a column 'label'."
        )
    check_label_form(batch)
    return batch.labels


def check_label_form(batch: Batch) -> None:
    """Raise LabelError if the labels are not one class per example. Their range is not checked.

    The message names the kind of target: regression, multi-label, one-hot or soft labels.
    """
    labels = batch.labels
    if labels is None or (labels.dim() == 1 and _is_integer(labels.dtype)):
        return
    raise LabelError(
        f"{batch.name}: labels must be integers of shape [{batch.size}], one class per example, but are "
        f"{labels.dtype} of shape {list(labels.shape)}{describe_targets(labels)}"
    )


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def describe_targets(labels: Tensor) -> str:
    """End of the message about labels that are not integers [B]: kind of target and remedy."""
    if labels.dtype.is_complex or not labels.dim() or not labels.numel():
        return ". Number the classes from 0."
    values = labels.detach().double().cpu()
    is_whole = bool((values == values.round()).all())
    if values.numel() == len(values):  # [B], [B, 1], ...
        if is_whole:
            return f". If they are classes, use labels{'.flatten()' if values.dim() > 1 else ''}.long()."
        return ": regression targets. Only classifiers are supported; divide the range into classes and train on these."
    if values.dim() > 2:
        return ". Targets of several positions per example are not supported; give one class per example."
    if not bool(((values >= 0) & (values <= 1)).all()):
        kind = "several labels per example" if is_whole else "regression targets with several outputs"
        return f": {kind}. Only classifiers with one class per example are supported."
    sums = values.sum(1)
    if is_whole and bool((sums == 1).all()):
        return ": one-hot rows. Use labels.argmax(1) if every example has exactly one class."
    if not is_whole and bool((sums - 1).abs().max() < _SUM_TOLERANCE):
        return ": soft labels, one distribution per example. Use labels.argmax(1), the most probable class."
    return (
        ": multi-label targets, several classes or none per example. A model of independent sigmoids is not a "
        "softmax classifier. Fit one binary classifier per class, with logits torch.stack([zeros_like(z), z], 1)."
    )
