"""One thread a worker: two cores run two workers, and sums come out the same everywhere."""

import torch

from experiments.torchvision_shim import declare_missing_operators

torch.set_num_threads(1)
declare_missing_operators()
