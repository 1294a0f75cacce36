"""What users hand in, ``(x, y)``, ``(x,)``, ``x`` or a dict, as one form; and the model's output as logits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ifcomp.errors import DataError, LabelError, LogitsError, NonFiniteError, PrecisionError

#: The key of a dict batch that holds the labels; everything else is passed to the model by keyword.
LABEL_KEY = "labels"


@dataclass(frozen=True)
class Batch:
    """One batch.

    Attributes:
        args: Positional inputs of the model.
        kwargs: Keyword inputs of the model.
        labels: [B] integers, or None.
        size: B.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    labels: Tensor | None
    size: int

    def tensors(self) -> Iterator[Tensor]:
        """All input tensors."""
        return (value for value in (*self.args, *self.kwargs.values()) if isinstance(value, Tensor))

    def select(self, index: slice | Tensor) -> Batch:
        """The examples at ``index``; inputs without a batch axis stay as they are."""

        def pick(value: Any) -> Any:
            return value[index] if isinstance(value, Tensor) and value.dim() and len(value) == self.size else value

        kwargs = {key: pick(value) for key, value in self.kwargs.items()}
        labels = None if self.labels is None else self.labels[index]
        size = len(range(self.size)[index]) if isinstance(index, slice) else len(index)
        return Batch(tuple(pick(value) for value in self.args), kwargs, labels, size)

    def split(self, size: int) -> Iterator[Batch]:
        """Consecutive pieces of at most ``size`` examples."""
        return (self.select(slice(start, min(start + size, self.size))) for start in range(0, self.size, size))

    def to(self, device: torch.device) -> Batch:
        """The batch on the model's device, usable for autograd."""

        def move(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            with torch.inference_mode(False):
                value = value.to(device, non_blocking=True)
                return value.clone() if value.is_inference() else value

        return Batch(
            tuple(map(move, self.args)),
            {key: move(value) for key, value in self.kwargs.items()},
            self.labels,
            self.size,
        )


def as_batch(item: Any, labels: Any = None) -> Batch:
    """Read one item of a loader, or the inputs given to a scoring call.

    Args:
        item: ``(x, y)``, ``(x,)``, ``x``, or a mapping whose ``labels`` entry, if any, is the label.
        labels: Labels that come beside the item.

    Raises:
        DataError: If the item is none of these.
    """
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(item, Mapping):
        kwargs = {str(key): value for key, value in item.items() if key != LABEL_KEY}
        labels = item.get(LABEL_KEY) if labels is None else labels
    elif isinstance(item, list | tuple) and len(item) in (1, 2):
        args = (item[0],)
        labels = item[1] if len(item) == 2 else labels
    elif isinstance(item, Tensor):
        args = (item,)
    else:
        described = f"a {type(item).__name__}" + (f" of {len(item)}" if isinstance(item, list | tuple) else "")
        raise DataError(
            f"A batch must be a tensor x, (x,), (x, y) or a dict of keyword inputs with '{LABEL_KEY}', but got "
            f"{described}. "
            "For a model with several inputs yield dicts."
        )
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.dim()]
    if not tensors:
        raise DataError(
            "A batch has no input tensor with a batch axis; convert arrays and lists with torch.as_tensor and stack "
            "examples."
        )
    return Batch(args, kwargs, None if labels is None else torch.as_tensor(labels), len(tensors[0]))


def check_inputs(batch: Batch, where: str) -> None:
    """Raise NonFiniteError if an input has a NaN or an infinity."""
    for index, value in enumerate(batch.tensors()):
        if value.is_floating_point() and not value.isfinite().all():
            example = int((~value.reshape(len(value), -1).isfinite()).any(1).nonzero()[0])
            raise NonFiniteError(
                f"{where}: input tensor {index} has a NaN or infinite value, first in example {example} of the batch. "
                "Clean the data, or leave the example out."
            )


def check_labels(labels: Tensor | None, num_classes: int, size: int, where: str) -> Tensor:
    """Return labels as [B] int64, or raise LabelError."""
    if labels is None:
        raise LabelError(
            f"{where}: labels are needed here, but the batch has none. Yield (x, y), or dicts with '{LABEL_KEY}'."
        )
    if labels.dtype.is_floating_point or labels.dtype.is_complex or labels.dtype == torch.bool or labels.dim() != 1:
        raise LabelError(
            f"{where}: labels must be integers of shape [{size}], but are {labels.dtype} of shape "
            f"{list(labels.shape)}. "
            "For one-hot labels use labels.argmax(1)."
        )
    if len(labels) != size:
        raise LabelError(f"{where}: {len(labels)} labels for {size} examples.")
    labels = labels.long()
    wrong = (labels < 0) | (labels >= num_classes)
    if wrong.any():
        example = int(wrong.nonzero()[0])
        raise LabelError(
            f"{where}: label {int(labels[example])} at example {example} of the batch is outside 0 ... "
            f"{num_classes - 1}, "
            f"the range of this model with {num_classes} logits."
        )
    return labels


def run_model(model: nn.Module, batch: Batch, where: str) -> Tensor:
    """The model's logits [B, K], checked.

    Raises:
        LogitsError: If the output is not [B, K] with K > 1.
        PrecisionError: If the model fails and its floating-point type is not that of the inputs.
        NonFiniteError: If a logit is not finite.
    """
    try:
        output = model(*batch.args, **batch.kwargs)
    except RuntimeError as error:
        given = {value.dtype for value in batch.tensors() if value.is_floating_point()}
        needed = {value.dtype for value in model.parameters() if value.is_floating_point()}
        if given and needed and not given & needed:
            names = [" and ".join(sorted(map(str, dtypes))) for dtypes in (needed, given)]
            raise PrecisionError(
                f"{where}: the model's parameters are {names[0]} but its inputs are {names[1]}. "
                "Convert one of them, for instance x.to(next(model.parameters()).dtype) or model.float()."
            ) from error
        raise
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise LogitsError(
            f"{where}: the model must return a tensor of logits or an object with .logits, but returned "
            f"{type(output).__name__}."
        )
    if logits.dim() != 2 or len(logits) != batch.size:
        raise LogitsError(f"{where}: logits must have shape [{batch.size}, K], but have {list(logits.shape)}.")
    if logits.shape[1] < 2:
        raise LogitsError(
            f"{where}: the model has one logit per example, but K must be at least 2. "
            "For a sigmoid output z wrap the model so that it returns torch.cat([zeros_like(z), z], 1)."
        )
    if not logits.isfinite().all():
        example = int((~logits.isfinite()).any(1).nonzero()[0])
        raise NonFiniteError(
            f"{where}: the logits of example {example} of the batch are NaN or infinite though its inputs are finite. "
            "The model overflows there: try float32 or float64."
        )
    return logits
