"""One safetensors file with JSON metadata; never a pickle. Factors are tied to their model by a fingerprint."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ifcomp.curvature.factors import Basis, BlockFactors, Factors, FitSettings
from ifcomp.errors import FingerprintError, SettingError, StorageError
from ifcomp.files import written_atomically

SCHEMA = 1
_KEY = "ifcomp"
_PARTS = ("second_moments", "basis.inputs", "basis.outputs")


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
        with safe_open(source, framework="pt") as file:
            metadata = _metadata(source, file.metadata())
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
    except (SafetensorError, OSError) as error:
        reason = f"it is truncated or not a safetensors file ({error})" if source.exists() else "there is no such file"
        reason = "it is a folder" if source.is_dir() else reason
        raise StorageError(f"Cannot read factors from '{source}': {reason}.") from error
    try:
        if int(metadata["count"]) < 1:
            raise ValueError(f"count is {metadata['count']}")
        factors = Factors(
            {name: _block(name, tensors) for name in metadata["blocks"]},
            int(metadata["count"]),
            int(metadata["num_classes"]),
            FitSettings(**metadata["settings"]),
        )
        return Stored(factors, dict(metadata["fingerprint"]), dict(metadata["options"]), str(metadata["version"]))
    except (KeyError, TypeError, ValueError, SettingError) as error:
        raise StorageError(
            f"Cannot read factors from '{source}': its metadata is damaged ({error!r}). Fit again."
        ) from error


def _metadata(source: Path, raw: Mapping[str, str] | None) -> dict[str, Any]:
    if not raw or _KEY not in raw:
        raise StorageError(
            f"Cannot read factors from '{source}': it is a safetensors file, but not one written by ifcomp."
        )
    try:
        metadata = json.loads(raw[_KEY])
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
    moments, inputs, outputs = (tensors.get(f"{name}/{part}") for part in _PARTS)
    if moments is None:
        raise KeyError(f"{name}/{_PARTS[0]}")
    for tensor in (moments, inputs, outputs):
        if tensor is not None and not (tensor.is_floating_point() and bool(tensor.isfinite().all())):
            raise ValueError(f"block '{name}' has entries that are not finite numbers")
    if bool((moments < 0).any()):
        raise ValueError(f"block '{name}' has negative second moments")
    return BlockFactors(moments, None if outputs is None else Basis(inputs, outputs))
