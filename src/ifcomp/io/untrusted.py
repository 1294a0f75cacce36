"""Files that others wrote, read without trust: files on disk only, never a pickle, never more than they can hold.

Everything here raises OSError or ValueError with the reason in words; callers put them into their own typed errors.
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

#: Content that is so many times larger than its file, and larger than this many bytes, is taken for a bomb.
SWELLING = 100
BOMB_BYTES = 2**28

#: Bytes of a text file at most: records and settings take a few thousand.
LARGEST_TEXT = 2**26

#: Lists in lists of JSON at most; whoever handles deeper ones runs out of stack.
DEEPEST = 50


def regular_file(path: str | os.PathLike[str]) -> Path:
    """The path, if there is a file: reading a pipe or a device might never end.

    Raises:
        OSError: If there is none; says what is there instead.
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
    """The content of a text file of reasonable size."""
    file = regular_file(path)
    size = file.stat().st_size
    if size > LARGEST_TEXT:
        raise ValueError(f"it has {as_text(size)}, more than the {as_text(LARGEST_TEXT)} that such a file can have")
    return file.read_text(encoding="utf-8")


def parse_json(text: str) -> Any:
    """JSON as Python has it, nested no deeper than anything that the library writes."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if _is_deeper(value, DEEPEST):
        raise ValueError("it is nested too deeply")
    return value


def _is_deeper(value: Any, most: int) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return bool(parts) and (not most or any(_is_deeper(part, most - 1) for part in parts))


def read_tensors(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a safetensors file by name, and its metadata.

    The format knows no code. What a header claims is compared with the size of the file before any tensor is made.
    Safetensors opens the file twice, for the header and for the tensors: one that was replaced in between is read anew.
    """
    file = regular_file(path)
    before = os.stat(file)
    file.open("rb").close()  # says why it cannot be read, which safetensors does not
    try:
        with torch.device("cpu"), safe_open(file, framework="pt") as opened:  # 0.4 asks for the default device
            found = {name: opened.get_tensor(name) for name in opened.keys()}, dict(opened.metadata() or {})  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"it is truncated or not a safetensors file ({error})") from error
    return found if os.path.samestat(before, os.stat(file)) else read_tensors(file)


def check_swelling(path: str | os.PathLike[str], size: int) -> None:
    """Raise ValueError unless the content of a compressed file, of so many bytes, is plausible and fits in memory."""
    on_disk, there = os.stat(path).st_size, available(torch.device("cpu"))
    if size > BOMB_BYTES and size > SWELLING * on_disk:
        raise ValueError(
            f"its {as_text(on_disk)} would swell to {as_text(size)}, more than {SWELLING} times as much, so it is "
            "taken for a bomb; if it is not, write it without compression"
        )
    if there is not None and size > there:
        raise ValueError(f"it holds {as_text(size)}, but there are only {as_text(there)} of memory")
