"""`Batch`: the inputs and labels of a few examples, in one form for every kind of loader."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ifcomp.errors import DataError, LabelError
from ifcomp.memory import even_size

#: Key of the labels in a dict batch. All other entries are keyword inputs of the model.
LABEL_KEY = "labels"

#: Keys that are read as the labels of a dict batch; the first one present is the label.
LABEL_KEYS = (LABEL_KEY, "label")


@dataclass(frozen=True)
class Batch:
    """A batch of a loader, or a microbatch of it.

    Attributes:
        args: Positional inputs of the model.
        kwargs: Keyword inputs of the model.
        labels: The labels as given, or None.
        size: Number of examples B.
        name: Name of the loader's batch in messages.
        offset: Index of the first example within the loader's batch.
        start: Number of examples in the loader's earlier batches.
        shared: Names of input tensors without a batch axis, as in `named_tensors`. Every other tensor of length B has a
            batch axis.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    labels: Tensor | None
    size: int
    name: str = "batch 0"
    offset: int = 0
    start: int = 0
    shared: frozenset[str] = frozenset()

    @property
    def position(self) -> int:
        """Index of the first example in the data."""
        return self.start + self.offset

    @property
    def inputs(self) -> Any:
        """The inputs without labels, in a form that `as_batch` accepts."""
        return self.kwargs or (self.args[0] if isinstance(self.args[0], Tensor) else self.args)

    def tensors(self) -> Iterator[Tensor]:
        """Iterate over all input tensors, including those nested in lists, tuples and dicts."""
        return iter_tensors((self.args, self.kwargs))

    def batched(self) -> dict[str, bool]:
        """Whether each input tensor has a batch axis, by name, in the order of `tensors`."""
        return {
            name: bool(value.dim()) and len(value) == self.size and name not in self.shared
            for name, value in named_tensors((self.args, self.kwargs))
        }

    def select(self, index: slice | Tensor) -> Batch:
        """Return the examples at ``index``. Inputs without a batch axis are kept unchanged."""
        batched = iter(self.batched().values())

        def pick(value: Tensor) -> Tensor:
            return value[index] if next(batched) else value

        positions = range(self.size)[index] if isinstance(index, slice) else index.tolist()
        args, kwargs = map_tensors(pick, (self.args, self.kwargs))
        return replace(
            self,
            args=args,
            kwargs=kwargs,
            labels=None if self.labels is None else self.labels[index],
            size=len(positions),
            offset=self.offset + (positions[0] if len(positions) else 0),
        )

    def split(self, size: int) -> Iterator[Batch]:
        """Split into consecutive microbatches of nearly equal size, each with at most ``size`` examples."""
        size = max(1, even_size(self.size, size))
        return (self.select(slice(start, min(start + size, self.size))) for start in range(0, self.size, size))

    def to(self, device: torch.device) -> Batch:
        """Copy the inputs to a device; labels are not moved.

        The copy is independent of the user's tensors, so the model may modify its inputs in place. It supports autograd
        even if the originals were created in inference mode. Copies from pinned memory to a GPU are asynchronous.
        """

        def move(value: Tensor) -> Tensor:
            return value.detach().to(device, non_blocking=True, copy=True)

        with torch.inference_mode(False):
            return replace(self, args=map_tensors(move, self.args), kwargs=map_tensors(move, self.kwargs))

    def describe_example(self, mask: Tensor) -> str:
        """Return ``"example i"`` for the first True entry of a mask [B]; i counts within the loader's batch."""
        return f"example {self.offset + int(mask.nonzero()[0])}"


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Apply a function to every tensor in nested lists, tuples and dicts. Other values are returned unchanged."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(function, item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple
        return type(value)(*(map_tensors(function, item) for item in value))
    if type(value) in (list, tuple):
        return type(value)(map_tensors(function, item) for item in value)
    return value


def iter_tensors(value: Any) -> Iterator[Tensor]:
    """Iterate over the tensors in nested lists, tuples and dicts."""
    tensors: list[Tensor] = []
    map_tensors(tensors.append, value)
    return iter(tensors)


def named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Iterate over the tensors of `iter_tensors` with unique names that consist of keys and positions."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping | tuple) or type(value) is list:
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from named_tensors(item, f"{name}/{key}")


def as_batch(item: Any, labels: Any = None, name: str = "batch 0") -> Batch:
    """Convert one item of a loader, or the inputs of a scoring call.

    Args:
        item: ``(x, y)``, ``(x,)``, ``x``, or a mapping whose optional entry ``labels`` or ``label`` is the label. x is
            a tensor, or a list or tuple of inputs: for ``((x, z), y)`` and ``((x, z),)`` the model is called as
            ``model(x, z)`` if its ``forward`` takes several inputs, else as ``model((x, z))``. An argument of
            ``forward`` is an input if it has no default, or the default None and no annotation other than a tensor.
            Lists and tuples in mappings are passed unchanged.
        labels: Labels that replace those of a mapping. A list or tuple ``(x, z)`` then contains inputs only.
        name: Name of the batch in messages.

    Raises:
        DataError: If the item has another form.
        LabelError: If the labels cannot be converted to a tensor.
    """
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    item_labels = None
    if isinstance(item, Mapping):
        label_key = next((key for key in LABEL_KEYS if key in item), None)
        kwargs = {str(key): value for key, value in item.items() if key != label_key}
        item_labels = None if label_key is None else item[label_key]
    elif isinstance(item, list | tuple) and labels is not None and len(item) > 1:
        _check_no_labels(item, name)
        args = (item,)
    elif isinstance(item, list | tuple) and len(item) in (1, 2):
        args = (item[0],)
        item_labels = item[1] if len(item) == 2 else None
    elif isinstance(item, Tensor):
        args = (item,)
    else:
        length = f" of length {len(item)}" if isinstance(item, list | tuple) else ""
        raise DataError(
            f"{name}: a batch must be a tensor x, (x,), (x, y) or a dict of keyword inputs with '{LABEL_KEY}', "
            f"but is a {type(item).__name__}{length}. For a model with several inputs yield dicts or "
            "((x, z), y)."
        )
    targets = _as_labels(item_labels if labels is None else labels, name)
    return Batch(args, kwargs, targets, _batch_size((args, kwargs), targets, name), name)


def as_batches(data: Iterable[Any]) -> Iterator[Batch]:
    """Iterate over the batches of a loader. Empty batches are skipped."""
    start = 0
    for number, item in enumerate(data):
        batch = as_batch(item, name=f"batch {number}")
        if batch.size:
            yield replace(batch, start=start)
            start += batch.size


def _batch_size(inputs: Any, labels: Tensor | None, name: str) -> int:
    """Return the number of labels if an input has this length, else the most frequent length of the input tensors.

    Other lengths are allowed, because an input may have no batch axis.
    """
    lengths = [len(value) for value in iter_tensors(inputs) if value.dim()]
    if not lengths:
        raise DataError(
            f"{name}: no input tensor with a batch axis. Convert arrays and lists with torch.as_tensor and stack the "
            "examples."
        )
    if labels is not None and labels.dim() and len(labels) in lengths:
        return len(labels)
    return Counter(lengths).most_common(1)[0][0]


def _check_no_labels(item: Sequence[Any], name: str) -> None:
    """Raise DataError if the last of several inputs could be labels."""
    last = item[-1]
    if len(item) == 2 and isinstance(last, Tensor) and last.dim() == 1 and not last.is_floating_point():
        raise DataError(
            f"{name}: labels are given together with (x, z), but z could be labels too. Give x alone, ((x, z),) for a "
            "model with two inputs, or a dict."
        )


def _as_labels(labels: Any, name: str) -> Tensor | None:
    if labels is None or isinstance(labels, Tensor):
        return labels
    try:
        return torch.tensor(labels, device="cpu")  # a copy: arrays of pandas are read-only
    except (TypeError, ValueError, RuntimeError) as error:
        raise LabelError(
            f"{name}: labels must be integers from 0, but are a {type(labels).__name__} that is no tensor of integers "
            f"({error}). Number the classes."
        ) from error
