"""Rows of features of unknown number, in memory or in a temporary file."""

from __future__ import annotations

from tempfile import TemporaryFile
from typing import IO

import numpy as np
from numpy.typing import NDArray

#: Bytes beyond which values are in a temporary file.
MEMORY_BYTES = 2**28

#: Bytes that are collected before they are written.
_CHUNK_BYTES = 2**20


class ValueStore:
    """Rows of float32 values. The temporary file has no name and disappears with the array.

    Attributes:
        width: Number of values per row.
        memory_bytes: Bytes beyond which the rows are in a temporary file.
    """

    def __init__(self, width: int, memory_bytes: int = MEMORY_BYTES) -> None:
        self.width, self.memory_bytes = width, memory_bytes
        self._buffer, self._count = bytearray(), 0
        self._file: IO[bytes] | None = None

    def __len__(self) -> int:
        """Number of rows."""
        return self._count

    def append(self, row: NDArray[np.float32]) -> None:
        """Add one row [F]."""
        self._buffer += row.tobytes()
        self._count += 1
        if self._file is None and len(self._buffer) > self.memory_bytes:
            self._file = TemporaryFile(prefix="ifcomp-")  # noqa: SIM115
        if self._file is not None and len(self._buffer) > _CHUNK_BYTES:
            self._flush(self._file)

    def as_array(self) -> NDArray[np.float32]:
        """Return all rows [N, F]. No row can be added afterwards."""
        if self._file is None:
            return np.frombuffer(self._buffer, np.float32).reshape(self._count, self.width)
        with self._file as file:
            self._flush(file)
            file.flush()
            return np.memmap(file, np.float32, "r", shape=(self._count, self.width))

    def _flush(self, file: IO[bytes]) -> None:
        file.write(self._buffer)
        self._buffer.clear()
