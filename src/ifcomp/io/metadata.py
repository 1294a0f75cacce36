"""Text entries in the header of a safetensors file, read and written without its tensors."""

from __future__ import annotations

import json
import os
import shutil

from safetensors import SafetensorError, safe_open

from ifcomp.io.files import atomic_write
from ifcomp.io.untrusted import regular_file

#: Bytes of the number at the start of a safetensors file, the length of its header.
_LENGTH_BYTES = 8


def read_entry(path: str | os.PathLike[str], name: str) -> str | None:
    """Return the text entry of a safetensors file, or None if there is none.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If it is not a safetensors file.
    """
    file = regular_file(path)
    file.open("rb").close()  # raises an error with the reason, unlike safetensors
    try:
        with safe_open(file, framework="pt") as opened:
            entries: dict[str, str] = opened.metadata() or {}
            return entries.get(name)
    except SafetensorError as error:
        raise ValueError(f"it is truncated or not a safetensors file ({error})") from error


def write_entry(path: str | os.PathLike[str], name: str, text: str) -> None:
    """Add a text entry to a safetensors file that this process wrote, or replace it. Atomic."""
    with open(path, "rb") as source, atomic_write(path) as scratch, scratch.open("wb") as target:
        header = json.loads(source.read(int.from_bytes(source.read(_LENGTH_BYTES), "little")))
        header["__metadata__"] = {**header.get("__metadata__", {}), name: text}
        content = json.dumps(header).encode()
        content += b" " * (-len(content) % _LENGTH_BYTES)  # tensors are aligned
        target.write(len(content).to_bytes(_LENGTH_BYTES, "little") + content)
        shutil.copyfileobj(source, target)
