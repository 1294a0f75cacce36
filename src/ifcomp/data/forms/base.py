"""`Data`: re-iterable batches with the names that a form of data knows, and `DataRequest`: how to build them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any

import numpy as np
import torch
from torch import nn

#: Examples per batch where batches are built here. Results do not depend on it: microbatches follow the memory.
BATCH_SIZE = 256


@dataclass(frozen=True, eq=False)
class Data:
    """Data in the form that every pass reads.

    Attributes:
        batches: Batches that `ifcomp.data.batches.as_batches` accepts. They are re-iterable, except for iterators.
        class_names: Names of the classes 0 ... K-1 if known.
        example_names: Returns file names, texts or row names of the examples, in the order of the data, if known.
        columns: Names of the features of a table, in the order of the inputs. None for other data.
    """

    batches: Iterable[Any]
    class_names: tuple[str, ...] | None = None
    example_names: Callable[[], Sequence[str]] | None = None
    columns: tuple[str, ...] | None = None


@dataclass(frozen=True, eq=False)
class DataRequest:
    """Requirements on the batches.

    Attributes:
        model: The classifier that receives the inputs.
        collate_fn: Builds a batch from a list of examples. None stacks them.
        columns: Names of the features of the table on which the model was fitted. None takes a table as it is.
    """

    model: nn.Module
    collate_fn: Callable[[list[Any]], Any] | None = None
    columns: tuple[str, ...] | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point type of the model, for inputs that have no type of PyTorch."""
        types = (parameter.dtype for parameter in self.model.parameters())
        return next((dtype for dtype in types if dtype.is_floating_point), torch.float32)

    def keywords(self) -> tuple[frozenset[str], bool]:
        """Return the names of the arguments of ``forward``, and whether it takes any other keyword."""
        try:
            parameters = signature(self.model.forward).parameters.values()
        except (TypeError, ValueError):  # compiled code without a signature
            return frozenset(), True
        named = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
        names = frozenset(parameter.name for parameter in parameters if parameter.kind in named)
        return names, any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters)


@dataclass(frozen=True, eq=False)
class Slices:
    """Batches of data in memory, in order.

    Attributes:
        fetch: Returns the batch of a range of examples.
        count: Number of examples.
        batch_size: Examples per batch. The last batch may be smaller.
    """

    fetch: Callable[[slice], Any]
    count: int
    batch_size: int = BATCH_SIZE

    def __len__(self) -> int:
        """Number of batches."""
        return -(-self.count // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        starts = range(0, self.count, self.batch_size)
        return (self.fetch(slice(start, min(start + self.batch_size, self.count))) for start in starts)


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Restore the global random states of Python, NumPy and PyTorch afterwards."""
    python, array = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(array)


def is_from(package: str, name: str, value: Any) -> bool:
    """Whether a value is an instance of a class of a package, by the names of its classes. Nothing is imported."""
    return any(kind.__name__ == name and kind.__module__.split(".")[0] == package for kind in type(value).__mro__)
