"""The record of a run, ``run.ifcomp.json``: the model, weights and data of the fit, as they were given.

The other commands read it, so the user names only the run. A name such as ``package.module:factory`` runs code when it
is used, and a file that was received from somebody else must never choose which code runs. Therefore the record is
signed together with the current folder, with a key in the user's configuration folder. A record is trusted only if
this user wrote it in this folder. Otherwise the model and the data must be given on the command line, or the option
``--trust-run``.
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
from typing import Any

import typer

from ifcomp._version import __version__
from ifcomp.errors import StorageError
from ifcomp.io.files import atomic_write
from ifcomp.io.untrusted import parse_json, read_text

#: Version of the file format.
SCHEMA = 1
KEY_BYTES = 32


@dataclass(frozen=True)
class Record:
    """Names and options of a fit.

    Attributes:
        model: ``package.module:factory``.
        weights: File of the weights, or None.
        data: Name of the training data.
        options: Options with which it was read, as far as they were given.
        class_names: Names of the classes 0 ... K-1, or None.
        examples: Number of training examples.
        signature: HMAC of the record and its folder; empty if there is no key.
    """

    model: str
    weights: str | None
    data: str
    options: dict[str, Any]
    class_names: list[str] | None
    examples: int
    signature: str = ""

    @property
    def is_trusted(self) -> bool:
        """Whether this user wrote the record in the current folder."""
        expected = _signature(self, create=False)
        return expected is not None and hmac.compare_digest(expected.encode(), self.signature.encode(errors="replace"))


def record_path(run: str) -> str:
    """Return the path of the record of a run."""
    return f"{run}.json"


def write_record(run: str, record: Record) -> str:
    """Sign and write the record of a run, and return its path. Atomic."""
    signed = replace(record, signature=_signature(record, create=True) or "")
    content = {"schema": SCHEMA, "version": __version__, **asdict(signed)}
    with atomic_write(record_path(run)) as scratch:
        scratch.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return record_path(run)


def read_record(run: str) -> Record | None:
    """Return the record of a run, or None if there is none.

    Raises:
        StorageError: If the record is damaged.
    """
    path = Path(record_path(run))
    if not os.path.lexists(path):
        return None
    try:
        content = parse_json(read_text(path))
        schema = content.pop("schema")
        if schema != SCHEMA:
            raise ValueError(f"it has schema {schema}, this version reads {SCHEMA}")
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


def _signature(record: Record, *, create: bool) -> str | None:
    """Return the HMAC of the record and the current folder, or None if there is no key."""
    key = _key(create)
    if key is None:
        return None
    content = json.dumps([os.path.realpath(os.curdir), asdict(replace(record, signature=""))], sort_keys=True)
    return hmac.new(key, content.encode(), hashlib.sha256).hexdigest()


def _key(create: bool) -> bytes | None:
    """Return the user's key, created at first use, or None if it cannot be read or created."""
    path = Path(typer.get_app_dir("ifcomp")) / "run-key"
    try:
        if create and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, scratch = tempfile.mkstemp(dir=path.parent)  # readable by the user only
            with os.fdopen(handle, "wb") as file:
                file.write(secrets.token_bytes(KEY_BYTES))
            with suppress(FileExistsError):  # another process was first: its key is used
                os.link(scratch, path)
            os.unlink(scratch)
        key = path.read_bytes()
    except OSError:
        return None
    return key if len(key) == KEY_BYTES else None
