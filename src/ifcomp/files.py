"""Files that are either whole or not there."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

from ifcomp.errors import StorageError

_discarding: ContextVar[bool] = ContextVar("discarding", default=False)


@contextmanager
def discarding_writes() -> Iterator[None]:
    """Nothing is written within: for processes that do the same as another one, which writes."""
    token = _discarding.set(True)
    try:
        yield
    finally:
        _discarding.reset(token)


@contextmanager
def written_atomically(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A scratch file beside ``path`` that takes its place when the context ends without an error.

    Raises:
        StorageError: If the folder does not exist or cannot be written.
    """
    target = Path(path)
    if os.path.isdir(target):  # which, unlike that of Path, knows any name
        raise StorageError(f"Cannot write '{target}': it is a folder. Name a file in it.")
    try:
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise StorageError(
            f"Cannot write '{target}': {reason}. Choose a folder that exists and is writable."
        ) from error
    os.close(handle)
    scratch = Path(name)
    try:
        yield scratch
        if _discarding.get():
            return
        with scratch.open("rb+") as stream:
            os.fsync(stream.fileno())
        umask = os.umask(0)
        os.umask(umask)
        scratch.chmod(0o666 & ~umask)
        os.replace(scratch, target)
    except OSError as error:
        raise StorageError(
            f"Cannot write '{target}': {error.strerror or error}. What was there before is unchanged."
        ) from error
    finally:
        with suppress(FileNotFoundError):
            scratch.unlink()
