"""What users hand in, ``(x, y)``, ``(x,)``, ``x`` or a dict, as one form; and the model's output as logits."""

from __future__ import annotations

import itertools
import operator
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from ifcomp.errors import DataError, IfcompWarning, LabelError, NonFiniteError
from ifcomp.memory import even_size

#: The key of a dict batch that holds the labels; everything else is passed to the model by keyword.
LABEL_KEY = "labels"

#: Seconds in which torch tells of a dead worker a second time, by a signal that would end whatever comes next.
_TOLD_AGAIN = 0.2

_SHUFFLING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


@dataclass(frozen=True)
class Batch:
    """One batch, or a piece of one.

    Attributes:
        args: Positional inputs of the model.
        kwargs: Keyword inputs of the model.
        labels: What was given as labels, or None.
        size: B.
        where: What to call the batch in messages.
        first: Position of the first example in the batch that the user gave.
        start: How many examples came before that batch.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    labels: Tensor | None
    size: int
    where: str = "batch 0"
    first: int = 0
    start: int = 0

    @property
    def position(self) -> int:
        """Position of the first example in the data."""
        return self.start + self.first

    def tensors(self) -> Iterator[Tensor]:
        """All input tensors, those inside of lists, tuples and dicts too."""
        return tensors_in((self.args, self.kwargs))

    def select(self, index: slice | Tensor) -> Batch:
        """The examples at ``index``; inputs without a batch axis stay as they are."""

        def pick(value: Tensor) -> Tensor:
            return value[index] if value.dim() and len(value) == self.size else value

        chosen = range(self.size)[index] if isinstance(index, slice) else index.tolist()
        return replace(
            self,
            args=mapped(pick, self.args),
            kwargs=mapped(pick, self.kwargs),
            labels=None if self.labels is None else self.labels[index],
            size=len(chosen),
            first=self.first + (chosen[0] if len(chosen) else 0),
        )

    def split(self, size: int) -> Iterator[Batch]:
        """Consecutive pieces of at most ``size`` examples, as equal as they can be."""
        size = max(1, even_size(self.size, size))
        return (self.select(slice(start, min(start + size, self.size))) for start in range(0, self.size, size))

    def to(self, device: torch.device) -> Batch:
        """A copy on the model's device that autograd can use: a model that works on its input in place harms nobody.

        From pinned memory to a GPU it is made while the program goes on.
        """

        def move(value: Tensor) -> Tensor:
            return value.detach().to(device, non_blocking=True, copy=True)

        with torch.inference_mode(False):
            return replace(self, args=mapped(move, self.args), kwargs=mapped(move, self.kwargs))

    def example(self, wrong: Tensor) -> str:
        """The first example of a mask [B] in words."""
        return f"example {self.first + int(wrong.nonzero()[0])}"


def mapped(function: Callable[[Tensor], Any], value: Any) -> Any:
    """What a function makes of every tensor, in the lists, tuples and dicts in which they are; all else as it is."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: mapped(function, own) for key, own in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(function, own) for own in value))
    return type(value)(mapped(function, own) for own in value) if type(value) in (list, tuple) else value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in lists, tuples and dicts."""
    found: list[Tensor] = []
    mapped(found.append, value)
    return iter(found)


def as_batch(item: Any, labels: Any = None, where: str = "batch 0") -> Batch:
    """Read one item of a loader, or the inputs given to a scoring call.

    Args:
        item: ``(x, y)``, ``(x,)``, ``x``, or a mapping whose ``labels`` entry, if any, is the label.
        labels: Labels that come beside the item, and go before its own.
        where: What to call the batch in messages.

    Raises:
        DataError: If the item is none of these.
        LabelError: If labels cannot be a tensor.
    """
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    own = None
    if isinstance(item, Mapping):
        kwargs = {str(key): value for key, value in item.items() if key != LABEL_KEY}
        own = item.get(LABEL_KEY)
    elif isinstance(item, list | tuple) and len(item) in (1, 2):
        args = (item[0],)
        own = item[1] if len(item) == 2 else None
    elif isinstance(item, Tensor):
        args = (item,)
    else:
        described = f"a {type(item).__name__}" + (f" of {len(item)}" if isinstance(item, list | tuple) else "")
        raise DataError(
            f"{where}: a batch must be a tensor x, (x,), (x, y) or a dict of keyword inputs with '{LABEL_KEY}', "
            f"but is {described}. For a model with several inputs yield dicts."
        )
    tensors = [value for value in tensors_in((args, kwargs)) if value.dim()]
    if not tensors:
        raise DataError(
            f"{where}: no input tensor with a batch axis. Convert arrays and lists with torch.as_tensor and stack the "
            "examples."
        )
    size = Counter(len(value) for value in tensors).most_common(1)[0][0]  # some inputs may have no batch axis
    return Batch(args, kwargs, _as_labels(own if labels is None else labels, where), size, where)


def as_batches(data: Iterable[Any]) -> Iterator[Batch]:
    """The batches of a loader that have examples."""
    start = 0
    for number, item in enumerate(data):
        batch = as_batch(item, where=f"batch {number}")
        if batch.size:
            yield replace(batch, start=start)
            start += batch.size


@dataclass(frozen=True)
class Limited:
    """The first examples of data that may have no end, or of which a part is enough; can be iterated anew if it can.

    Attributes:
        data: Batches.
        examples: How many; the last batch is cut to fit.
    """

    data: Iterable[Any]
    examples: int

    def __iter__(self) -> Iterator[Any]:
        left = self.examples
        for item in self.data if left > 0 else ():
            batch = as_batch(item)
            if batch.size >= left:
                yield _as_given(item, batch.select(slice(0, left)))
                return
            yield item
            left -= batch.size


def _as_given(item: Any, batch: Batch) -> Any:
    """A batch in the form of the item that it was made from."""
    if isinstance(item, Mapping):
        return batch.kwargs if batch.labels is None else {**batch.kwargs, LABEL_KEY: batch.labels}
    return batch.args[0] if batch.labels is None else (batch.args[0], batch.labels)


@contextmanager
def dead_workers_named() -> Iterator[None]:
    """Raise DataError in place of what torch raises when a worker process of a DataLoader is gone.

    What a data set itself raises, in a worker or not, comes through.
    """
    try:
        yield
    except (RuntimeError, EOFError, OSError) as error:
        if not (str(error).startswith("DataLoader worker (pid") or _between_processes(error)):
            raise
        with suppress(RuntimeError):
            time.sleep(_TOLD_AGAIN)
        told = str(error).partition("\n")[0] or type(error).__name__
        raise DataError(
            f"A worker process of the DataLoader died ({told}). Usual causes: too little memory or shared "
            "memory, or a crash in the data set. num_workers=0 shows which."
        ) from error


def _between_processes(error: BaseException) -> bool:
    """Whether an error comes from the connection to another process: a worker died while it passed on a tensor."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and str(frames[-1].f_globals.get("__name__")).startswith("multiprocessing.")


def _shuffles(data: Any) -> bool:
    """Whether the data is a DataLoader that shuffles: its examples come in an order that nobody knows."""
    return isinstance(data, DataLoader) and isinstance(data.sampler, _SHUFFLING)


def warn_of_order(data: Any) -> None:
    """Warn if the rows of a table would be in an order that nobody knows."""
    if _shuffles(data):
        warnings.warn(
            "The DataLoader shuffles, so row i of the table is not example i of the data set. Score a DataLoader with "
            "shuffle=False.",
            IfcompWarning,
            stacklevel=4,
        )


def check_data(data: Any) -> None:
    """Raise DataError if the data is one batch, nothing that can be iterated, or without an end for certain."""
    if isinstance(data, itertools.cycle) or (isinstance(data, itertools.repeat) and operator.length_hint(data, -1) < 0):
        raise DataError(
            f"The data never ends: it is an itertools.{type(data).__name__}. Give the batches themselves, or "
            "ifcomp.data.batches.Limited(data, examples)."
        )
    if isinstance(data, Tensor | tuple | Mapping | str) or not isinstance(data, Iterable):
        raise DataError(
            f"Data must be batches: a DataLoader or a list of (x, y), but is a {type(data).__name__}. "
            "Put a single batch into a list: [(x, y)]."
        )


def check_order(data: Any) -> None:
    """Raise DataError if a loader is known to shuffle."""
    if _shuffles(data):
        raise DataError(
            "A checkpoint needs data in the same order each time, but the loader shuffles, so that work could not go "
            "on from it. Make its DataLoader with shuffle=False."
        )


def _as_labels(labels: Any, where: str) -> Tensor | None:
    if labels is None or isinstance(labels, Tensor):
        return labels
    try:
        return torch.as_tensor(labels, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise LabelError(
            f"{where}: labels must be integers from 0, but are {type(labels).__name__} of something else ({error}). "
            "Number the classes."
        ) from error


def check_inputs(batch: Batch) -> None:
    """Raise NonFiniteError if an input has a NaN or an infinity."""
    for index, value in enumerate(batch.tensors()):
        if value.is_floating_point() and not _all_finite(value):
            wrong = (~value.isfinite()).reshape(len(value), -1).any(1) if value.dim() else ~value.isfinite().reshape(1)
            raise NonFiniteError(
                f"{batch.where}: input tensor {index} has a NaN or infinite value, first in {batch.example(wrong)} of "
                "the batch. Clean the data, or leave the example out."
            )


def _all_finite(value: Tensor) -> bool:
    """Whether no number is NaN or infinite: their sum tells in most cases, in a tenth of the time."""
    return bool(value.sum().isfinite()) or bool(value.isfinite().all())


def check_labels(batch: Batch, num_classes: int) -> Tensor:
    """Return the labels as [B] int64, or raise LabelError."""
    labels, where = batch.labels, batch.where
    if labels is None:
        raise LabelError(
            f"{where}: labels are needed here, but the batch has none. Yield (x, y), or dicts with '{LABEL_KEY}'."
        )
    if labels.dtype.is_floating_point or labels.dtype.is_complex or labels.dtype == torch.bool or labels.dim() != 1:
        raise LabelError(
            f"{where}: labels must be integers of shape [{batch.size}], but are {labels.dtype} of shape "
            f"{list(labels.shape)}. For one-hot labels use labels.argmax(1)."
        )
    if len(labels) != batch.size:
        raise LabelError(f"{where}: {len(labels)} labels for {batch.size} examples. Give each example one label.")
    labels = labels.long()
    wrong = (labels < 0) | (labels >= num_classes)
    if wrong.any():
        raise LabelError(
            f"{where}: label {int(labels[wrong][0])} at {batch.example(wrong)} of the batch is outside "
            f"0 ... {num_classes - 1}, the range of this model with {num_classes} logits. Number the classes from 0, "
            "and leave out examples without a label, such as those marked -1 or -100."
        )
    return labels
