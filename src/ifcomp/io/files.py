"""Files that are either whole or not there, and locks that end with their process."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from ifcomp.errors import StorageError

try:
    import fcntl
except ImportError:  # not on every system; there nothing is locked
    fcntl = None  # type: ignore[assignment]

#: Open files of the locks that this process has.
_held: set[int] = set()

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
def written_atomically(path: str | os.PathLike[str], *, by_all: bool = False) -> Iterator[Path]:
    """A scratch file in a scratch folder beside ``path`` that takes its place when the context ends without an error.

    Args:
        path: The file.
        by_all: Whether it is written within `discarding_writes` too: a file that each process has for itself.

    Raises:
        StorageError: If the folder does not exist or cannot be written.
    """
    target = Path(path)
    if os.path.isdir(target):  # which, unlike that of Path, knows any name
        raise StorageError(f"Cannot write '{target}': it is a folder. Name a file in it.")
    folder = target.with_name(f".{target.name}.{secrets.token_hex(4)}")  # some writers have scratch files of their own
    scratch = folder / target.name
    try:
        folder.mkdir()
        scratch.touch()
        mode = scratch.stat().st_mode  # as the umask wants it
    except (OSError, ValueError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise _unwritable(target, error) from error
    try:
        yield scratch
        if _discarding.get() and not by_all:
            return
        with scratch.open("rb+") as stream:
            os.fsync(stream.fileno())
        scratch.chmod(mode)
        os.replace(scratch, target)
    except OSError as error:
        raise StorageError(
            f"Cannot write '{target}': {error.strerror or error}. What was there before is unchanged."
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_leftovers(path: str | os.PathLike[str]) -> None:
    """Remove what processes left behind that were killed while they wrote ``path``; nobody may be writing it now."""
    target = Path(path)
    pattern = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}")
    for other in target.parent.iterdir():
        if pattern.fullmatch(other.name):
            shutil.rmtree(other, ignore_errors=True)


@contextmanager
def locked(path: str | os.PathLike[str]) -> Iterator[None]:
    """Only one process at a time is within, for each path. The lock ends with its process, however that ends.

    Raises:
        StorageError: If another process is within, or the folder cannot be written.
    """
    target = Path(path)
    lock = target.with_name(f".{target.name}.lock")
    handle = _acquire(lock, target)
    _held.add(handle)
    try:
        yield
    finally:
        if handle in _held:  # not in a child
            _held.remove(handle)
            lock.unlink(missing_ok=True)
            os.close(handle)


def check_room(path: str | os.PathLike[str], needed: int) -> None:
    """Raise StorageError if the disk on which ``path`` is to be written has fewer bytes left than are needed."""
    folder = Path(path).absolute().parent
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise StorageError(
            f"Cannot write '{path}': about {needed:,} bytes are needed on the disk of '{folder}', but only {free:,} "
            "are free. Free some, or choose another folder."
        )


def _acquire(lock: Path, target: Path) -> int:
    """An open, locked file; what another process removed before it could be locked does not count."""
    while True:
        try:
            handle = os.open(lock, os.O_WRONLY | os.O_CREAT, 0o666)
        except (OSError, ValueError) as error:
            raise _unwritable(target, error) from error
        try:
            if fcntl is not None:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if fcntl is None or os.path.samestat(os.fstat(handle), os.stat(lock)):
                return handle
            os.close(handle)
        except FileNotFoundError:
            os.close(handle)
        except BlockingIOError as error:
            os.close(handle)
            raise StorageError(
                f"Another process is at work on '{target}'. Wait for it to end, or choose another file."
            ) from error
        except OSError as error:  # some network folders know no locks
            if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                return handle
            os.close(handle)
            raise _unwritable(target, error) from error


def _let_go() -> None:
    """Children do not have the locks of their parent, so that those end with it."""
    for handle in _held:
        os.close(handle)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


def _unwritable(target: Path, error: OSError | ValueError) -> StorageError:
    reason = getattr(error, "strerror", None) or error
    return StorageError(f"Cannot write '{target}': {reason}. Choose a folder that exists and is writable.")
