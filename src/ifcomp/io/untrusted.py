"""Safe reading of files that others wrote: regular files only, no pickles, bounded memory.

All functions raise OSError or ValueError with the reason. Callers convert them to their own errors.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ifcomp.memory import as_text, available

#: A compressed file is refused as a decompression bomb if its content has more bytes than `BOMB_BYTES` and more than
#: `MAX_EXPANSION` times the bytes of the file.
BOMB_BYTES = 2**28
MAX_EXPANSION = 100

#: Largest size of a text file in bytes. Records and settings take a few kilobytes.
MAX_TEXT_BYTES = 2**26

#: Largest depth of nested JSON. Deeper values exhaust the stack.
MAX_JSON_DEPTH = 50


def regular_file(path: str | os.PathLike[str]) -> Path:
    """Return the path if it is a regular file. Reading a pipe or a device may never end.

    Raises:
        OSError: If it is missing, a folder, a pipe, a socket or a device.
    """
    try:
        mode = os.stat(path).st_mode
    except ValueError as error:  # a zero byte, or characters that no path can have
        raise FileNotFoundError(f"there is no such file: {error}") from error
    if stat.S_ISDIR(mode):
        raise IsADirectoryError("it is a folder")
    if not stat.S_ISREG(mode):
        raise OSError("it is a pipe, a socket or a device, not a file")
    return Path(path)


def read_text(path: str | os.PathLike[str]) -> str:
    """Read a text file of at most `MAX_TEXT_BYTES`."""
    file = regular_file(path)
    size = file.stat().st_size
    if size > MAX_TEXT_BYTES:
        raise ValueError(f"it has {as_text(size)}, more than the limit of {as_text(MAX_TEXT_BYTES)} for such a file")
    return file.read_text(encoding="utf-8")


def parse_json(text: str) -> Any:
    """Parse JSON of at most `MAX_JSON_DEPTH` nested levels."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if _is_deeper(value, MAX_JSON_DEPTH):
        raise ValueError("it is nested too deeply")
    return value


def _is_deeper(value: Any, depth: int) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return bool(parts) and (not depth or any(_is_deeper(part, depth - 1) for part in parts))


def read_safetensors(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the tensors by name and the metadata of a safetensors file.

    The format contains no code. The library compares the header with the file size before it creates a tensor. It opens
    the file twice, for header and tensors; a file that is replaced in between is read again.
    """
    file = regular_file(path)
    before = os.stat(file)
    file.open("rb").close()  # raises an error with the reason, unlike safetensors
    try:
        with torch.device("cpu"), safe_open(file, framework="pt") as opened:  # safetensors 0.4 uses the default device
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            metadata = dict(opened.metadata() or {})
    except SafetensorError as error:
        raise ValueError(f"it is truncated or not a safetensors file ({error})") from error
    return (tensors, metadata) if os.path.samestat(before, os.stat(file)) else read_safetensors(file)


def check_decompressed_size(path: str | os.PathLike[str], size: int) -> None:
    """Check the size of the decompressed content of a file, in bytes.

    Raises:
        ValueError: If the content is a decompression bomb, or exceeds the available memory.
    """
    file_size, free = os.stat(path).st_size, available(torch.device("cpu"))
    if size > BOMB_BYTES and size > MAX_EXPANSION * file_size:
        raise ValueError(
            f"its {as_text(file_size)} expand to {as_text(size)}, more than {MAX_EXPANSION} times as much, so it may "
            "be a decompression bomb; if it is not, write it without compression"
        )
    if free is not None and size > free:
        raise ValueError(f"its content takes {as_text(size)}, but only {as_text(free)} of memory are available")
