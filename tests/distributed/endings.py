"""Two processes that create, use and destroy many process groups: ``endings.py RANK FOLDER``."""

import importlib
import sys
from functools import partial
from pathlib import Path

import torch.distributed as dist

from ifcomp.distributed import all_gather_objects, data_parallel

ROUNDS = 40


def main() -> None:
    """In each round, destroy a new process group directly after a collective operation."""
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    init = dist.init_process_group
    for number in range(ROUNDS):
        store = dist.FileStore(str(folder / str(number)), 2)
        dist.init_process_group = partial(init, store=store, rank=rank, world_size=2)
        with data_parallel():
            assert all_gather_objects({"rank": rank}) == [{"rank": 0}, {"rank": 1}]
            importlib.import_module("torch._dynamo")  # as the measurement of memory does
        assert not _gloo_threads()  # a thread that outlives the group can abort the process at its exit


def _gloo_threads() -> list[str]:
    """Names of the threads of gloo in this process, on Linux."""
    names = [task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").glob("*")]
    return [name for name in names if "gloo" in name]


if __name__ == "__main__":
    main()
