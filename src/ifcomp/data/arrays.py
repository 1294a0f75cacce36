"""Data that fits in memory: scikit-learn's digits, and NumPy's ``.npz`` files."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ifcomp.data.source import Batches, Source, SourceOptions, preview_of, readable
from ifcomp.errors import DataError, EmptyDataError, LabelError
from ifcomp.io.untrusted import check_swelling, regular_file

if TYPE_CHECKING:
    from ifcomp.report import Preview

_ARRAYS = ("x", "y", "classes")
_HOW_TO_WRITE = "Write it with numpy.savez(file, x=inputs, y=labels)."


def digits(options: SourceOptions) -> Source:
    """The 1,797 handwritten digits of scikit-learn: [N, 1, 8, 8], values in 0 ... 1."""
    from sklearn.datasets import load_digits

    found = load_digits()
    x = (found.images / 16).astype(np.float32)[:, None]
    return of_arrays("digits", x, found.target, options, tuple(map(str, found.target_names)))


def npz(spec: str, path: str, options: SourceOptions) -> Source:
    """An ``.npz`` file with the inputs ``x``, and if it has them labels ``y`` and class names ``classes``.

    Nothing is unpickled. Numbers with a fraction become float32; ``uint8`` is taken for pixels and scaled to 0 ... 1;
    other whole numbers stay whole, as a model that looks them up needs them.
    """
    arrays = _read(path)
    x, y, classes = arrays["x"], arrays.get("y"), arrays.get("classes")
    if x.ndim < 2 or x.dtype.kind not in "fiub":
        raise DataError(f"'x' in '{path}' must be numbers [N, ...], but is {x.dtype} of shape {list(x.shape)}.")
    if not x.size:
        raise EmptyDataError(f"'x' in '{path}' has no examples or no values: its shape is {list(x.shape)}.")
    if y is not None and (y.dtype.kind not in "iu" or y.shape != (len(x),)):
        raise LabelError(
            f"'y' in '{path}' must be integers of shape [{len(x)}], but is {y.dtype} of shape {list(y.shape)}."
        )
    if classes is not None and (classes.ndim != 1 or classes.dtype.kind != "U"):
        raise DataError(f"'classes' in '{path}' must be a list of strings, but is {classes.dtype}.")
    return of_arrays(spec, x, y, options, None if classes is None else tuple(map(readable, classes)))


def of_arrays(
    spec: str,
    x: NDArray[Any],
    y: NDArray[Any] | None,
    options: SourceOptions,
    class_names: tuple[str, ...] | None,
    columns: Sequence[str] = (),
) -> Source:
    """A source over arrays: inputs [N, ...], labels [N] or None, and the names of the values of a row."""
    labels = None if y is None else torch.from_numpy(y.astype(np.int64))
    shift = channel_shift(options, x.shape[1:], spec)

    def fetch(start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        values = torch.from_numpy(_as_inputs(x[start:stop]))
        return shift(values), None if labels is None else labels[start:stop]

    def previews(indices: Sequence[int]) -> list[Preview]:
        return [preview_of(index, _as_inputs(x[index]), columns) for index in indices]

    return Source(spec, Batches(fetch, len(x), options.examples_at_once), previews, labels, class_names)


def channel_shift(options: SourceOptions, shape: Sequence[int], spec: str) -> ChannelShift:
    """Subtract the mean and divide by the standard deviation of each channel of images [N, C, H, W].

    Raises:
        DataError: If the inputs are not images with as many channels.
    """
    for name, value in (("mean", options.mean), ("std", options.std)):
        if value is None:
            continue
        channels = shape[0] if len(shape) == 3 else None
        if channels is None or len(value) not in (1, channels):
            raise DataError(
                f"--{name} has {len(value)} values, but '{spec}' has inputs of shape {list(shape)}. It takes one "
                "value, or one for each channel, for images [C, H, W]."
            )
    return ChannelShift(options.mean or (0.0,), options.std or (1.0,))


class ChannelShift:
    """``(x - mean) / std`` for each channel."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self._mean, self._std = (torch.tensor(value, dtype=torch.float32).view(-1, 1, 1) for value in (mean, std))
        self._changes = bool((self._mean != 0).any() or (self._std != 1).any())

    def __call__(self, x: Tensor) -> Tensor:
        return (x - self._mean) / self._std if self._changes else x


def _as_inputs(x: NDArray[Any]) -> NDArray[Any]:
    if x.dtype == np.uint8:
        return x.astype(np.float32) / np.float32(255)
    return x.astype(np.int64 if x.dtype.kind in "iu" else np.float32)


def _read(path: str) -> dict[str, NDArray[Any]]:
    try:
        with zipfile.ZipFile(regular_file(path)) as archive:
            sizes = {info.filename.removesuffix(".npy"): info.file_size for info in archive.infolist()}
        if "x" not in sizes:
            raise DataError(
                f"'{path}' needs an array 'x' with the inputs, but has {', '.join(sizes) or 'none'}. {_HOW_TO_WRITE}"
            )
        wanted = [name for name in _ARRAYS if name in sizes]
        check_swelling(path, sum(sizes[name] for name in wanted))
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in wanted}
        if not all(isinstance(array, np.ndarray) for array in arrays.values()):
            raise ValueError("an entry of the archive is no array")
        return arrays
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"There is no file '{path}'.") from error
    except Exception as error:  # a damaged archive makes its readers raise nearly anything
        raise DataError(
            f"Cannot read '{path}' as an .npz file of plain arrays ({error}). Objects are never unpickled. "
            f"{_HOW_TO_WRITE}"
        ) from error
