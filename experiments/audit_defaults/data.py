"""28x28 grey images from the folder IFCOMP_DATA."""

import gzip
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


def folder() -> Path:
    """Return the folder of the data sets."""
    if "IFCOMP_DATA" not in os.environ:
        raise SystemExit("Set IFCOMP_DATA to the folder that contains fashion-mnist/.")
    return Path(os.environ["IFCOMP_DATA"])


def images(name: str, part: str) -> Tensor:
    """Return the images [N, 1, 28, 28] in [0, 1]; ``part`` is "train" or "t10k"."""
    values = _idx(folder() / name / f"{part}-images-idx3-ubyte.gz", 16).reshape(-1, 1, 28, 28)
    return torch.tensor(values, dtype=torch.float32) / 255


def labels(name: str, part: str) -> Tensor:
    """Return the labels [N]."""
    return torch.tensor(_idx(folder() / name / f"{part}-labels-idx1-ubyte.gz", 8), dtype=torch.int64)


def _idx(path: Path, header: int) -> np.ndarray:
    with gzip.open(path) as stream:
        return np.frombuffer(stream.read(), dtype=np.uint8, offset=header)
