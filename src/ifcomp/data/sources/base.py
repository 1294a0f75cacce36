"""`Source`: opened data that can be iterated repeatedly, with previews of its examples."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from ifcomp.data.batches import as_batches
from ifcomp.data.digests import DataDigest
from ifcomp.data.sources.options import SourceOptions
from ifcomp.errors import DataError, IfcompError

if TYPE_CHECKING:
    from ifcomp.report import Preview


@contextmanager
def explain_errors(path: str, form: str, caught: tuple[type[Exception], ...], advice: str = "") -> Iterator[None]:
    """Raise DataError with the path and the form, such as ``a CSV file``, for errors of a reader."""
    try:
        yield
    except IfcompError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"There is no file '{path}'.") from error
    except caught as error:
        raise DataError(f"Cannot read '{path}' as {form} ({error}).{advice}") from error


@dataclass(frozen=True)
class SourceRequest:
    """Arguments of `open_source`, with the path extracted from the name.

    Attributes:
        spec: The name as typed, such as ``npz:train.npz``.
        path: The part after the colon, with ``~`` expanded.
        options: How to read the data.
        class_names: Names of the classes 0 ... K-1 if known.
        needs_labels: Whether a label column named in the options must exist.
        folder: Folder in which the module of a factory is looked for.
    """

    spec: str
    path: str
    options: SourceOptions
    class_names: tuple[str, ...] | None
    needs_labels: bool
    folder: str = os.curdir


@dataclass(frozen=True, eq=False)
class IndexedBatches:
    """Batches of examples that are read by position, in order. Each iteration starts at the first example.

    Attributes:
        fetch: Returns inputs and optional labels of the examples from start to stop.
        count: Number of examples.
        batch_size: Examples per batch. The last batch may be smaller.
        labelled: Whether to yield ``(x, y)`` or ``x``.
    """

    fetch: Callable[[int, int], tuple[Tensor, Tensor | None]]
    count: int
    batch_size: int
    labelled: bool = True

    def __len__(self) -> int:
        """Number of batches."""
        return -(-self.count // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, self.count, self.batch_size):
            x, y = self.fetch(start, min(start + self.batch_size, self.count))
            yield x if y is None or not self.labelled else (x, y)


@dataclass(frozen=True, eq=False)
class Unlabelled:
    """Batches of a factory without their labels."""

    data: Iterable[Any]

    def __iter__(self) -> Iterator[Any]:
        return (batch.inputs for batch in as_batches(self.data))


class SizedUnlabelled(Unlabelled):
    """Batches without labels of data whose number of batches is known."""

    def __len__(self) -> int:
        return len(cast(Sized, self.data))


@dataclass(frozen=True, eq=False)
class Source:
    """Data that was opened by name.

    Attributes:
        spec: The name as typed.
        data: Re-iterable batches: ``(x, y)``, ``x``, or what a factory returns.
        previews: Returns previews of the examples at the given positions.
        labels: All labels [N] if they are known before a pass over the data, else None.
        class_names: Names of the classes 0 ... K-1 if known, else None.
        names: Names of the examples, such as file paths, else None.
        texts: Texts of the examples if known, else None.
        feature_columns: Names of the feature columns of a table, in the order of the inputs, else None.
    """

    spec: str
    data: Iterable[Any]
    previews: Callable[[Sequence[int]], list[Preview]]
    labels: Tensor | None = None
    class_names: tuple[str, ...] | None = None
    names: tuple[str, ...] | None = None
    texts: tuple[str, ...] | None = None
    feature_columns: tuple[str, ...] | None = None
    _computed: dict[str, str] = field(default_factory=dict, init=False, repr=False)

    def __len__(self) -> int:
        """Number of examples. Counting the data of a factory takes one pass."""
        if isinstance(self.data, IndexedBatches):
            return self.data.count
        return sum(batch.size for batch in as_batches(self.data))

    def batches(self) -> Iterable[Any]:
        """Return the batches in the form that `IFComp.fit` and `IFComp.score` accept."""
        return self.data

    def unlabelled(self) -> Source:
        """Return the same inputs without labels and class names."""
        if isinstance(self.data, IndexedBatches):
            return replace(self, data=replace(self.data, labelled=False), labels=None, class_names=None)
        data = (SizedUnlabelled if isinstance(self.data, Sized) else Unlabelled)(self.data)
        return replace(self, data=data, class_names=None)

    def digest(self) -> str:
        """Return the digest of all inputs and labels in order. One pass over the data; computed once.

        The digest of examples of equal shape does not depend on the size of the batches.
        """
        if "digest" not in self._computed:
            self._computed["digest"] = DataDigest.of(as_batches(self.data)).in_order
        return self._computed["digest"]

    def preview(self, indices: Iterable[int]) -> list[Preview]:
        """Return previews of the examples at the given positions, in that order."""
        return self.previews(list(indices))
