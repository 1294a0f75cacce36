"""Large arrays with one row per example, in memory or in temporary files."""

from __future__ import annotations

from collections.abc import Mapping
from tempfile import TemporaryFile

import numpy as np

#: Number of bytes beyond which arrays are in temporary files.
MEMORY_BYTES = 2**30


def allocate(
    rows: int, sizes: Mapping[str, int], dtype: np.dtype, memory_bytes: int = MEMORY_BYTES
) -> dict[str, np.ndarray]:
    """Return arrays of zeros [rows, size] by name. Temporary files have no name and are deleted with their array.

    Args:
        rows: Number of examples n.
        sizes: Number of columns by name.
        dtype: Data type of all arrays.
        memory_bytes: Memory limit of all arrays together. Beyond it each is in a temporary file.
    """
    if rows * sum(sizes.values()) * dtype.itemsize <= memory_bytes:
        return {name: np.zeros((rows, size), dtype) for name, size in sizes.items()}
    return {name: _zeros_in_file(rows, size, dtype) for name, size in sizes.items()}


def _zeros_in_file(rows: int, columns: int, dtype: np.dtype) -> np.ndarray:
    with TemporaryFile(prefix="ifcomp-") as file:
        return np.memmap(file, dtype, "w+", shape=(rows, columns))
