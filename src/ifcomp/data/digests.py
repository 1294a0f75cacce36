"""`DataDigest`: digests of examples, which show whether data is the same each time it is read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any, Self

import torch
from torch import Tensor

from ifcomp.data.batches import Batch


class DataDigest:
    """SHA-256 digests of inputs and labels, added batch by batch.

    Attributes:
        count: Number of examples.
    """

    def __init__(self) -> None:
        self._in_order, self._labels_in_order, self._sizes = hashlib.sha256(), hashlib.sha256(), hashlib.sha256()
        self.count = self._examples = self._labels = 0
        self._forms: set[str] = set()
        self._classes: set[bytes] = set()

    @classmethod
    def of(cls, batches: Iterable[Batch]) -> Self:
        """Return the digest of all batches."""
        digest = cls()
        for batch in batches:
            digest.add(batch)
        return digest

    def adding(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Add the batches, and pass them on."""
        for batch in batches:
            self.add(batch)
            yield batch

    def add(self, batch: Batch) -> None:
        """Add the examples of a batch."""
        inputs = [
            _rows(name, value, batch.size, is_batched)
            for value, (name, is_batched) in zip(batch.tensors(), batch.batched().items(), strict=True)
        ]
        inputs.append((str(_constants(batch)), [b""] * batch.size))
        given = batch.labels
        labels = [] if given is None else [_rows("labels", given, batch.size, given.shape[:1] == (batch.size,))]
        self._forms.add(str([form for form, _ in inputs]))
        for place in range(batch.size):
            label = _digest(labels, place)
            example = hashlib.sha256(_digest(inputs, place) + label).digest()
            self._in_order.update(example)
            self._labels_in_order.update(label)
            self._examples += int.from_bytes(example)
            self._labels += int.from_bytes(label)
            self._classes.add(label)
        self.count += batch.size
        self._sizes.update(f"{batch.size} ".encode())

    @property
    def in_order(self) -> str:
        """Digest of the examples in order. It does not depend on the size of the batches, except by padding."""
        return self._in_order.hexdigest()

    @property
    def in_batches(self) -> str:
        """Digest of the examples in order, and of the sizes of the batches."""
        return hashlib.sha256(self._in_order.digest() + self._sizes.digest()).hexdigest()

    def has_same_examples(self, other: DataDigest) -> bool:
        """Whether the examples are the same, in any order.

        Padding depends on the rest of a batch. So examples of several shapes are compared by their labels only, unless
        the labels show that the order is the same.
        """
        if self.in_batches == other.in_batches:
            return True
        if len(self._forms) == 1:
            return (self.count, self._examples) == (other.count, other._examples)
        return (self.count, self._labels) == (other.count, other._labels) and not self._has_order_of(other)

    def _has_order_of(self, other: DataDigest) -> bool:
        """Whether the labels show that the examples are in the same order and in the same batches."""
        orders = [(part._labels_in_order.digest(), part._sizes.digest()) for part in (self, other)]
        return len(self._classes) > 1 and orders[0] == orders[1]


def _constants(batch: Batch) -> list[tuple[str, Any]]:
    """Return the keyword inputs of a batch that are plain values."""
    return [item for item in batch.kwargs.items() if item[1] is None or isinstance(item[1], bool | int | float | str)]


def _rows(name: str, value: Tensor, size: int, is_batched: bool) -> tuple[str, list[Any]]:
    """Return the form of one example, and the bytes of each example. All share a tensor without a batch axis."""
    value = value.detach().to_dense().cpu().contiguous()
    rows = value if is_batched else value.unsqueeze(0)
    flat = rows.reshape(len(rows), rows[0].numel()).view(torch.uint8).numpy()
    return f"{name} {rows.dtype} {list(rows.shape[1:])} ", [row.data for row in flat] * (1 if is_batched else size)


def _digest(rows: list[tuple[str, list[Any]]], place: int) -> bytes:
    digest = hashlib.sha256()
    for form, contents in rows:
        digest.update(form.encode())
        digest.update(contents[place])
    return digest.digest()
