"""Script of every process in the distributed tests of audits: ``torchrun audit_worker.py RESULT``."""

import sys

import numpy as np
import torch
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


if __name__ == "__main__":
    with data_parallel() as process:
        arrays = audits()
        np.savez(f"{sys.argv[1]}{process.rank}.npz", world_size=process.world_size, **arrays)
