"""Atomic writes: an interrupted write leaves the old file, and permissions follow the umask."""

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError
from torch import Tensor

from fitted_cases import CASES, fitted, inputs_of
from ifcomp import IFComp
from ifcomp.errors import StorageError
from ifcomp.io.files import atomic_write, discard_writes


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The file of a fit."""
    path = tmp_path / "run.ifcomp"
    fitted("linear").save(path)
    return path


class Interrupted(BaseException):
    """Stands for KeyboardInterrupt, which would end the tests."""


ABORTS: list[tuple[str, BaseException]] = [
    ("disk_full", OSError(errno.ENOSPC, "No space left on device")),
    ("serialisation", SafetensorError("Error while serializing: I/O error: No space left on device")),
    ("interrupt", Interrupted()),
]


def write_half_and_raise(error: BaseException) -> Callable[..., None]:
    def write(tensors: dict[str, Tensor], path: Path, **_: Any) -> None:
        Path(path).write_bytes(b"half of a file")
        raise error

    return write


@pytest.mark.parametrize("error", [pytest.param(row[1], id=row[0]) for row in ABORTS])
def test_an_interrupted_write_leaves_the_old_file(
    error: BaseException, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ifc, before = fitted("lenet"), saved.read_bytes()
    monkeypatch.setattr("ifcomp.io.tensor_files.save_file", write_half_and_raise(error))
    with pytest.raises((type(error), StorageError)):
        ifc.save(saved)
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]


@pytest.mark.parametrize("error", [pytest.param(row[1], id=row[0]) for row in ABORTS[:2]])
def test_a_full_disk_is_named(error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ifcomp.io.tensor_files.save_file", write_half_and_raise(error))
    with pytest.raises(StorageError) as caught:
        fitted("linear").save(tmp_path / "run.ifcomp")
    assert "run.ifcomp" in str(caught.value)
    assert "No space left" in str(caught.value)


def test_a_reader_of_the_old_file_reads_the_old_content(saved: Path) -> None:
    before = saved.read_bytes()
    with saved.open("rb") as reader:
        fitted("lenet").save(saved)
        assert reader.read() == before
    assert saved.read_bytes() != before


def test_saving_replaces_an_old_file(saved: Path) -> None:
    fitted("lenet").save(saved)
    assert IFComp.load(saved, CASES["lenet"].make()).factors is not None
    assert list(saved.parent.iterdir()) == [saved]


def unwritable_paths(tmp_path: Path) -> dict[str, Path]:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    return {"missing": tmp_path / "missing" / "run", "file": tmp_path / "file" / "run", "folder": tmp_path / "folder"}


@pytest.mark.parametrize("kind", ["missing", "file", "folder"])
def test_unwritable_paths_are_refused(kind: str, tmp_path: Path) -> None:
    path = unwritable_paths(tmp_path)[kind]
    ifc = fitted("linear")
    table = ifc.score([inputs_of("linear")])
    for write in (ifc.save, table.to_csv, table.to_parquet):
        with pytest.raises(StorageError) as caught:
            write(path)
        assert str(path) in str(caught.value)
        assert "folder" in str(caught.value).replace(str(path), "")


def test_a_folder_without_permission_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    ifc = fitted("linear")
    monkeypatch.setattr("ifcomp.io.files.Path.mkdir", deny)
    with pytest.raises(StorageError) as caught:
        ifc.save(tmp_path / "run.ifcomp")
    assert "Permission denied" in str(caught.value)
    assert "writable" in str(caught.value)


@pytest.fixture
def umask() -> Iterator[Callable[[int], int]]:
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_permissions_follow_the_umask(mask: int, mode: int, umask: Callable[[int], int], tmp_path: Path) -> None:
    ifc = fitted("linear")
    table = ifc.score([inputs_of("linear")])
    umask(mask)
    for name, write in (("run", ifc.save), ("csv", table.to_csv), ("parquet", table.to_parquet)):
        write(tmp_path / name)
        assert (tmp_path / name).stat().st_mode & 0o777 == mode


def test_the_scratch_file_is_beside_its_target(tmp_path: Path) -> None:
    with atomic_write(tmp_path / "target") as scratch:
        assert scratch.parent.parent == tmp_path  # on the same disk
        assert not (tmp_path / "target").exists()
        scratch.write_text("whole")
    assert (tmp_path / "target").read_text() == "whole"


def test_discarded_writes_leave_no_file(tmp_path: Path) -> None:
    with discard_writes():
        for name, on_every_rank in (("discarded", False), ("written", True)):
            with atomic_write(tmp_path / name, on_every_rank=on_every_rank) as scratch:
                scratch.write_text("content")
    assert [path.name for path in tmp_path.iterdir()] == ["written"]
