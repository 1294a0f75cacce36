"""Train the image networks of the study on one thread. Finished trainings are skipped, interrupted ones resumed.

IFCOMP_DATA=... python -m experiments.label_audit.train --only "cifar10*"
IFCOMP_DATA=... python -m experiments.label_audit.train --only "fashion*" --folds
"""

from __future__ import annotations

import argparse
import sys
from fnmatch import fnmatch

import torch

from experiments.label_audit.images import FOLDS, TASKS


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="pattern of task names")
    parser.add_argument("--seeds", type=int, nargs="*", help="seeds; all seeds of the task by default")
    parser.add_argument("--folds", action="store_true", help="train the five-fold networks instead")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name, task in TASKS.items():
        if not fnmatch(name, arguments.only):
            continue
        seeds = task.seeds if arguments.seeds is None else tuple(arguments.seeds)
        for seed in seeds[: task.folds_seeds] if arguments.folds else seeds:
            if arguments.folds:
                for fold in range(FOLDS):
                    task.train_fold(seed, fold, progress=False)
            else:
                task.train(seed, progress=False)
            sys.stdout.write(f"{name}, seed {seed}: trained\n")


if __name__ == "__main__":
    main()
