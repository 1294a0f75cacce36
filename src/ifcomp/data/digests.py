"""`DataDigest`: digests of examples, which show whether data is the same each time it is read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Self

import torch
from torch import Tensor

from ifcomp.data.batches import Batch


class DataDigest:
    """SHA-256 digests of inputs and labels, added batch by batch.

    Attributes:
        count: Number of examples.
    """

    def __init__(self) -> None:
        self._in_order, self._sizes = hashlib.sha256(), hashlib.sha256()
        self.count = self._examples = self._labels = 0
        self._shapes: set[str] = set()

    @classmethod
    def of(cls, batches: Iterable[Batch]) -> Self:
        """Return the digest of all batches."""
        digest = cls()
        for batch in batches:
            digest.add(batch)
        return digest

    def add(self, batch: Batch) -> None:
        """Add the examples of a batch."""
        axes = batch.batched().values()
        inputs = [_rows(value, batch.size, is_batched) for value, is_batched in zip(batch.tensors(), axes, strict=True)]
        labels = (
            [] if batch.labels is None else [_rows(batch.labels, batch.size, batch.labels.shape[:1] == (batch.size,))]
        )
        self._shapes.add(str([form for form, _ in inputs]))
        for place in range(batch.size):
            label = _digest(labels, place)
            example = hashlib.sha256(_digest(inputs, place) + label).digest()
            self._in_order.update(example)
            self._examples += int.from_bytes(example)
            self._labels += int.from_bytes(label)
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

        Examples of several shapes are compared by their labels only, because padding depends on the rest of a batch.
        """
        if len(self._shapes) > 1:
            return (self.count, self._labels) == (other.count, other._labels)
        return (self.count, self._examples) == (other.count, other._examples)


def _rows(value: Tensor, size: int, is_batched: bool) -> tuple[str, list[memoryview]]:
    """Return dtype and shape of one example, and the bytes of each example. All share a tensor without a batch axis."""
    value = value.detach().to_dense().cpu().contiguous()
    rows = value if is_batched else value.unsqueeze(0)
    flat = rows.reshape(len(rows), rows[0].numel()).view(torch.uint8).numpy()
    return f"{rows.dtype} {list(rows.shape[1:])} ", [row.data for row in flat] * (1 if is_batched else size)


def _digest(rows: list[tuple[str, list[memoryview]]], place: int) -> bytes:
    digest = hashlib.sha256()
    for form, contents in rows:
        digest.update(form.encode())
        digest.update(contents[place])
    return digest.digest()
