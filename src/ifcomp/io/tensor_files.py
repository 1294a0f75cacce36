"""Files of this library: tensors and JSON in one safetensors file, with a SHA-256 digest of both."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ifcomp.io.files import atomic_write
from ifcomp.io.fingerprints import digest_tensors
from ifcomp.io.untrusted import MAX_TEXT_BYTES, parse_json, read_safetensors, regular_file

#: Name of the digest in the JSON. Safetensors writes several entries of its header in random order.
_DIGEST = "sha256"


def write_tensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    entry: str,
    content: Mapping[str, Any],
    *,
    on_every_rank: bool = False,
) -> None:
    """Write tensors and plain JSON to one file, atomically.

    Args:
        path: The file.
        tensors: Tensors by name.
        entry: Name of the entry in the header that contains the JSON.
        content: The JSON.
        on_every_rank: As for `atomic_write`.

    Raises:
        StorageError: If the file cannot be written.
    """
    copied = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    text = json.dumps({**content, _DIGEST: _digest(copied, content)})
    with atomic_write(path, on_every_rank=on_every_rank) as scratch:
        try:
            save_file(copied, scratch, metadata={entry: text})
        except SafetensorError as error:
            raise OSError(str(error)) from error


def read_tensors(path: str | os.PathLike[str], entry: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the JSON of a file that `write_tensors` wrote.

    Raises:
        OSError: If the file cannot be read.
        KeyError: If it has no such entry.
        ValueError: If it is not a safetensors file, or differs from what was written.
    """
    tensors, metadata = read_safetensors(path)
    content = parse_json(metadata[entry])
    if not isinstance(content, dict) or _DIGEST not in content:
        raise ValueError("it has no SHA-256 digest, so an earlier version wrote it, or it is damaged; fit again")
    if content[_DIGEST] != _digest(tensors, content):
        raise ValueError("it was damaged or changed after it was written: its SHA-256 digest differs; fit again")
    return tensors, content


def read_header(path: str | os.PathLike[str], entry: str) -> dict[str, Any]:
    """Return the JSON of a file without its tensors and without a check of the digest; empty if there is none.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If it is not a safetensors file, or the JSON is damaged.
    """
    file = regular_file(path)
    file.open("rb").close()  # raises an error with the reason, unlike safetensors
    try:
        with safe_open(file, framework="pt") as opened:
            text = (opened.metadata() or {}).get(entry, "{}")
    except SafetensorError as error:
        raise ValueError(f"it is truncated or not a safetensors file ({error})") from error
    content = parse_json(text) if len(text) <= MAX_TEXT_BYTES else None
    if not isinstance(content, dict):
        raise ValueError("its header is not a JSON object, or too large")
    return content


def _digest(tensors: Mapping[str, Tensor], content: Mapping[str, Any]) -> str:
    names, others = sorted(tensors), {name: value for name, value in content.items() if name != _DIGEST}
    return digest_tensors([tensors[name] for name in names], json.dumps([others, names]))
