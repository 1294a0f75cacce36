"""DataLoaders: the first examples of long data, shuffling, and worker processes that die."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from ifcomp.data.batches import LABEL_KEY, Batch, as_batch
from ifcomp.errors import DataError

#: Seconds within which torch reports a dead worker a second time, from a signal handler.
_SIGNAL_DELAY = 0.2

_RANDOM_SAMPLERS = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


@dataclass(frozen=True)
class FirstExamples:
    """The first examples of data that is endless or longer than needed. Re-iterable if the data is.

    Attributes:
        data: Batches in any form that `IFComp.fit` accepts.
        count: Number of examples. The last batch is cut to fit.

    Example:
        >>> IFComp(model).fit(FirstExamples(loader, 10_000))
    """

    data: Iterable[Any]
    count: int

    def __iter__(self) -> Iterator[Any]:
        remaining = self.count
        for item in self.data if remaining > 0 else ():
            batch = as_batch(item)
            if batch.size >= remaining:
                yield _in_form_of(item, batch.select(slice(0, remaining)))
                return
            yield item
            remaining -= batch.size


def _in_form_of(item: Any, batch: Batch) -> Any:
    """Convert a batch back to the form of the loader's item."""
    if isinstance(item, Mapping):
        return batch.kwargs if batch.labels is None else {**batch.kwargs, LABEL_KEY: batch.labels}
    return batch.inputs if batch.labels is None else (*batch.args, batch.labels)


def is_shuffled(data: Any) -> bool:
    """Whether the data is a DataLoader with a random sampler."""
    return isinstance(data, DataLoader) and isinstance(data.sampler, _RANDOM_SAMPLERS)


@contextmanager
def explain_dead_workers() -> Iterator[None]:
    """Raise DataError instead of torch's error when a worker process of a DataLoader has died.

    Errors that the data set itself raises, in a worker or not, are passed through.
    """
    try:
        yield
    except (RuntimeError, EOFError, OSError) as error:
        if not (str(error).startswith("DataLoader worker (pid") or _is_from_multiprocessing(error)):
            raise
        with suppress(RuntimeError):
            time.sleep(_SIGNAL_DELAY)
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise DataError(
            f"A worker process of the DataLoader died ({reason}). Usual causes: too little memory or shared "
            "memory, or a crash in the data set. num_workers=0 shows which."
        ) from error


def _is_from_multiprocessing(error: BaseException) -> bool:
    """Whether an error was raised in ``multiprocessing``: a worker died while it sent a tensor."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and str(frames[-1].f_globals.get("__name__")).startswith("multiprocessing.")
