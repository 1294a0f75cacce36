"""Factors in one safetensors file with JSON metadata, tied to their model by a fingerprint."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ifcomp.blocks.block import Basis
from ifcomp.curvature.factors import BlockFactors, Factors, FitSettings
from ifcomp.errors import SettingError, StorageError
from ifcomp.io.tensor_files import read_tensors, write_tensors

SCHEMA = 2
#: Name of the entry in the header that contains the JSON.
ENTRY = "ifcomp"
#: Tensor of the reference set. Names of other tensors contain a slash.
_REFERENCE = "reference"
_TENSOR_NAMES = ("second_moments", "basis.inputs", "basis.outputs")
_DTYPES = (torch.float32, torch.float64)

#: Tolerance for the squared norm of an eigenvector. The rounding error in float32 is about 1e-6.
_NORM_TOLERANCE = 1e-3

T = TypeVar("T")


@dataclass(frozen=True)
class SavedFactors:
    """Content of a factor file.

    Attributes:
        factors: The curvature.
        fingerprint: Digest of every parameter and buffer of the model.
        options: Settings of the predictor.
        version: Version of the library that wrote the file.
        results: Plain data of results that belong to the fit, by name.
        record: Where the fit comes from, as plain data; None if it is not known. `load` leaves it out.
    """

    factors: Factors
    fingerprint: Mapping[str, str]
    options: Mapping[str, Any]
    version: str
    results: Mapping[str, Any] = field(default_factory=dict)
    record: Mapping[str, Any] | None = None


def save(path: str | os.PathLike[str], saved: SavedFactors) -> None:
    """Write factors to one file, atomically."""
    tensors: dict[str, Tensor] = {}
    for name, block in saved.factors.blocks.items():
        basis = block.basis
        parts = (block.second_moments, basis.inputs if basis else None, basis.outputs if basis else None)
        for tensor_name, tensor in zip(_TENSOR_NAMES, parts, strict=True):
            if tensor is not None:
                tensors[f"{name}/{tensor_name}"] = tensor
    if saved.factors.reference is not None:
        tensors[_REFERENCE] = saved.factors.reference
    metadata = {
        "schema": SCHEMA,
        "version": saved.version,
        "count": saved.factors.count,
        "num_classes": saved.factors.num_classes,
        "settings": asdict(saved.factors.settings),
        "blocks": list(saved.factors.blocks),
        "options": dict(saved.options),
        "fingerprint": dict(saved.fingerprint),
    }
    if saved.factors.training_accuracy is not None:
        metadata["training_accuracy"] = saved.factors.training_accuracy
    if saved.results:
        metadata["results"] = dict(saved.results)
    if saved.record is not None:
        metadata["record"] = dict(saved.record)
    write_tensors(path, tensors, ENTRY, metadata)


def load(path: str | os.PathLike[str]) -> SavedFactors:
    """Read a file that `save` wrote.

    Raises:
        StorageError: If the file is missing, truncated, inconsistent, of an unknown schema, or not a factor file.
    """
    source = Path(path)
    try:
        tensors, metadata = read_tensors(source, ENTRY)
    except FileNotFoundError as error:
        raise StorageError(f"Cannot read factors from '{source}': there is no such file.") from error
    except KeyError as error:
        raise StorageError(
            f"Cannot read factors from '{source}': it is a safetensors file, but not one written by ifcomp."
        ) from error
    except (OSError, ValueError) as error:
        raise StorageError(f"Cannot read factors from '{source}': {error}.") from error
    _check_schema(source, metadata)
    try:
        count, num_classes = (_positive_integer(metadata, name) for name in ("count", "num_classes"))
        factors = Factors(
            {name: _read_block(name, tensors) for name in _typed(metadata, "blocks", list)},
            count,
            num_classes,
            FitSettings(**_typed(metadata, "settings", dict)),
            _accuracy(metadata.get("training_accuracy")),
            _read_reference(tensors),
        )
        options, digests = (_typed(metadata, name, dict) for name in ("options", "fingerprint"))
        results = _typed({"results": {}, **metadata}, "results", dict)
        if not "".join([*factors.blocks, *digests]).isprintable():
            raise ValueError("a name contains control characters")
        return SavedFactors(factors, digests, options, _typed(metadata, "version", str), results)
    except (KeyError, TypeError, ValueError, SettingError) as error:
        raise _damaged(source, error) from error


def _check_schema(source: Path, metadata: Mapping[str, Any]) -> None:
    if metadata.get("schema") != SCHEMA:
        raise StorageError(
            f"Cannot read factors from '{source}': it has schema {metadata.get('schema')!r}, this version reads "
            f"{SCHEMA}. Use the library version that wrote it, or fit again."
        )


def _damaged(source: Path, error: Exception) -> StorageError:
    return StorageError(f"Cannot read factors from '{source}': its metadata is damaged ({error!r}). Fit again.")


def _typed(metadata: Mapping[str, Any], name: str, expected: type[T]) -> T:
    value = metadata[name]
    if not isinstance(value, expected):
        raise TypeError(f"{name} is a {type(value).__name__}")
    return value


def _positive_integer(metadata: Mapping[str, Any], name: str) -> int:
    value = _typed(metadata, name, int)
    if isinstance(value, bool) or not 1 <= value < 2**63:
        raise ValueError(f"{name} is {value}")
    return value


def _accuracy(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"training_accuracy is {value!r}")
    return float(value)


def _read_block(name: str, tensors: Mapping[str, Tensor]) -> BlockFactors:
    """Return the factors of one block after a check of their values."""
    if not isinstance(name, str):
        raise TypeError(f"the name of a block is {name!r}")
    moments, inputs, outputs = (tensors.get(f"{name}/{tensor_name}") for tensor_name in _TENSOR_NAMES)
    if moments is None:
        raise KeyError(f"{name}/{_TENSOR_NAMES[0]}")
    for tensor in (moments, inputs, outputs):
        if tensor is not None and not (tensor.dtype in _DTYPES and bool(tensor.isfinite().all())):
            raise ValueError(f"block '{name}' has entries that are not finite numbers")
    if bool((moments < 0).any()):
        raise ValueError(f"block '{name}' has negative second moments")
    for basis in (inputs, outputs):
        if basis is not None and not _has_unit_columns(basis):
            raise ValueError(f"block '{name}' has eigenvectors whose length is not 1")
    return BlockFactors(moments, None if inputs is outputs is None else Basis(inputs, outputs))


def _read_reference(tensors: Mapping[str, Tensor]) -> Tensor | None:
    """Return the reference set after a check of its values; None without one."""
    reference = tensors.get(_REFERENCE)
    if reference is None:
        return None
    if reference.dtype not in _DTYPES or reference.dim() != 2 or not reference.numel():
        raise ValueError("the reference set is not a matrix of floating-point numbers")
    squared_norms = reference.double().square().sum(1)
    if not bool((((squared_norms - 1).abs() < _NORM_TOLERANCE) | (squared_norms == 0)).all()):
        raise ValueError("the reference set has features whose length is not 1")
    return reference


def _has_unit_columns(basis: Tensor) -> bool:
    if basis.dim() != 3 or basis.shape[1] != basis.shape[2]:
        return False
    squared_norms = basis.double().square().sum(1)
    return bool(((squared_norms - 1).abs() < _NORM_TOLERANCE).all())
