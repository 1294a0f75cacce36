"""The key of the user, with which runs and caches are signed. A file of anybody else has another signature."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path

from ifcomp.errors import IfcompWarning

KEY_BYTES = 32


def sign(content: bytes) -> str:
    """Return the signature of the content: an HMAC with the key of the user, which is created at first use.

    Returns:
        64 hexadecimal digits; empty if there is no key and none can be created.
    """
    path = key_path()
    with suppress(OSError):
        if not os.path.lexists(path):
            _create_key(path)
    key = _read_key(path)
    return "" if key is None else hmac.new(key, content, hashlib.sha256).hexdigest()


def is_signed(content: bytes, signature: str) -> bool:
    """Whether this user signed the content."""
    key = _read_key(key_path())
    if key is None:
        return False
    expected = hmac.new(key, content, hashlib.sha256).hexdigest()
    return hmac.compare_digest(expected.encode(), signature.encode(errors="replace"))


def key_path() -> Path:
    """Return the path of the key, which is absolute: in ``XDG_CONFIG_HOME`` if that is absolute, else in ``~/.config``.

    Other values of the variable are ignored, as its specification demands. They would select a file of the current
    folder, which may belong to somebody else.
    """
    folder = os.environ.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(folder):
        folder = os.path.abspath(os.path.join(os.sep, os.path.expanduser("~"), ".config"))
    return Path(folder) / "ifcomp" / "run-key"


def _create_key(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(dir=path.parent)  # readable by the user only
    with os.fdopen(handle, "wb") as file:
        file.write(secrets.token_bytes(KEY_BYTES))
    with suppress(FileExistsError):  # another process was first: its key is used
        os.link(scratch, path)
    os.unlink(scratch)


def _read_key(path: Path) -> bytes | None:
    """Return the key; None if there is none. A file that other users own or can open is not used."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        return None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        return None
    with os.fdopen(descriptor, "rb") as file:
        if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o077):
            warnings.warn(
                f"The key '{path}', which signs your runs, belongs to another user or is readable by others, so it is "
                "not used. Delete it; the next fit creates another one.",
                IfcompWarning,
                stacklevel=3,
            )
            return None
        key = file.read(KEY_BYTES + 1)
    return key if len(key) == KEY_BYTES else None
