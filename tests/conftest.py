"""One thread a worker: two cores run two workers, and sums come out the same everywhere.

Some virtual machines announce the matrix units of Intel's processors (AMX) and end a process that uses them, as
bfloat16 does by default: tests, and the commands they start, do without.
"""

import os

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # before the first operation of torch

from pathlib import Path

import pytest
import torch

from experiments.torchvision_shim import declare_missing_operators

torch.set_num_threads(1)
declare_missing_operators()

#: Tests that take long or guard tools around the library; ``make test`` leaves them out, ``make test-all`` runs them.
SECOND_TIER = (
    "benchmarks",
    "experiments",
    "faults",
    "report/test_report_browser.py",
    "test_examples.py",
    "trust/test_fuzz.py",
    "trust/test_hostile_files.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the second tier."""
    folder = Path(__file__).parent
    second = [folder / name for name in SECOND_TIER]
    for item in items:
        if any(path == item.path or path in item.path.parents for path in second):
            item.add_marker(pytest.mark.second_tier)
