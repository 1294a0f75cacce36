"""One safetensors file with JSON metadata; never a pickle. Factors are tied to their model by a fingerprint."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from ifcomp.blocks.block import Basis
from ifcomp.curvature.factors import BlockFactors, Factors, FitSettings
from ifcomp.errors import FingerprintError, SettingError, StorageError
from ifcomp.io.files import written_atomically
from ifcomp.io.untrusted import parse_json, read_tensors

SCHEMA = 1
_KEY = "ifcomp"
_PARTS = ("second_moments", "basis.inputs", "basis.outputs")
_DTYPES = (torch.float32, torch.float64)

#: How far the squared length of an eigenvector may be from 1; float32 leaves about 1e-6.
_LENGTH_ERROR = 1e-3

T = TypeVar("T")


@dataclass(frozen=True)
class Stored:
    """The content of a file.

    Attributes:
        factors: The curvature.
        fingerprint: Digest of every parameter and buffer of the model.
        options: Settings of the predictor.
        version: Version of the library that wrote it.
    """

    factors: Factors
    fingerprint: Mapping[str, str]
    options: Mapping[str, Any]
    version: str


def fingerprint(model: nn.Module) -> dict[str, str]:
    """A digest of the type, shape and bytes of every parameter and buffer, by name."""
    tensors = itertools.chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    )
    return {name: _digest(value) for name, value in tensors}


def _digest(value: Tensor) -> str:
    value = value.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{value.dtype} {list(value.shape)} ".encode())
    digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]


def check_fingerprint(expected: Mapping[str, str], model: nn.Module, what: str) -> None:
    """Raise FingerprintError that says what differs between a model and the one that ``what`` belongs to."""
    found = fingerprint(model)
    if found == dict(expected):
        return
    lines = []
    for title, names in (
        ("missing in this model", expected.keys() - found.keys()),
        ("only in this model", found.keys() - expected.keys()),
        ("different values", {name for name in expected.keys() & found.keys() if expected[name] != found[name]}),
    ):
        if names:
            shown = sorted(names)[:6]
            more = f" and {len(names) - 6} more" if len(names) > 6 else ""
            lines.append(f"  {title}: {', '.join(shown)}{more}")
    raise FingerprintError(
        f"{what} belong to another model:\n" + "\n".join(lines) + "\nLoad the weights that were fitted, or fit again."
    )


def save(path: str | os.PathLike[str], stored: Stored) -> None:
    """Write factors to one file, atomically."""
    tensors: dict[str, Tensor] = {}
    for name, block in stored.factors.blocks.items():
        basis = block.basis
        parts = (block.second_moments, basis.inputs if basis else None, basis.outputs if basis else None)
        for part, tensor in zip(_PARTS, parts, strict=True):
            if tensor is not None:
                tensors[f"{name}/{part}"] = tensor.detach().cpu().contiguous()
    metadata = {
        "schema": SCHEMA,
        "version": stored.version,
        "count": stored.factors.count,
        "num_classes": stored.factors.num_classes,
        "settings": asdict(stored.factors.settings),
        "blocks": list(stored.factors.blocks),
        "options": dict(stored.options),
        "fingerprint": dict(stored.fingerprint),
    }
    with written_atomically(path) as scratch:
        try:
            save_file(tensors, scratch, metadata={_KEY: json.dumps(metadata)})
        except SafetensorError as error:
            raise OSError(str(error)) from error


def load(path: str | os.PathLike[str]) -> Stored:
    """Read a file that `save` wrote.

    Raises:
        StorageError: If the file is missing, truncated, foreign, of an unknown schema, or inconsistent.
    """
    source = Path(path)
    try:
        tensors, raw = read_tensors(source)
    except FileNotFoundError as error:
        raise StorageError(f"Cannot read factors from '{source}': there is no such file.") from error
    except (OSError, ValueError) as error:
        raise StorageError(f"Cannot read factors from '{source}': {error}.") from error
    metadata = _metadata(source, raw)
    try:
        count, classes = (_whole(metadata, name) for name in ("count", "num_classes"))
        factors = Factors(
            {name: _block(name, tensors) for name in _of_kind(metadata, "blocks", list)},
            count,
            classes,
            FitSettings(**_of_kind(metadata, "settings", dict)),
        )
        options, digests = (_of_kind(metadata, name, dict) for name in ("options", "fingerprint"))
        return Stored(factors, digests, options, _of_kind(metadata, "version", str))
    except (KeyError, TypeError, ValueError, SettingError) as error:
        raise StorageError(
            f"Cannot read factors from '{source}': its metadata is damaged ({error!r}). Fit again."
        ) from error


def _of_kind(metadata: Mapping[str, Any], name: str, kind: type[T]) -> T:
    value = metadata[name]
    if not isinstance(value, kind):
        raise TypeError(f"{name} is a {type(value).__name__}")
    return value


def _whole(metadata: Mapping[str, Any], name: str) -> int:
    value = _of_kind(metadata, name, int)
    if isinstance(value, bool) or not 1 <= value < 2**63:
        raise ValueError(f"{name} is {value}")
    return value


def _metadata(source: Path, raw: Mapping[str, str]) -> dict[str, Any]:
    if _KEY not in raw:
        raise StorageError(
            f"Cannot read factors from '{source}': it is a safetensors file, but not one written by ifcomp."
        )
    try:
        metadata = parse_json(raw[_KEY])
        schema = metadata["schema"]
    except (ValueError, TypeError, KeyError) as error:
        raise StorageError(
            f"Cannot read factors from '{source}': its metadata is damaged ({error!r}). Fit again."
        ) from error
    if schema != SCHEMA:
        raise StorageError(
            f"Cannot read factors from '{source}': it has schema {schema}, this version reads {SCHEMA}. "
            "Use the library version that wrote it, or fit again."
        )
    return dict(metadata)


def _block(name: str, tensors: Mapping[str, Tensor]) -> BlockFactors:
    if not isinstance(name, str):
        raise TypeError(f"the name of a block is {name!r}")
    moments, inputs, outputs = (tensors.get(f"{name}/{part}") for part in _PARTS)
    if moments is None:
        raise KeyError(f"{name}/{_PARTS[0]}")
    if inputs is not None and outputs is None:
        raise KeyError(f"{name}/{_PARTS[2]}")
    for tensor in (moments, inputs, outputs):
        if tensor is not None and not (tensor.dtype in _DTYPES and bool(tensor.isfinite().all())):
            raise ValueError(f"block '{name}' has entries that are not finite numbers")
    if bool((moments < 0).any()):
        raise ValueError(f"block '{name}' has negative second moments")
    for basis in (inputs, outputs):
        if basis is not None and not _has_unit_columns(basis):
            raise ValueError(f"block '{name}' has eigenvectors whose length is not 1")
    return BlockFactors(moments, None if outputs is None else Basis(inputs, outputs))


def _has_unit_columns(basis: Tensor) -> bool:
    if basis.dim() != 3 or basis.shape[1] != basis.shape[2]:
        return False
    squares = basis.double().square().sum(1)
    return bool(((squares - 1).abs() < _LENGTH_ERROR).all())
