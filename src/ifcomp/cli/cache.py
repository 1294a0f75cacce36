"""Results of a run that several commands need, stored beside it: ``run.ifcomp.cache``.

A file belongs to one version of the library, one model with its weights and factors, and one data set. It is read only
if all of these are the same and it has the signature of the user; otherwise the result is computed again.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor

from ifcomp._version import __version__
from ifcomp.cli.cached_results import audit_from_parts, audit_parts, ood_from_parts, ood_parts
from ifcomp.cli.keys import is_signed, sign
from ifcomp.data.batches import as_batches
from ifcomp.distributed import process_info
from ifcomp.errors import IfcompWarning, StorageError
from ifcomp.io.files import atomic_write
from ifcomp.io.fingerprints import digest_tensors, fingerprint
from ifcomp.io.untrusted import read_safetensors
from ifcomp.layers.forward import run_model

if TYPE_CHECKING:
    from ifcomp import IFComp
    from ifcomp.cli.run import Run
    from ifcomp.data.sources import Source
    from ifcomp.detection import OODDetector
    from ifcomp.tasks.audit import LabelAudit
    from ifcomp.tasks.ood_table import OODTable

#: Version of the file format.
SCHEMA = 3

#: Largest size of a stored result in bytes.
MAX_BYTES = 2**30

#: Examples whose logits identify the code of the model.
IDENTIFYING_EXAMPLES = 8

#: Tensors by name, and plain JSON.
Parts = tuple[dict[str, Tensor], dict[str, Any]]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Cache:
    """Stored results of one run.

    Attributes:
        folder: The folder of the cache; None stores nothing.
        ifc: The predictor of the run.
        identity: What the results depend on besides the data and the code of the model, as plain JSON.
        max_tables: Largest number of stored tables of OOD scores.
    """

    folder: Path | None
    ifc: IFComp
    identity: Mapping[str, Any]
    max_tables: int = 8

    def audit(self, source: Source, reference: Source | None, compute: Callable[[], LabelAudit]) -> LabelAudit:
        """Return the audit of a source, read or computed. Only the latest audit is stored."""
        if self.folder is None:
            return compute()
        key = self._key(source, reference=None if reference is None else reference.digest())
        return self._result("audit", key, compute, audit_parts, audit_from_parts)

    def ood_table(self, source: Source, detector: OODDetector) -> OODTable:
        """Return the table of a detector for a source, read or computed. One per data set is stored."""

        def compute() -> OODTable:
            return detector.table(source.batches())

        if self.folder is None:
            return compute()
        key = self._key(source, detector=detector.rule.to_json())
        name = f"ood-{digest_tensors([], source.digest())[:16]}"
        table = self._result(name, key, compute, ood_parts, partial(ood_from_parts, detector.rule))
        self._remove_old_tables()
        return table

    def _remove_old_tables(self) -> None:
        """Remove all tables of OOD scores but the latest."""
        assert self.folder is not None
        with suppress(OSError):
            tables = sorted(self.folder.glob("ood-*.safetensors"), key=lambda file: file.stat().st_mtime_ns)
            for file in tables[: -self.max_tables]:
                file.unlink(missing_ok=True)

    def _result(
        self,
        name: str,
        key: str,
        compute: Callable[[], Result],
        to_parts: Callable[[Result], Parts],
        from_parts: Callable[[Mapping[str, Tensor], Mapping[str, Any]], Result],
    ) -> Result:
        """Return a result, read or computed. Warnings of the computation are repeated when it is read."""
        stored = self._read(name, key)
        if stored is not None:
            tensors, plain = stored
            for message in plain["warnings"]:
                warnings.warn(message, IfcompWarning, stacklevel=4)
            return from_parts(tensors, plain)
        with warnings.catch_warnings(record=True) as caught:
            result = compute()
        for warning in caught:
            warnings.warn(warning.message, stacklevel=4)
        tensors, plain = to_parts(result)
        messages = [str(warning.message) for warning in caught if issubclass(warning.category, IfcompWarning)]
        self._write(name, key, (tensors, {**plain, "warnings": messages}))
        return result

    def _key(self, source: Source, **further: Any) -> str:
        """Return everything that a result depends on. The logits of a few examples stand for the code of the model."""
        further |= {"data": source.digest(), "logits": _logits_digest(self.ifc, source)}
        return json.dumps({**self.identity, **further}, sort_keys=True)

    def _read(self, name: str, key: str) -> Parts | None:
        """Return a stored result, or None if there is none for this key that the user has signed."""
        assert self.folder is not None
        try:
            tensors, entries = read_safetensors(self.folder / f"{name}.safetensors")
            text, signature = entries["content"], entries["signature"]
        except (OSError, ValueError, KeyError):
            return None
        if not is_signed(_signed_content(text, tensors), signature):
            return None
        content = json.loads(text)
        return (tensors, content["result"]) if content["key"] == key else None

    def _write(self, name: str, key: str, parts: Parts) -> None:
        """Store a result. A folder that is not writable, or a full disk, is no error."""
        assert self.folder is not None
        tensors, result = parts
        signature = sign(_signed_content(text := json.dumps({"key": key, "result": result}), tensors))
        if not signature or sum(tensor.nbytes for tensor in tensors.values()) > MAX_BYTES:
            return
        with suppress(OSError, StorageError):
            self.folder.mkdir(exist_ok=True)
            with atomic_write(self.folder / f"{name}.safetensors") as scratch:
                save_file(tensors, scratch, {"content": text, "signature": signature})


def open_cache(run: Run, ifc: IFComp) -> Cache:
    """Return the cache of a run for its predictor.

    Nothing is stored without a run, in several processes, and if the folder is a link: it may lead to another folder.
    """
    folder = None if run.path is None else Path(f"{run.path}.cache")
    if folder is None or folder.is_symlink() or process_info().world_size > 1:
        return Cache(None, ifc, {})
    factors = ifc.factors
    blocks = {} if factors is None else factors.blocks
    tensors = [tensor for block in blocks.values() for tensor in _block_tensors(block)]
    identity = {
        "schema": SCHEMA,
        "version": __version__,
        "weights": fingerprint(ifc.model),
        "factors": digest_tensors(tensors),
        "settings": {**asdict(ifc.settings), "damping": repr(ifc.damping)},
    }
    return Cache(folder, ifc, identity)


def _block_tensors(block: Any) -> list[Tensor]:
    basis = block.basis
    tensors = [block.second_moments, *(() if basis is None else (basis.inputs, basis.outputs))]
    return [tensor for tensor in tensors if tensor is not None]


def _logits_digest(ifc: IFComp, source: Source) -> str:
    batch = next(as_batches(source.batches())).select(slice(0, IDENTIFYING_EXAMPLES))
    with torch.no_grad():
        return digest_tensors([run_model(ifc.model, batch.to(next(ifc.model.parameters()).device))])


def _signed_content(text: str, tensors: Mapping[str, Tensor]) -> bytes:
    names = sorted(tensors)
    return f"{text} {names} {digest_tensors(tensors[name] for name in names)}".encode()
