"""Script of all processes in the distributed tests: ``torchrun worker.py RESULT``."""

import argparse
import os
import time
from contextlib import ExitStack

import numpy as np
import torch
from torch import Tensor, nn

from ifcomp import Checkpoint, IFComp
from ifcomp.distributed import sharing

BATCHES = (7, 7, 2, 1, 4)  # uneven, one smaller than the number of processes, and a partial last one
SETTINGS = {"beta": 0.7, "label_samples": 2, "seed": 3}


def network() -> nn.Module:
    """Return a network with convolution, normalisation and linear layers."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5)]
    return nn.Sequential(*layers).double().eval()


def data() -> list[tuple[Tensor, Tensor]]:
    """Return batches with labels."""
    generator = torch.Generator().manual_seed(1)
    sizes = [(size, torch.randn(size, 1, 6, 6, generator=generator, dtype=torch.float64)) for size in BATCHES]
    return [(x, torch.arange(size) % 5) for size, x in sizes]


def results(batches: list[tuple[Tensor, Tensor]], checkpoint: Checkpoint | None = None) -> dict[str, np.ndarray]:
    """Fit and score, and return all results as arrays."""
    ifc = IFComp(network(), **SETTINGS).fit(batches, checkpoint=checkpoint)
    frame = ifc.score(batches, damping=1e-3).frame
    moments = {f"moments {name}": block.second_moments.numpy() for name, block in ifc.factors.blocks.items()}
    columns = {f"column {name}": frame[name].to_numpy() for name in frame}
    return moments | columns | {"count": np.array(ifc.factors.count)}


def main() -> None:
    """Fit and score with the other processes; the first process writes the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("result")
    parser.add_argument("--dies", type=int, help="end the second process after this number of batches")
    parser.add_argument("--lags", type=float, help="delay of the second process in seconds per batch")
    parser.add_argument("--checkpoint")
    arguments = parser.parse_args()
    batches = data()
    with sharing() as ranks, ExitStack() as stack:
        if ranks.rank == 1:
            batches = _FaultyBatches(batches, arguments.dies, arguments.lags)
        checkpoint = arguments.checkpoint and stack.enter_context(Checkpoint(arguments.checkpoint, 0))
        arrays = results(batches, checkpoint)
        if ranks.rank == 0:
            np.savez(arguments.result, world=ranks.world, **arrays)


class _FaultyBatches(list):
    """Batches that are delayed, or that end the process."""

    def __init__(self, batches: list[tuple[Tensor, Tensor]], dies: int | None, lags: float | None) -> None:
        super().__init__(batches)
        self.left, self.pause = dies, lags or 0.0

    def __iter__(self) -> object:
        for batch in list.__iter__(self):
            if self.left == 0:
                os._exit(17)
            self.left = None if self.left is None else self.left - 1
            time.sleep(self.pause)
            yield batch


if __name__ == "__main__":
    main()
