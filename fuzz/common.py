"""Shared by the targets: a small classifier, its data, and files as bytes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import nn

from ifcomp import IFComp


@cache
def model() -> nn.Module:
    """Return a classifier of inputs [B, 4] with three classes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.BatchNorm1d(5), nn.Linear(5, 3)).eval()


@cache
def examples() -> tuple[torch.Tensor, torch.Tensor]:
    """Return six labelled examples."""
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(1)), torch.arange(6) % 3


@cache
def fitted() -> IFComp:
    """Return a fitted predictor."""
    return IFComp(model()).fit([examples()], progress=False)


def file_bytes(write: Callable[[str], object], suffix: str = "") -> bytes:
    """Return the bytes that a function writes to a path."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"file{suffix}"
        write(str(path))
        return path.read_bytes()


def blank() -> list[bytes]:
    """Return seeds of targets that build their input from `Draw`."""
    return [bytes(64), bytes(range(128)), bytes(255 - value for value in range(128))]
