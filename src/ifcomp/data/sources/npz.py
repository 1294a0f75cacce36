"""``npz:FILE``: arrays in a NumPy archive."""

from __future__ import annotations

import zipfile
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ifcomp.data.checks import describe_targets
from ifcomp.data.sources.arrays import source_from_arrays
from ifcomp.data.sources.base import Source, SourceRequest, explain_errors
from ifcomp.data.sources.previews import printable
from ifcomp.errors import DataError, EmptyDataError, LabelError
from ifcomp.io.untrusted import check_decompressed_size, regular_file

_ARRAYS = ("x", "y", "classes")

#: Largest number of labels of a wrong kind that a message describes.
_MAX_DESCRIBED = 10**6

_HOW_TO_WRITE = "Write it with numpy.savez(file, x=inputs, y=labels)."


def open_npz(request: SourceRequest) -> Source:
    """Open an ``.npz`` file with inputs ``x``, and optional labels ``y`` and class names ``classes``.

    Nothing is unpickled. Floating-point inputs become float32, ``uint8`` inputs are pixels and are scaled to 0 ... 1,
    other integers become int64, as embeddings need them.

    Raises:
        DataError: If the file cannot be read, or an array has the wrong type or shape.
    """
    path = request.path
    arrays = _read_arrays(path)
    x, y, classes = arrays["x"], arrays.get("y"), arrays.get("classes")
    if x.ndim < 2 or x.dtype.kind not in "fiub":
        raise DataError(f"'x' in '{path}' must be numbers [N, ...], but is {x.dtype} of shape {list(x.shape)}.")
    if not x.size:
        raise EmptyDataError(f"'x' in '{path}' has no examples or no values: its shape is {list(x.shape)}.")
    if y is not None and (y.dtype.kind not in "iu" or y.shape != (len(x),)):
        raise LabelError(
            f"'y' in '{path}' must be integers of shape [{len(x)}], but is {y.dtype} of shape {list(y.shape)}"
            f"{_describe(y)}"
        )
    if classes is not None and (classes.ndim != 1 or classes.dtype.kind != "U"):
        raise DataError(f"'classes' in '{path}' must be a list of strings, but is {classes.dtype}.")
    class_names = None if classes is None else tuple(map(printable, classes))
    return source_from_arrays(request.spec, x, y, request.options, class_names)


def _describe(y: NDArray[Any]) -> str:
    is_target = y.dtype.kind in "fb" or (y.dtype.kind in "iu" and y.ndim > 1)
    if not 0 < y.size <= _MAX_DESCRIBED:
        return "."
    return describe_targets(torch.from_numpy(y.astype(np.float64))) if is_target else "."


def _read_arrays(path: str) -> dict[str, NDArray[Any]]:
    advice = f" Objects are never unpickled. {_HOW_TO_WRITE}"
    # Readers of damaged archives raise errors of many types.
    with explain_errors(path, "an .npz file of plain arrays", (Exception,), advice):
        with zipfile.ZipFile(regular_file(path)) as archive:
            sizes = {info.filename.removesuffix(".npy"): info.file_size for info in archive.infolist()}
        if "x" not in sizes:
            raise DataError(
                f"'{path}' needs an array 'x' with the inputs, but has {', '.join(sizes) or 'none'}. {_HOW_TO_WRITE}"
            )
        names = [name for name in _ARRAYS if name in sizes]
        check_decompressed_size(path, sum(sizes[name] for name in names))
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in names}
        if not all(isinstance(array, np.ndarray) for array in arrays.values()):
            raise ValueError("an entry of the archive is not an array")
        return arrays
