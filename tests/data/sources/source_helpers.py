"""Helpers of the tests of named data."""

import itertools
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from ifcomp.data.sources import Source

_module_numbers = itertools.count()


def read_all(source: Source) -> tuple[Tensor, Tensor | None]:
    """Return all inputs and labels, after a check that a second pass yields the same."""
    first, second = list(source.batches()), list(source.batches())
    assert len(first) == len(second)
    inputs = [[batch[0] if isinstance(batch, tuple) else batch for batch in batches] for batches in (first, second)]
    assert torch.equal(torch.cat(inputs[0]), torch.cat(inputs[1]))
    labels = [batch[1] for batch in first if isinstance(batch, tuple)]
    return torch.cat(inputs[0]), torch.cat(labels) if labels else None


def write_table(**columns: Any) -> str:
    """Write a Parquet file into the current folder and return its name as data."""
    pd.DataFrame(columns).to_parquet("t.parquet")
    return "parquet:t.parquet"


def write_module(text: str) -> str:
    """Write a module with a new name into the current folder and return its name."""
    name = f"made_by_user_{next(_module_numbers)}"
    Path(f"{name}.py").write_text(text)
    return name
