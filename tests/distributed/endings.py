"""Two processes that create and end process groups repeatedly: ``endings.py RANK FOLDER``."""

import sys
from functools import partial
from pathlib import Path

import torch.distributed as dist

from ifcomp.distributed import gather, sharing

ROUNDS = 40


def main() -> None:
    """Create a new group in each round, and end it right after one exchange."""
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    init = dist.init_process_group
    for round_index in range(ROUNDS):
        store = dist.FileStore(str(folder / str(round_index)), 2)
        dist.init_process_group = partial(init, store=store, rank=rank, world_size=2)
        with sharing():
            assert gather({"rank": rank}) == [{"rank": 0}, {"rank": 1}]


if __name__ == "__main__":
    main()
