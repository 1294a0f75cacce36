"""Several processes, one result: a thin layer over ``torch.distributed``.

Inside `sharing` every process goes over the same batches and works on its own slice of each; sums are added up over
the processes, and rows are gathered in the order of the data. Outside it, and with one process, nothing changes.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
from torch import Tensor

from ifcomp.data.batches import Batch

#: Numbers that are sent in one message.
_MESSAGE_ENTRIES = 1 << 20


@dataclass(frozen=True)
class Ranks:
    """Which of how many processes this is."""

    rank: int = 0
    world: int = 1


_ranks: ContextVar[Ranks | None] = ContextVar("ranks", default=None)


def ranks() -> Ranks:
    """The processes that share the work at this moment; one outside `sharing`."""
    return _ranks.get() or Ranks()


@contextmanager
def sharing() -> Iterator[Ranks]:
    """Share ``fit`` and ``score`` with the other processes; each must make the same calls with the same data.

    The process group is that of the program, or is made from what ``torchrun`` left in the environment (gloo on CPUs,
    nccl on GPUs). Without either there is one process, and the context does nothing.
    """
    made = not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1
    if made:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    found = Ranks(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else Ranks()
    token = _ranks.set(found)
    try:
        yield found
    finally:
        _ranks.reset(token)
        if made:
            _end_group()


def _end_group() -> None:
    """End the process group that `sharing` has made.

    Up to torch 2.7 a group keeps Python's lock while it waits for its threads to end, and they for that lock, to let go
    of their last tensors (pytorch/pytorch#154976). The object of the gloo backend gives the lock up, so it goes last.
    """
    group = dist.group.WORLD
    kept = [] if group is None or dist.get_backend() != "gloo" else [group._get_backend(torch.device("cpu"))]
    del group
    dist.destroy_process_group()
    kept.clear()


def own_slices(batches: Iterable[Batch]) -> Iterator[Batch]:
    """This process's slice of every batch that has one for it."""
    own = ranks()
    for batch in batches:
        first, last = (batch.size * rank // own.world for rank in (own.rank, own.rank + 1))
        if last > first:
            yield batch if own.world == 1 else batch.select(slice(first, last))


def add_up(tensors: Iterable[Tensor]) -> None:
    """Sum every tensor over the processes, in place; small ones are sent together, as each message has its price."""
    if ranks().world == 1:
        return
    for bucket in _buckets(tensors):
        if len(bucket) == 1:
            dist.all_reduce(bucket[0])
            continue
        joined = torch.cat([tensor.flatten() for tensor in bucket])
        dist.all_reduce(joined)
        for tensor, total in zip(bucket, joined.split([tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(total.view_as(tensor))


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one type and place that are small together, or one that is large."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        bucket = kinds[tensor.dtype, tensor.device]
        if bucket and sum(own.numel() for own in bucket) + tensor.numel() > _MESSAGE_ENTRIES:
            yield bucket
            bucket = kinds[tensor.dtype, tensor.device] = []
        bucket.append(tensor)
    yield from kinds.values()


def gather(value: Any) -> list[Any]:
    """The values of all processes, in their order."""
    values = [value] * ranks().world
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values


def broadcast(value: Any, source: int) -> Any:
    """The value of the process ``source``."""
    box = [value]
    if ranks().world > 1:
        dist.broadcast_object_list(box, source)
    return box[0]


def spread(jobs: Sequence[Callable[[], Tensor]], results: Sequence[Tensor], costs: Sequence[float]) -> list[Tensor]:
    """Every process does some of the jobs, and all get all results.

    Args:
        jobs: Each makes a tensor.
        results: Tensors in the shape, type and place of the results; their content does not matter.
        costs: How long each job takes, in any unit; the longest are dealt out first.
    """
    own = ranks()
    if own.world == 1:
        return [job() for job in jobs]
    loads, owners = [0.0] * own.world, [0] * len(jobs)
    for index in sorted(range(len(jobs)), key=lambda index: -costs[index]):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += costs[index]
    made = [
        job() if owner == own.rank else torch.empty_like(result)
        for job, result, owner in zip(jobs, results, owners, strict=True)
    ]
    for tensor, owner in zip(made, owners, strict=True):
        dist.broadcast(tensor, owner)
    return made


def gather_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of all processes, sorted by their ``index`` column; on every process."""
    if ranks().world == 1:
        return frame
    filled = [part for part in gather(frame) if len(part)]
    return pd.concat(filled).sort_values("index", ignore_index=True) if filled else frame
