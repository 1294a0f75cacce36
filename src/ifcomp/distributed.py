"""Data-parallel work over several processes: a thin layer over ``torch.distributed``.

Inside `data_parallel` every process iterates over the same batches and computes on its shard of each. Sums are reduced
over the processes, and rows are gathered in the order of the data. With one process nothing changes.

Processes compare weights, settings and data. A difference is an error on all of them (`check_equal`, `same_batches`).
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # its default arguments keep a group alive that exists at the import
from torch import Tensor

from ifcomp.data.batches import Batch
from ifcomp.errors import DataError
from ifcomp.io.fingerprints import digest_tensors

#: Largest number of elements of several tensors that are reduced in one message.
BUCKET_ELEMENTS = 1 << 20

#: Remedy for weights that differ between processes.
SAME_WEIGHTS = "Load the same trained weights in every process, or set the same seed before the model is built."

#: Remedy for data that differs between processes.
_SAME_DATA = (
    "Every process must iterate over the same batches in the same order: each batch is divided among the processes. "
    "Give the whole data to all of them, without DistributedSampler, shuffling or random transforms."
)


@dataclass(frozen=True)
class ProcessInfo:
    """Rank of this process and number of processes.

    Attributes:
        rank: From 0 to ``world_size - 1``.
        world_size: Number of processes.
        cpu_group: Process group for tensors on the CPU and for objects; None is the default group.
    """

    rank: int = 0
    world_size: int = 1
    cpu_group: dist.ProcessGroup | None = field(default=None, compare=False)


_process_info: ContextVar[ProcessInfo | None] = ContextVar("process_info", default=None)


def process_info() -> ProcessInfo:
    """Return rank and world size inside `data_parallel`, else rank 0 of 1."""
    return _process_info.get() or ProcessInfo()


@contextmanager
def data_parallel() -> Iterator[ProcessInfo]:
    """Split the work of ``fit`` and ``score`` over all processes. Each must make the same calls with the same data.

    An initialised process group is used as it is. If its backend has no tensors on the CPU, as nccl alone, a gloo group
    is created beside it. Without an initialised group, one is created from the environment variables of ``torchrun``:
    gloo for tensors on the CPU, nccl for tensors on GPUs. Without either there is one process, and the context has no
    effect.
    """
    creates_group = not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1
    if creates_group:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    info = ProcessInfo()
    if dist.is_initialized():
        lacks_cpu = not creates_group and "cpu:" not in dist.get_backend_config()
        info = ProcessInfo(
            dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo") if lacks_cpu else None
        )
    token = _process_info.set(info)
    try:
        yield info
        if creates_group:
            dist.barrier()  # no process ends while another still communicates
    finally:
        _process_info.reset(token)
        if creates_group:
            _destroy_process_group()


def _destroy_process_group() -> None:
    """Destroy the process group without a deadlock.

    Up to torch 2.7, the destructor of a group holds Python's lock while it joins its threads, and the threads need the
    lock to free their last tensors (pytorch/pytorch#154976). The gloo backend releases the lock in its destructor, so
    it is kept alive until the end.
    """
    group = dist.group.WORLD
    backends = [] if group is None or dist.get_backend() != "gloo" else [group._get_backend(torch.device("cpu"))]
    del group
    dist.destroy_process_group()
    backends.clear()


def check_equal(what: str, value: Any, remedy: str) -> None:
    """Raise DataError on all processes if a value differs between them.

    Args:
        what: Subject of the message, in the plural.
        value: The value of this process.
        remedy: End of the message.
    """
    values = all_gather_objects(value)
    different = [rank for rank, other in enumerate(values) if other != values[0]]
    if different:
        ranks = f"process {different[0]}" if len(different) == 1 else f"processes {', '.join(map(str, different))}"
        raise DataError(f"{what} of {ranks} differ from those of process 0. {remedy}")


def same_batches(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Iterate over batches that must be the same on all processes.

    Digests of inputs and labels are compared for the first batch, and for all batches at the end.

    Raises:
        DataError: On all processes, if the data, its order or its batches differ.
    """
    if process_info().world_size == 1:
        yield from batches
        return
    digest, sizes = "", []
    for batch in batches:
        digest = digest_tensors([*batch.tensors(), *([] if batch.labels is None else [batch.labels])], digest)
        sizes.append(batch.size)
        if len(sizes) == 1:
            check_equal("The first batches", (digest, sizes[0]), _SAME_DATA)
        yield batch
    if not sizes:
        check_equal("The first batches", None, _SAME_DATA)
    check_equal("The sizes of the batches", sizes, _SAME_DATA)
    check_equal("The batches", digest, _SAME_DATA)


def shard_batches(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Iterate over this process's shard of every batch. Empty shards are skipped."""
    info = process_info()
    for batch in batches:
        start, stop = (batch.size * rank // info.world_size for rank in (info.rank, info.rank + 1))
        if stop > start:
            yield batch if info.world_size == 1 else batch.select(slice(start, stop))


def _group_of(tensor: Tensor) -> dist.ProcessGroup | None:
    return process_info().cpu_group if tensor.device.type == "cpu" else None


def all_reduce_sum(tensors: Iterable[Tensor], bucket_elements: int = BUCKET_ELEMENTS) -> None:
    """Sum every tensor over the processes, in place.

    Args:
        tensors: Tensors of the same shapes on all processes.
        bucket_elements: Largest number of elements of small tensors that are joined in one message.
    """
    if process_info().world_size == 1:
        return
    for bucket in _buckets(tensors, bucket_elements):
        if len(bucket) == 1:
            dist.all_reduce(bucket[0], group=_group_of(bucket[0]))
            continue
        joined = torch.cat([tensor.flatten() for tensor in bucket])
        dist.all_reduce(joined, group=_group_of(joined))
        for tensor, total in zip(bucket, joined.split([tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(total.view_as(tensor))


def _buckets(tensors: Iterable[Tensor], bucket_elements: int) -> Iterator[list[Tensor]]:
    """Group tensors of one dtype and device into buckets of limited size. A large tensor is a separate bucket."""
    buckets: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        bucket = buckets[tensor.dtype, tensor.device]
        if bucket and sum(other.numel() for other in bucket) + tensor.numel() > bucket_elements:
            yield bucket
            bucket = buckets[tensor.dtype, tensor.device] = []
        bucket.append(tensor)
    yield from buckets.values()


def all_gather_objects(value: Any) -> list[Any]:
    """Return the values of all processes in the order of their ranks."""
    values = [value] * process_info().world_size
    if len(values) > 1:
        dist.all_gather_object(values, value, group=process_info().cpu_group)
    return values


def broadcast_object(value: Any, source: int) -> Any:
    """Return the value of the process with rank ``source``."""
    values = [value]
    if process_info().world_size > 1:
        dist.broadcast_object_list(values, source, group=process_info().cpu_group)
    return values[0]


def run_distributed(
    jobs: Sequence[Callable[[], Tensor]], templates: Sequence[Tensor], costs: Sequence[float]
) -> list[Tensor]:
    """Run independent jobs on different processes and return all results on every process.

    Args:
        jobs: Functions that each return a tensor.
        templates: Tensors with the shape, dtype and device of the results.
        costs: Relative run times. The most expensive jobs are assigned first, each to the process with the least load.
    """
    info = process_info()
    if info.world_size == 1:
        return [job() for job in jobs]
    loads, ranks = [0.0] * info.world_size, [0] * len(jobs)
    for index in sorted(range(len(jobs)), key=lambda index: -costs[index]):
        ranks[index] = loads.index(min(loads))
        loads[ranks[index]] += costs[index]
    results = [
        job() if rank == info.rank else torch.empty_like(template)
        for job, template, rank in zip(jobs, templates, ranks, strict=True)
    ]
    for result, rank in zip(results, ranks, strict=True):
        dist.broadcast(result, rank, group=_group_of(result))
    return results


def gather_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of all processes, sorted by the column ``index``, on every process."""
    if process_info().world_size == 1:
        return frame
    parts = [part for part in all_gather_objects(frame) if len(part)]
    return pd.concat(parts).sort_values("index", ignore_index=True) if parts else frame
