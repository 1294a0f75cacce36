"""28x28 grey images from the folder that IFCOMP_DATA names."""

import gzip
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


def folder() -> Path:
    """The folder with the data sets."""
    if "IFCOMP_DATA" not in os.environ:
        raise SystemExit("Set IFCOMP_DATA to the folder that holds mnist/, fashion-mnist/, notmnist/ and kmnist/.")
    return Path(os.environ["IFCOMP_DATA"])


def images(name: str, part: str) -> Tensor:
    """Images [N, 1, 28, 28] from 0 to 1; ``part`` is "train" or "t10k"."""
    values = _idx(folder() / name / f"{part}-images-idx3-ubyte.gz", 16).reshape(-1, 1, 28, 28)
    return torch.tensor(values, dtype=torch.float32) / 255


def labels(name: str, part: str) -> Tensor:
    """Labels [N]."""
    return torch.tensor(_idx(folder() / name / f"{part}-labels-idx1-ubyte.gz", 8), dtype=torch.int64)


def kuzushiji() -> Tensor:
    """Kuzushiji images [10000, 1, 28, 28] from 0 to 1."""
    values = np.load(folder() / "kmnist" / "kmnist-test-imgs.npz", allow_pickle=False)["arr_0"]
    return torch.tensor(values, dtype=torch.float32).reshape(-1, 1, 28, 28) / 255


def _idx(path: Path, header: int) -> np.ndarray:
    with gzip.open(path) as stream:
        return np.frombuffer(stream.read(), dtype=np.uint8, offset=header)
