"""What every process of the distributed tests runs: ``torchrun worker.py RESULT [dies]``."""

import os
import sys

import numpy as np
import torch
from torch import Tensor, nn

from ifcomp import IFComp
from ifcomp.distributed import sharing

BATCHES = (7, 7, 2, 1, 4)  # uneven, one smaller than the number of processes, and a partial last one
SETTINGS = {"beta": 0.7, "label_samples": 2, "seed": 3}


def network() -> nn.Module:
    """Kronecker, normalisation and other parameters."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5)]
    return nn.Sequential(*layers).double().eval()


def data() -> list[tuple[Tensor, Tensor]]:
    """Batches with labels."""
    generator = torch.Generator().manual_seed(1)
    sizes = [(size, torch.randn(size, 1, 6, 6, generator=generator, dtype=torch.float64)) for size in BATCHES]
    return [(x, torch.arange(size) % 5) for size, x in sizes]


def results(batches: list[tuple[Tensor, Tensor]]) -> dict[str, np.ndarray]:
    """Everything a fit and a scoring give, as arrays."""
    ifc = IFComp(network(), **SETTINGS).fit(batches)
    frame = ifc.score(batches, damping=1e-3).frame
    moments = {f"moments {name}": block.second_moments.numpy() for name, block in ifc.factors.blocks.items()}
    columns = {f"column {name}": frame[name].to_numpy() for name in frame}
    return moments | columns | {"count": np.array(ifc.factors.count)}


def main() -> None:
    """Fit and score with the other processes; the first one writes."""
    batches = data()
    with sharing() as ranks:
        if "dies" in sys.argv and ranks.rank == 1:
            batches = _DyingData(batches)
        found = results(batches)
        if ranks.rank == 0:
            np.savez(sys.argv[1], world=ranks.world, **found)


class _DyingData(list):
    """Batches of a process that is killed on the way."""

    def __iter__(self) -> object:
        yield self[0]
        os._exit(17)


if __name__ == "__main__":
    main()
