"""``torch.save`` files of plain tensors, read without torch's reader.

Only the layout that ``torch.save`` writes is read: an uncompressed zip archive whose pickle contains tensors and plain
containers. This module alone interprets archive and pickle, so nothing is read in another way than it was checked.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import pickletools
import re
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ifcomp.io.untrusted import regular_file

#: Names of members without the folder. TorchScript archives have others.
_MEMBER = re.compile(
    r"data\.pkl|byteorder|version|\.format_version|\.storage_alignment|\.data/serialization_id|data/\d+"
)

#: Opcodes (pickle protocol 2) of a pickle that contains tensors and plain containers only.
_OPCODE = re.compile(
    r"PROTO|STOP|MARK|POP|TUPLE|EMPTY_TUPLE|TUPLE[123]|EMPTY_LIST|APPENDS?|EMPTY_DICT|SETITEMS?|NONE|NEWTRUE|NEWFALSE"
    r"|BININT[12]?|LONG1|BINFLOAT|BINUNICODE|SHORT_BINSTRING|(LONG_)?BIN(PUT|GET)|GLOBAL|REDUCE|BUILD|BINPERSID"
)


class _Described(NamedTuple):
    """A tensor as the pickle describes it. A tuple has no attributes that a pickle could set."""

    storage: Tensor
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


def _rebuild_tensor(
    storage: Tensor, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any
) -> _Described:
    return _Described(storage, offset, size, stride)


def _rebuild_parameter(tensor: _Described, *_: Any) -> _Described:
    return tensor


def _ignore(*_: Any) -> None:
    """Stands for values that are not used. Every call takes constant time, so all take time linear in the file."""


#: Meaning of the globals that a pickle may name.
_GLOBALS: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): lambda: OrderedDict(),
    ("torch", "Size"): _ignore,
    ("torch", "device"): _ignore,
    ("torch._utils", "_rebuild_tensor"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
}
for _storage, _name in {
    **{"Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Bool": "bool"},
    **{"Long": "int64", "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8"},
}.items():
    _GLOBALS["torch", f"{_storage}Storage"] = _GLOBALS["torch", _name] = getattr(torch, _name)


def read_torch_file(path: str | os.PathLike[str]) -> Any:
    """Return the content of a ``torch.save`` file. Its tensors are mapped from the file, not copied.

    Raises:
        OSError: If the file cannot be read.
        Exception: If it is damaged, or has another layout or content; the type varies.
    """
    with regular_file(path).open("rb") as stream:
        if stream.read(4) != b"PK\x03\x04":
            raise ValueError("it is not in the torch.save format since torch 1.6")
        content = memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY))
        with zipfile.ZipFile(stream) as archive:
            members = _members(archive, content)
    if bytes(members.get("byteorder", b"little")) != b"little":
        raise ValueError("its numbers are big-endian")
    return _with_tensors(_Unpickler(members).load())


def _members(archive: zipfile.ZipFile, content: memoryview) -> dict[str, memoryview]:
    """Return the contents of the members by name without the folder."""
    entries = archive.infolist()
    names = [entry.filename.partition("/")[2] for entry in entries]
    folders = {entry.filename.partition("/")[0] for entry in entries}
    if len(folders) != 1 or len(set(names)) != len(names) or not all(map(_MEMBER.fullmatch, names)):
        raise ValueError("its members are not those of a torch.save file of tensors")
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise ValueError("it is compressed, which torch.save never does")
    if sum(entry.file_size for entry in entries) > len(content):
        raise ValueError("its parts are larger than the file")
    if min(entry.header_offset for entry in entries):
        raise ValueError("something precedes the archive")
    return {name: _content(entry, content) for name, entry in zip(names, entries, strict=True)}


def _content(entry: zipfile.ZipInfo, content: memoryview) -> memoryview:
    """Return the bytes of a member, which follow a header of 30 bytes, a name and an extra field."""
    name_length, extra_length = struct.unpack_from("<HH", content, entry.header_offset + 26)
    start = entry.header_offset + 30 + name_length + extra_length
    if start + entry.file_size > len(content):
        raise ValueError("it is truncated")
    return content[start : start + entry.file_size]


class _Unpickler(pickle.Unpickler):
    """Reads the pickle of an archive. It can call the values of `_GLOBALS` only."""

    def __init__(self, members: Mapping[str, memoryview]) -> None:
        if "data.pkl" not in members:
            raise ValueError("it is not a torch.save file")
        program = bytes(members["data.pkl"])
        for opcode, argument, _ in pickletools.genops(program):
            if not _OPCODE.fullmatch(opcode.name):
                raise ValueError(f"it has an opcode that torch.save does not write, {opcode.name}")
            if opcode.name.endswith("PUT") and int(argument or 0) > len(program):
                raise ValueError("its pickle has a place for more objects than it has bytes")
        super().__init__(io.BytesIO(program))
        self._members = members
        self._storages: dict[str, Tensor] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return the meaning of a global."""
        if (module, name) not in _GLOBALS:
            raise ValueError(f"it would call '{module}.{name}'")
        return _GLOBALS[module, name]

    def persistent_load(self, reference: Any) -> Tensor:
        """Return a storage as a tensor with one axis."""
        _, dtype, key, _, count = reference
        if key not in self._storages:
            content = self._members[f"data/{key}"]
            flat = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
            self._storages[key] = flat if flat.data_ptr() % dtype.itemsize == 0 else flat.clone()
        storage = self._storages[key].view(dtype)
        if len(storage) != count:
            raise ValueError(f"tensor data '{key}' has {len(storage)} elements instead of {count}")
        return storage


def _with_tensors(value: Any) -> Any:
    """Return a mapping, and mappings in it, as dicts with tensors. Other values are unchanged."""
    if not isinstance(value, dict):
        return value
    mappings = {id(part): part for part in dict.values(value) if isinstance(part, dict)}
    converted = {place: {key: _as_tensor(item) for key, item in dict.items(part)} for place, part in mappings.items()}
    return {key: converted.get(id(part), _as_tensor(part)) for key, part in dict.items(value)}


def _as_tensor(value: Any) -> Any:
    """Return a described tensor as a tensor. Descriptions beyond their storage raise an error."""
    return value.storage.as_strided(value.size, value.stride, value.offset) if isinstance(value, _Described) else value
