"""Corrections of ``npz:FILE``."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ifcomp.data.corrections.base import Corrections, LabelledFile, corrected_labels, kept_rows
from ifcomp.data.sources.base import SourceRequest
from ifcomp.data.sources.npz import open_npz
from ifcomp.errors import DataError, IfcompError
from ifcomp.io.files import atomic_write
from ifcomp.io.untrusted import check_decompressed_size


def open_npz_labels(request: SourceRequest) -> LabelledFile:
    """Open the labels of an ``.npz`` file.

    The corrected file has the same arrays. Rows are dropped from every array with one row per example.
    """
    source = open_npz(request)
    labels = None if source.labels is None else source.labels.numpy()
    names = request.class_names or source.class_names

    def write(corrections: Corrections, out: str) -> tuple[()]:
        path = request.path
        with (
            _explain_errors(path),
            atomic_write(out) as scratch,
            zipfile.ZipFile(path) as archive,
            np.load(path) as arrays,
        ):
            check_decompressed_size(path, sum(info.file_size for info in archive.infolist()))
            with zipfile.ZipFile(scratch, "w", allowZip64=True) as copy:
                for info in archive.infolist():
                    name = info.filename.removesuffix(".npy")
                    array = _correct(name, arrays[info.filename], labels, len(source), corrections)
                    _write_array(copy, info, array)
        return ()

    return LabelledFile(request.path, len(source), labels, names, None, write)


@contextmanager
def _explain_errors(path: str) -> Iterator[None]:
    try:
        yield
    except IfcompError:
        raise
    except Exception as error:  # readers of damaged archives raise errors of many types
        raise DataError(
            f"Cannot copy '{path}' ({error}). All its entries must be plain arrays; objects are never unpickled."
        ) from error


def _correct(
    name: str, array: Any, labels: NDArray[np.int64] | None, count: int, corrections: Corrections
) -> NDArray[Any]:
    """Return an array with the new labels and without the dropped rows."""
    if not isinstance(array, np.ndarray):
        raise ValueError(f"entry '{name}' is not an array")
    if name == "y" and labels is not None:
        return corrected_labels(labels, corrections).astype(array.dtype)
    is_per_example = array.ndim > 0 and len(array) == count and name != "classes"
    return array[kept_rows(count, corrections)] if is_per_example and corrections.dropped else array


def _write_array(archive: zipfile.ZipFile, original: zipfile.ZipInfo, array: NDArray[Any]) -> None:
    """Write an array under the name and with the compression of the original entry."""
    info = zipfile.ZipInfo(original.filename)
    info.compress_type = zipfile.ZIP_STORED if original.compress_type == zipfile.ZIP_STORED else zipfile.ZIP_DEFLATED
    with archive.open(info, "w", force_zip64=True) as stream:
        np.lib.format.write_array(stream, array, allow_pickle=False)
