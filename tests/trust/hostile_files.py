"""Files made to harm whoever reads them, as bytes."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

#: Bytes that a bomb swells to: too many to be overlooked, few enough to be made in a moment.
BOMB = 280 * 2**20


class Trap:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.system, (f"touch {self.path}",)


def safetensors(header: Any, payload: bytes = b"", length: int | None = None) -> bytes:
    """A file with any header: a value for JSON, or bytes as they are."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + payload


def torch_zip(program: bytes, compression: int = zipfile.ZIP_STORED, storages: tuple[bytes, ...] = ()) -> bytes:
    """What torch.save writes, with any program for the unpickler."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as file:
        file.writestr("net/data.pkl", program)
        file.writestr("net/version", "3\n")
        file.writestr("net/byteorder", "little")
        for number, storage in enumerate(storages):
            file.writestr(f"net/data/{number}", storage)
    return stream.getvalue()


def torch_members(content: Any) -> dict[str, bytes]:
    """The members of what torch.save writes, by name."""
    with zipfile.ZipFile(io.BytesIO(saved(content))) as file:
        return {name: file.read(name) for name in file.namelist()}


def stored_zip(members: Mapping[str, bytes] | Iterable[tuple[str, bytes]]) -> bytes:
    """An archive without compression. Names may occur twice."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as file:
        for name, content in members.items() if isinstance(members, Mapping) else members:
            file.writestr(name, content)
    return stream.getvalue()


def torch_tar(trap: Trap) -> bytes:
    """The oldest format of torch.save, full of traps."""
    stream, content = io.BytesIO(), pickle.dumps(trap, 2)
    with tarfile.open(fileobj=stream, mode="w") as file:
        for name in ("sys_info", "pickle", "storages", "tensors"):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            file.addfile(entry, io.BytesIO(content))
    return stream.getvalue()


def saved(content: Any, **settings: Any) -> bytes:
    """What torch.save writes."""
    stream = io.BytesIO()
    torch.save(content, stream, **settings)
    return stream.getvalue()


def deflated_weights() -> bytes:
    """A state dict whose storage is compressed zeros."""
    size = 32 * 2**20
    whole = io.BytesIO(saved({"weight": torch.zeros(size // 4)}))
    with zipfile.ZipFile(whole) as file:
        program = file.read(next(name for name in file.namelist() if name.endswith("data.pkl")))
    return torch_zip(program, zipfile.ZIP_DEFLATED, (bytes(size),))


def npz(**members: bytes) -> bytes:
    """An archive with any bytes for arrays."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        for name, content in members.items():
            file.writestr(f"{name}.npy", content)
    return stream.getvalue()


def npy(shape: tuple[int, ...], kind: str = "'|u1'", content: bytes = b"") -> bytes:
    """An array whose header says what it likes."""
    head = f"{{'descr': {kind}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + content


def arrays(**given: Any) -> bytes:
    """A well-formed archive."""
    stream = io.BytesIO()
    np.savez(stream, **given)
    return stream.getvalue()


def with_sizes(archive: bytes, size: int) -> bytes:
    """The same archive, which says in its directory that each member has so many bytes."""
    return re.sub(rb"(PK\x01\x02.{20})....", lambda found: found[1] + struct.pack("<I", size), archive, flags=re.DOTALL)


def png(width: int, height: int) -> bytes:
    """An image that claims a size, and has next to nothing of it."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")
