"""One thread a worker: two cores run two workers, and sums come out the same everywhere.

Some virtual machines announce the matrix units of Intel's processors (AMX) and end a process that uses them, as
bfloat16 does by default: tests, and the commands they start, do without.
"""

import os

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # before the first operation of torch

import torch

from experiments.torchvision_shim import declare_missing_operators

torch.set_num_threads(1)
declare_missing_operators()
