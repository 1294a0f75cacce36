"""Sources of arrays in memory, shared by the kinds that read all data at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ifcomp.data.sources.base import IndexedBatches, Source
from ifcomp.data.sources.options import SourceOptions
from ifcomp.data.sources.previews import preview_input
from ifcomp.errors import DataError

if TYPE_CHECKING:
    from ifcomp.report import Preview


def source_from_arrays(
    spec: str,
    x: NDArray[Any],
    y: NDArray[Any] | None,
    options: SourceOptions,
    class_names: tuple[str, ...] | None,
    columns: Sequence[str] = (),
) -> Source:
    """Build a source from arrays.

    Args:
        spec: The name as typed.
        x: Inputs [N, ...]. ``uint8`` is scaled to 0 ... 1; other integers become int64, all other types float32.
        y: Labels [N], or None.
        options: Batch size and normalisation.
        class_names: Names of the classes 0 ... K-1, or None.
        columns: Names of the values of one input, for previews.
    """
    labels = None if y is None else torch.from_numpy(y.astype(np.int64))
    normalize = ChannelNormalization.from_options(options, x.shape[1:], spec)

    def fetch(start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        inputs = torch.from_numpy(_as_inputs(x[start:stop]))
        return normalize(inputs), None if labels is None else labels[start:stop]

    def previews(indices: Sequence[int]) -> list[Preview]:
        return [preview_input(index, _as_inputs(x[index]), columns) for index in indices]

    batches = IndexedBatches(fetch, len(x), options.batch_size_or_default)
    return Source(spec, batches, previews, labels, class_names)


def _as_inputs(x: NDArray[Any]) -> NDArray[Any]:
    if x.dtype == np.uint8:
        return x.astype(np.float32) / np.float32(255)
    return x.astype(np.int64 if x.dtype.kind in "iu" else np.float32)


class ChannelNormalization:
    """``(x - mean) / std`` for each channel of images [N, C, H, W]."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self._mean, self._std = (torch.tensor(value, dtype=torch.float32).view(-1, 1, 1) for value in (mean, std))
        self._is_identity = bool((self._mean == 0).all() and (self._std == 1).all())

    @classmethod
    def from_options(cls, options: SourceOptions, shape: Sequence[int], spec: str) -> ChannelNormalization:
        """Build the normalisation for inputs of a shape [C, H, W].

        Raises:
            DataError: If the inputs are not images with as many channels.
        """
        for name, values in (("mean", options.mean), ("std", options.std)):
            if values is None:
                continue
            channels = shape[0] if len(shape) == 3 else None
            if channels is None or len(values) not in (1, channels):
                raise DataError(
                    f"--{name} has {len(values)} values, but '{spec}' has inputs of shape {list(shape)}. It takes one "
                    "value, or one for each channel, for images [C, H, W]."
                )
        return cls(options.mean or (0.0,), options.std or (1.0,))

    def __call__(self, x: Tensor) -> Tensor:
        return x if self._is_identity else (x - self._mean) / self._std
