"""The record of a run: the model, weights and data of the fit, as they were given. It is part of the file of the run.

The other commands read it, so the user names only the run. A name such as ``package.module:factory`` runs code when it
is used, and a file that was received from somebody else must never choose which code runs. Therefore the record is
signed with a key of the user. A record is trusted if this user wrote it, wherever the run is now. Otherwise the model
and the data must be given on the command line, or the option ``--trust-run``. The page docs/trust/runs.md describes
the threat model.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, replace
from typing import Any

from ifcomp.cli.keys import is_signed, sign
from ifcomp.cli.output import one_line
from ifcomp.errors import StorageError
from ifcomp.io.factor_files import ENTRY
from ifcomp.io.tensor_files import read_header

#: Version of the format.
SCHEMA = 2

_FOLDER = re.compile(r"\.|\.\.(/\.\.)*")


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
        digest: Digest of the training data, as in `Source.digest`.
        folder: The folder of the fit, to which names are relative, as seen from the folder of the run: ``.`` or a
            folder above. A run that was written elsewhere has ``.``.
        signature: Signature of all of this; empty if there is no key.
    """

    model: str
    weights: str | None
    data: str
    options: dict[str, Any]
    class_names: list[str] | None
    examples: int
    digest: str
    folder: str = "."
    signature: str = ""

    @property
    def is_trusted(self) -> bool:
        """Whether this user wrote the record."""
        return is_signed(self._content, self.signature)

    def signed(self) -> Record:
        """Return the record with the signature of this user."""
        return replace(self, signature=sign(self._content))

    def to_json(self) -> dict[str, Any]:
        """Return the record as plain data."""
        return {"schema": SCHEMA, **asdict(self)}

    @property
    def _content(self) -> bytes:
        return json.dumps(asdict(replace(self, signature="")), sort_keys=True).encode()


def folder_of_fit(run: str) -> str:
    """Return the current folder as seen from the folder of the run, if the run is in it or below it, else ``.``."""
    above = os.path.relpath(os.curdir, os.path.dirname(os.path.abspath(run))).replace(os.sep, "/")
    return above if _FOLDER.fullmatch(above) else "."


def read_record(run: str) -> Record | None:
    """Return the record of a run, or None if it has none.

    The digest of the run covers the record, and is checked when the run is loaded.

    Raises:
        StorageError: If the run cannot be read, or the record is damaged.
    """
    try:
        content = read_header(run, ENTRY).get("record")
    except (OSError, ValueError) as error:
        raise StorageError(f"Cannot read the run '{run}': {one_line(str(error))}.") from error
    if content is None:
        return None
    try:
        schema = content.pop("schema")
        if schema != SCHEMA:
            raise ValueError(f"it has schema {schema}, this version reads {SCHEMA}")
        record = Record(**content)
        _check_types(record)
        return record
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = one_line(str(error))
        raise StorageError(f"Cannot read the record in '{run}' ({reason}). Fit again.") from error


def _check_types(record: Record) -> None:
    if not isinstance(record.class_names, list | None):
        raise TypeError("'class_names' is not a list")
    texts = [record.model, record.data, record.digest, record.folder, record.signature, *(record.class_names or [])]
    texts += [] if record.weights is None else [record.weights]
    if not (all(isinstance(text, str) for text in texts) and isinstance(record.examples, int)):
        raise TypeError("an entry has the wrong type")
    if not isinstance(record.options, dict):
        raise TypeError("'options' is not an object")
    if not _FOLDER.fullmatch(record.folder):
        raise ValueError("'folder' is neither the folder of the run nor one above it")
