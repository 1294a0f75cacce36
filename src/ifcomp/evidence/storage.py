"""Large arrays with one row per example: in memory, in temporary files, or in files that a resumed run opens again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
import torch

from ifcomp.errors import CheckpointError, StorageError
from ifcomp.io.files import check_free_space
from ifcomp.io.fingerprints import digest_tensors

#: Number of bytes beyond which arrays are in temporary files.
MEMORY_BYTES = 2**30

#: Number of rows that are copied at once.
_COPIED_ROWS = 8192


def allocate(
    rows: int,
    sizes: Mapping[str, int],
    dtype: np.dtype,
    memory_bytes: int = MEMORY_BYTES,
    files: Path | None = None,
    *,
    reopen: bool = False,
) -> dict[str, np.ndarray]:
    """Return arrays [rows, size] by name: zeros, or the content of files of an earlier run.

    Args:
        rows: Number of examples n.
        sizes: Number of columns by name.
        dtype: Data type of all arrays.
        memory_bytes: Memory limit of all arrays together. Beyond it each is in a temporary file without a name, which
            is deleted with its array.
        files: Beginning of the paths of files that stay. None uses memory or temporary files.
        reopen: Open the files of an earlier run. They must exist.

    Raises:
        CheckpointError: If files of an earlier run are missing or have another size.
        StorageError: If the disk has too little free space for new files.
    """
    total = rows * sum(sizes.values()) * dtype.itemsize
    if files is not None:
        paths = {name: files.with_name(f"{files.name}-{number}") for number, name in enumerate(sizes)}
        if not reopen:
            _create_folder(files.parent)
            check_free_space(files, total)
        opened = _reopened if reopen else _created
        return {name: opened(paths[name], rows, size, dtype) for name, size in sizes.items()}
    if total <= memory_bytes:
        return {name: np.zeros((rows, size), dtype) for name, size in sizes.items()}
    return {name: _zeros_in_temporary_file(rows, size, dtype) for name, size in sizes.items()}


def append_digest(row_digests: list[list[Any]], arrays: Sequence[np.ndarray], stop: int) -> None:
    """Append the digest of the rows up to ``stop`` that have none yet.

    Args:
        row_digests: Last row and digest of consecutive blocks of rows, as plain JSON.
        arrays: Arrays with the same number of rows.
        stop: Number of rows that are finished.
    """
    start = row_digests[-1][0] if row_digests else 0
    if stop > start:
        row_digests.append([stop, _digest_rows(arrays, start, stop)])


def check_digests(row_digests: Sequence[Sequence[Any]], arrays: Sequence[np.ndarray], name: str) -> None:
    """Raise CheckpointError if rows differ from those that `append_digest` added."""
    start = 0
    for stop, digest in row_digests:
        if _digest_rows(arrays, start, stop) != digest:
            raise CheckpointError(
                f"Cannot resume: the file of the {name} was damaged or changed. Delete the checkpoint to start again."
            )
        start = stop


def _digest_rows(arrays: Sequence[np.ndarray], start: int, stop: int) -> str:
    return digest_tensors(torch.from_numpy(array[start:stop]) for array in arrays)


def copied(array: np.ndarray, memory_bytes: int = MEMORY_BYTES) -> np.ndarray:
    """Return a copy of an array [rows, size], in memory or in a temporary file."""
    copy = allocate(len(array), {"copy": array.shape[1]}, array.dtype, memory_bytes)["copy"]
    for start in range(0, len(array), _COPIED_ROWS):
        copy[start : start + _COPIED_ROWS] = array[start : start + _COPIED_ROWS]
    return copy


def _zeros_in_temporary_file(rows: int, columns: int, dtype: np.dtype) -> np.ndarray:
    with TemporaryFile(prefix="ifcomp-") as file:
        return np.memmap(file, dtype, "w+", shape=(rows, columns))


def _create_folder(folder: Path) -> None:
    if folder.is_symlink():
        raise StorageError(f"'{folder}' is a link. Remove it, or choose another output file.")
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise StorageError(f"Cannot create the folder '{folder}': {error}") from error


def _created(path: Path, rows: int, columns: int, dtype: np.dtype) -> np.ndarray:
    """Create a file of zeros. An earlier file or link is replaced."""
    path.unlink(missing_ok=True)
    return np.memmap(path, dtype, "w+", shape=(rows, columns))


def _reopened(path: Path, rows: int, columns: int, dtype: np.dtype) -> np.ndarray:
    if path.is_symlink() or not path.is_file() or path.stat().st_size != rows * columns * dtype.itemsize:
        raise CheckpointError(f"Cannot resume: '{path}' is missing or damaged. Delete the checkpoint to start again.")
    return np.memmap(path, dtype, "r+", shape=(rows, columns))
