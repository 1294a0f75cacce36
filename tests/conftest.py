"""One thread a worker: two cores run two workers, and sums come out the same everywhere."""

import torch

torch.set_num_threads(1)
