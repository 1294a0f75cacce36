"""Script of every process in the distributed tests: ``torchrun worker.py RESULT``. Rank 1 may be slow or die."""

import argparse
import os
import time
import warnings
from contextlib import ExitStack

import numpy as np
import torch
from torch import Tensor, nn

from ifcomp import Checkpoint, IFComp
from ifcomp.distributed import data_parallel

BATCH_SIZES = (7, 7, 2, 1, 4)  # uneven, one smaller than the number of processes, and a partial last one
SETTINGS = {"beta": 0.7, "label_samples": 2, "seed": 3}


def network() -> nn.Module:
    """Return a network with Kronecker, normalisation and other parameters."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5)]
    return nn.Sequential(*layers).double().eval()


def data() -> list[tuple[Tensor, Tensor]]:
    """Return batches with labels."""
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(size, 1, 6, 6, generator=generator, dtype=torch.float64) for size in BATCH_SIZES]
    return [(x, torch.arange(len(x)) % 5) for x in inputs]


def results(batches: list[tuple[Tensor, Tensor]], checkpoint: Checkpoint | None = None) -> dict[str, np.ndarray]:
    """Return all results of a fit and of scoring as arrays."""
    ifc = IFComp(network(), **SETTINGS).fit(batches, checkpoint=checkpoint)
    frame = ifc.score(batches, damping=1e-3).frame
    moments = {f"moments {name}": block.second_moments.numpy() for name, block in ifc.factors.blocks.items()}
    columns = {f"column {name}": frame[name].to_numpy() for name in frame}
    with warnings.catch_warnings(action="ignore"):  # few held-out examples
        gate = ifc.ood_detector(batches)
    ood = {f"OOD {name}": values for name, values in gate.rule.held_out.items()}
    ood["OOD score"] = gate.table([2 * x for x, _ in batches]).frame["score"].to_numpy()
    numbers = {
        "count": np.array(ifc.factors.count),
        "training accuracy": np.array(ifc.training_accuracy),
        "reference": ifc.factors.reference.numpy(),
    }
    return moments | columns | ood | numbers


def main() -> None:
    """Fit and score with the other processes. Rank 0 writes the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("result")
    parser.add_argument("--dies", type=int, help="number of batches after which rank 1 dies")
    parser.add_argument("--lags", type=float, help="seconds that rank 1 sleeps before each batch")
    parser.add_argument("--checkpoint")
    arguments = parser.parse_args()
    batches = data()
    with data_parallel() as process, ExitStack() as stack:
        if process.rank == 1:
            batches = _UnreliableBatches(batches, arguments.dies, arguments.lags)
        checkpoint = arguments.checkpoint and stack.enter_context(Checkpoint(arguments.checkpoint, 0))
        arrays = results(batches, checkpoint)
        if process.rank == 0:
            np.savez(arguments.result, world_size=process.world_size, **arrays)


class _UnreliableBatches(list):
    """Batches of a process that is slow or dies."""

    def __init__(self, batches: list[tuple[Tensor, Tensor]], dies: int | None, lags: float | None) -> None:
        super().__init__(batches)
        self.remaining, self.pause = dies, lags or 0.0

    def __iter__(self) -> object:
        for batch in list.__iter__(self):
            if self.remaining == 0:
                os._exit(17)
            self.remaining = None if self.remaining is None else self.remaining - 1
            time.sleep(self.pause)
            yield batch


if __name__ == "__main__":
    main()
