"""Two processes that share work and end it, again and again: ``endings.py RANK FOLDER``."""

import sys
from functools import partial
from pathlib import Path

import torch.distributed as dist

from ifcomp.distributed import gather, sharing

ROUNDS = 40


def main() -> None:
    """Each round has a new group, which ends right after its processes have spoken to each other."""
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    init = dist.init_process_group
    for number in range(ROUNDS):
        store = dist.FileStore(str(folder / str(number)), 2)
        dist.init_process_group = partial(init, store=store, rank=rank, world_size=2)
        with sharing():
            assert gather({"rank": rank}) == [{"rank": 0}, {"rank": 1}]


if __name__ == "__main__":
    main()
