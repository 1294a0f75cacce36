"""File locks on systems with and without `flock`."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ifcomp.errors import StorageError
from ifcomp.io import files
from ifcomp.io.files import file_lock


def failing_flock(number: int) -> Callable[[int, int], None]:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    return flock


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS], ids=errno.errorcode.get)
def test_folders_without_locks_are_not_locked(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.fcntl, "flock", failing_flock(number))
    with file_lock(tmp_path / "run"), file_lock(tmp_path / "run"):
        assert [path.name for path in tmp_path.iterdir()] == [".run.lock"]
    assert list(tmp_path.iterdir()) == []


def test_systems_without_flock_do_not_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "fcntl", None)
    with file_lock(tmp_path / "run"), file_lock(tmp_path / "run"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_other_errors_are_raised_and_close_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.fcntl, "flock", failing_flock(errno.EIO))
    before = os.listdir("/proc/self/fd")
    with pytest.raises(StorageError, match="Input/output error"), file_lock(tmp_path / "run"):
        pytest.fail("the context was entered")
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("replaced", [False, True])
def test_a_lock_file_that_was_removed_is_locked_again(
    replaced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process removes or replaces the lock file after it was opened and before it is locked."""
    lock, removed = tmp_path / ".run.lock", []

    def flock(descriptor: int, operation: int) -> None:
        if not removed:
            removed.append(os.fstat(descriptor).st_ino)
            lock.unlink()
            if replaced:
                (tmp_path / "other").touch()
                (tmp_path / "other").rename(lock)

    monkeypatch.setattr(files.fcntl, "flock", flock)
    with file_lock(tmp_path / "run"):
        (descriptor,) = files._lock_descriptors
        assert os.path.samestat(os.fstat(descriptor), os.stat(lock))
    assert len(removed) == 1
    assert list(tmp_path.iterdir()) == []
