"""Script of every process in the test of unequal processes: ``torchrun mismatch_worker.py RESULT``."""

import json
import sys
from collections.abc import Sized
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from distributed.audit_worker import data
from distributed.worker import network
from ifcomp import IFComp
from ifcomp.distributed import ProcessInfo, data_parallel
from ifcomp.errors import DataError

#: What differs between the processes, the verb that finds it, and the subject of its message.
CASES = (
    ("weights", "fit", "The weights"),
    ("settings", "fit", "The settings"),
    ("missing batch", "fit", "The sizes of the batches"),
    ("labels", "fit", "The batches"),
    ("sampler", "fit", "The first batches"),
    ("weights", "audit", "The weights"),
    ("sampler", "audit", "The first batches"),
    ("last batch", "audit", "The sizes of the batches"),
    ("order", "audit", "The sizes of the batches"),
    ("order", "score", "The sizes of the batches"),
    ("no batches", "score", "The first batches"),
    ("sampler", "ood_detector", "The first batches"),
)


def given_data(case: str, rank: int) -> Any:
    """Return the data of a process."""
    batches = data(0)
    if case == "sampler":
        dataset = TensorDataset(*(torch.cat(parts) for parts in zip(*batches, strict=True)))
        return DataLoader(dataset, 5, sampler=DistributedSampler(dataset, shuffle=False))
    return batches if rank == 0 else _changed(case, batches)


def _changed(case: str, batches: list[tuple[Tensor, Tensor]]) -> Sized:
    *others, before, last = batches
    if case == "labels":
        return [*others, before, (last[0], last[1].flip(0))]
    changed = {"missing batch": [*others, last], "last batch": [*others, before], "order": [*others, last, before]}
    return changed.get(case, [] if case == "no batches" else batches)


def error_of(case: str, verb: str, process: ProcessInfo) -> str:
    """Return the message of the error that a verb raises."""
    model = network()
    if case == "weights" and process.rank == 1:
        next(model.parameters()).data.add_(1e-6)
    ifc = IFComp(model, seed=process.rank if case == "settings" else 0)
    if verb in ("score", "ood_detector"):
        ifc.fit(data(0), progress=False)
    try:
        getattr(ifc, verb)(given_data(case, process.rank), progress=False)
    except DataError as error:
        return str(error)
    return "no error"


if __name__ == "__main__":
    with data_parallel() as process:
        errors = [error_of(case, verb, process) for case, verb, _ in CASES]
        Path(f"{sys.argv[1]}{process.rank}.json").write_text(json.dumps(errors))
