"""Atomic writes, file locks and checks of free disk space."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from ifcomp.errors import StorageError

try:
    import fcntl
except ImportError:  # not available on Windows, where files are not locked
    fcntl = None  # type: ignore[assignment]

#: A link or a pipe in the place of a lock file is an error at once.
_NOT_BLOCKING = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)

#: File descriptors of the locks of this process.
_lock_descriptors: set[int] = set()

_writes_discarded: ContextVar[bool] = ContextVar("writes_discarded", default=False)


@contextmanager
def discard_writes() -> Iterator[None]:
    """Discard all atomic writes inside the context, on processes that repeat the work of rank 0."""
    token = _writes_discarded.set(True)
    try:
        yield
    finally:
        _writes_discarded.reset(token)


@contextmanager
def atomic_write(path: str | os.PathLike[str], *, on_every_rank: bool = False) -> Iterator[Path]:
    """Yield a scratch file, which replaces ``path`` when the context ends without an error.

    The scratch file is in a scratch folder beside ``path``, on the same disk.

    Args:
        path: The file to write.
        on_every_rank: Whether to write inside `discard_writes` too, for files that each process has for itself.

    Raises:
        StorageError: If the folder does not exist or is not writable, or the disk is full.
    """
    target = Path(path)
    check_kind(target)
    folder = target.with_name(f".{target.name}.{secrets.token_hex(4)}")  # some writers create more scratch files
    scratch = folder / target.name
    try:
        folder.mkdir()
        scratch.touch()
        mode = scratch.stat().st_mode  # according to the umask
    except (OSError, ValueError) as error:
        remove_folder(folder)
        raise _not_writable(target, error) from error
    try:
        yield scratch
        if _writes_discarded.get() and not on_every_rank:
            return
        with scratch.open("rb+") as stream:
            os.fsync(stream.fileno())
        scratch.chmod(mode)
        os.replace(scratch, target)
    except OSError as error:
        raise StorageError(
            f"Cannot write '{target}': {error.strerror or error}. An earlier file is unchanged."
        ) from error
    finally:
        remove_folder(folder)


def check_kind(target: str | os.PathLike[str]) -> None:
    """Raise StorageError if a path is that of something else than a file. A path at which nothing exists is allowed."""
    try:
        mode = os.stat(target).st_mode
    except (FileNotFoundError, ValueError):
        return
    except OSError as error:
        raise _not_writable(Path(target), error) from error
    if stat.S_ISDIR(mode):
        raise StorageError(f"Cannot write '{target}': it is a folder. Name a file in it.")
    if not stat.S_ISREG(mode):
        raise StorageError(f"Cannot write '{target}': it is a pipe, a socket or a device. Choose another name.")


def remove_scratch_files(path: str | os.PathLike[str]) -> None:
    """Remove scratch files of processes that were killed while they wrote ``path``.

    No other process may be writing ``path``.
    """
    target = Path(path)
    pattern = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}")
    for other in target.parent.iterdir():
        if pattern.fullmatch(other.name):
            remove_folder(other)


def remove_folder(folder: Path) -> None:
    """Remove a folder with its content. A link, or anything else of this name, stays: rmtree would wait at a pipe."""
    if folder.is_dir() and not folder.is_symlink():
        shutil.rmtree(folder, ignore_errors=True)


def check_free_space(path: str | os.PathLike[str], needed: int) -> None:
    """Raise StorageError if the disk of ``path`` has fewer free bytes than needed."""
    folder = Path(path).absolute().parent
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise StorageError(
            f"Cannot write '{path}': about {needed:,} bytes are needed on the disk of '{folder}', but only {free:,} "
            "are free. Free some, or choose another folder."
        )


@contextmanager
def file_lock(path: str | os.PathLike[str]) -> Iterator[None]:
    """Hold an exclusive lock for ``path``. The lock is released when the process ends, even if it is killed.

    Raises:
        StorageError: If another process holds the lock, or the folder is not writable.
    """
    target = Path(path)
    lock = target.with_name(f".{target.name}.lock")
    descriptor = _acquire(lock, target)
    _lock_descriptors.add(descriptor)
    try:
        yield
    finally:
        if descriptor in _lock_descriptors:  # not in a forked child
            _lock_descriptors.remove(descriptor)
            lock.unlink(missing_ok=True)
            os.close(descriptor)


def _acquire(lock: Path, target: Path) -> int:
    """Open and lock the lock file. Repeat if another process removed it between the two steps."""
    while True:
        try:
            descriptor = os.open(lock, os.O_WRONLY | os.O_CREAT | _NOT_BLOCKING, 0o666)
        except (OSError, ValueError) as error:
            raise _not_writable(target, error) from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise StorageError(f"Cannot write '{target}': the lock file '{lock}' is not a file. Remove it.")
        try:
            if fcntl is not None:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if fcntl is None or os.path.samestat(os.fstat(descriptor), os.stat(lock)):
                return descriptor
            os.close(descriptor)
        except FileNotFoundError:
            os.close(descriptor)
        except BlockingIOError as error:
            os.close(descriptor)
            raise StorageError(
                f"Another process is working on '{target}'. Wait until it ends, or choose another file."
            ) from error
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):  # a network folder without locks
                return descriptor
            os.close(descriptor)
            raise _not_writable(target, error) from error


def _close_inherited_locks() -> None:
    """Close the lock files in a forked child, so that the locks end with the parent."""
    for descriptor in _lock_descriptors:
        os.close(descriptor)
    _lock_descriptors.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_inherited_locks)


def _not_writable(target: Path, error: OSError | ValueError) -> StorageError:
    reason = getattr(error, "strerror", None) or error
    return StorageError(f"Cannot write '{target}': {reason}. Choose a folder that exists and is writable.")
