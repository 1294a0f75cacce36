"""The record beside a run: which model, weights and data it was fitted with, so that nobody types them again.

``run.ifcomp.json`` keeps the names as they were typed. A name such as ``package.module:factory`` runs code when it is
used, and a file must never choose which code runs on the machine of someone who merely received it. So a record is
signed, with a key that stays in the user's configuration folder, together with the folder in which the names were
typed: it is believed by the one who wrote it, in the folder where it was written. Anyone else names the model and the
data on the command line, or says ``--trust-run``.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ifcomp._version import __version__
from ifcomp.distributed import process_info
from ifcomp.errors import StorageError
from ifcomp.io.files import atomic_write
from ifcomp.io.untrusted import parse_json, read_text

if TYPE_CHECKING:
    from ifcomp import IFComp

SCHEMA = 1
KEY_BYTES = 32


@dataclass(frozen=True)
class Record:
    """What was typed for a fit.

    Attributes:
        model: ``package.module:factory``.
        weights: File of the weights, or None.
        data: Name of the training data.
        options: How it was read, as far as it was said.
        class_names: Names of the classes 0 ... K-1, or None.
        examples: Number of training examples.
        alpha: What 'ifcomp calibrate' chose, or None.
        keep_argmax: Whether it was to keep the predicted class.
        signature: By whom and where it was written; empty if that is not known.
    """

    model: str
    weights: str | None
    data: str
    options: dict[str, Any]
    class_names: list[str] | None
    examples: int
    alpha: float | None = None
    keep_argmax: bool = False
    signature: str = ""

    @property
    def is_own(self) -> bool:
        """Whether this user wrote the record in this folder."""
        expected = _signature(self, create=False)
        return expected is not None and hmac.compare_digest(expected, _ascii(self.signature))


def record_path(run: str) -> str:
    """Where the record of a run is."""
    return f"{run}.json"


def write_run(run: str, ifc: IFComp, record: Record) -> None:
    """Write a fit and its record.

    The record of an older run goes first, once the new run is on the disk: whoever is killed in between leaves a run
    without a record, never one with the record of another.
    """
    with atomic_write(run) as scratch:
        ifc.save(scratch)
        if process_info().rank == 0:
            Path(record_path(run)).unlink(missing_ok=True)
    write_record(run, record)


def write_record(run: str, record: Record) -> str:
    """Sign and write the record of a run; returns its path. Atomic."""
    signed = replace(record, signature=_signature(record, create=True) or "")
    content = {"schema": SCHEMA, "version": __version__, **asdict(signed)}
    with atomic_write(record_path(run)) as scratch:
        scratch.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return record_path(run)


def read_record(run: str) -> Record | None:
    """The record of a run, or None if there is none.

    Raises:
        StorageError: If it is damaged.
    """
    path = Path(record_path(run))
    if not os.path.lexists(path):
        return None
    try:
        content = parse_json(read_text(path))
        if content.pop("schema") != SCHEMA:
            raise ValueError("another version of ifcomp wrote it")
        del content["version"]
        record = Record(**content)
        _check_types(record)
        return record
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StorageError(f"Cannot read the record '{path}' ({error}). Fit again, or remove it.") from error


def _check_types(record: Record) -> None:
    if not isinstance(record.class_names, list | None):
        raise TypeError("'class_names' is not a list")
    texts = [record.model, record.data, record.signature, *(record.class_names or [])]
    texts += [] if record.weights is None else [record.weights]
    if not (all(isinstance(text, str) for text in texts) and isinstance(record.examples, int)):
        raise TypeError("an entry has the wrong type")
    if not isinstance(record.options, dict):
        raise TypeError("'options' is not an object")
    if not (isinstance(record.alpha, float | int | None) and isinstance(record.keep_argmax, bool)):
        raise TypeError("'alpha' or 'keep_argmax' has the wrong type")


def _ascii(text: str) -> str:
    """`hmac.compare_digest` takes no other characters."""
    return text.encode("ascii", "replace").decode()


def _signature(record: Record, *, create: bool) -> str | None:
    """Of the record and the current folder; None without a key."""
    key = _key(create)
    if key is None:
        return None
    content = json.dumps([os.path.realpath(os.curdir), asdict(replace(record, signature=""))], sort_keys=True)
    return hmac.new(key, content.encode(), hashlib.sha256).hexdigest()


def _key(create: bool) -> bytes | None:
    """The user's key, made when it is first needed; None where that is not possible."""
    path = Path(typer.get_app_dir("ifcomp")) / "run-key"
    try:
        if create and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, scratch = tempfile.mkstemp(dir=path.parent)  # for the user alone
            with os.fdopen(handle, "wb") as file:
                file.write(secrets.token_bytes(KEY_BYTES))
            with suppress(FileExistsError):  # another process was quicker: its key counts
                os.link(scratch, path)
            os.unlink(scratch)
        key = path.read_bytes()
    except OSError:
        return None
    return key if len(key) == KEY_BYTES else None
