"""Script of every process in the distributed tests of audits: ``torchrun audit_worker.py RESULT [--without-cpu]``."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distributed.worker import network
from ifcomp import IFComp
from ifcomp.distributed import data_parallel
from ifcomp.tasks.audit import LabelAudit

BATCH_SIZES = (7, 7, 1, 12, 1, 2, 9)  # uneven, and some smaller than the number of processes


def data(seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return batches whose labels depend on the inputs; some labels are wrong."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for size in BATCH_SIZES:
        labels = torch.randint(0, 5, (size,), generator=generator)
        images = torch.randn(size, 1, 6, 6, generator=generator, dtype=torch.float64)
        images[:, 0, 0] += 2 * nn.functional.one_hot(labels, 6)
        is_wrong = torch.rand(size, generator=generator) < 0.2
        batches.append((images, torch.where(is_wrong, (labels + 1) % 5, labels)))
    return batches


def results(audit: LabelAudit) -> dict[str, np.ndarray]:
    """Return the results of an audit as arrays."""
    numbers = {name: audit.frame[name].to_numpy() for name in audit.frame}
    weights = {"weight": audit.weights["weight"].to_numpy(), "noise rate": np.array(audit.noise_rate)}
    neighbours = {f"neighbours {name}": found for name, found in audit.evidence.neighbours.items()}
    return numbers | weights | neighbours | {"suspects": audit.suspects["index"].to_numpy()}


def audits() -> dict[str, np.ndarray]:
    """Return the results with and without a reference."""
    ifc = IFComp(network())
    plain = results(ifc.audit(data(0), progress=False))
    other = results(ifc.audit(data(0), reference=data(1), progress=False))
    return plain | {f"{name} (reference)": value for name, value in other.items()}


def refuse_cpu() -> None:
    """Initialise a default group that pretends to have nccl alone."""
    dist.init_process_group("gloo")
    dist.get_backend_config = lambda group=None: "cuda:nccl"
    for name in ("all_reduce", "broadcast", "all_gather_object", "broadcast_object_list"):
        setattr(dist, name, partial(_refuse_default_group, getattr(dist, name)))


def _refuse_default_group(collective: Callable[..., None], *arguments: Any, group: Any = None) -> None:
    assert group is not None, "No backend type associated with device type cpu"
    collective(*arguments, group=group)


if __name__ == "__main__":
    if "--without-cpu" in sys.argv:
        refuse_cpu()
    with data_parallel() as process:
        arrays = audits()
        np.savez(f"{sys.argv[1]}{process.rank}.npz", world_size=process.world_size, **arrays)
