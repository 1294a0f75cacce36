"""Arrays in memory, in temporary files, and in files that stay."""

from pathlib import Path

import numpy as np
import pytest

from ifcomp.errors import CheckpointError, StorageError
from ifcomp.evidence.storage import allocate, copied

SIZES = {"a": 2, "b": 3}


@pytest.mark.parametrize(("memory_bytes", "in_file"), [(0, True), (99, True), (100, False)])
def test_arrays_of_more_bytes_than_the_limit_are_in_files(memory_bytes: int, in_file: bool) -> None:
    arrays = allocate(5, SIZES, np.dtype("float32"), memory_bytes)
    assert {name: array.shape for name, array in arrays.items()} == {"a": (5, 2), "b": (5, 3)}
    assert all(array.dtype == np.float32 and not array.any() for array in arrays.values())
    assert all(isinstance(array, np.memmap) == in_file for array in arrays.values())
    arrays["a"][2] = [1, 2]
    assert arrays["a"].tolist() == [[0, 0], [0, 0], [1, 2], [0, 0], [0, 0]]
    assert not arrays["b"].any()


def test_temporary_files_have_no_name(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed leaves nothing behind."""
    import tempfile
    from pathlib import Path

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    arrays = allocate(5, SIZES, np.dtype("float32"), 0)
    arrays["a"][:] = 1
    assert not list(Path(str(tmp_path)).iterdir())
    assert arrays["a"].sum() == 10


def in_files(folder: Path, rows: int = 5, reopen: bool = False) -> dict[str, np.ndarray]:
    return allocate(rows, SIZES, np.dtype("float32"), files=folder / "features", reopen=reopen)


def test_files_keep_their_content(tmp_path: Path) -> None:
    folder = tmp_path / "work.files"
    first = in_files(folder)
    assert not any(array.any() for array in first.values())
    first["a"][1], first["b"][2] = 1, 2
    del first
    again = in_files(folder, reopen=True)
    assert again["a"].sum() == 2
    assert again["b"].sum() == 6
    assert not in_files(folder)["a"].any()  # new work does not see the files of earlier work


def test_missing_and_damaged_files_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "work.files"
    with pytest.raises(CheckpointError, match="features-0' is missing"):
        in_files(folder, reopen=True)
    in_files(folder)
    with pytest.raises(CheckpointError, match="missing or damaged"):
        in_files(folder, rows=6, reopen=True)
    (folder / "features-1").unlink()
    (folder / "features-1").symlink_to(folder / "features-0")
    with pytest.raises(CheckpointError, match="features-1' is missing"):
        in_files(folder, reopen=True)


def test_links_are_not_written_through(tmp_path: Path) -> None:
    target, folder = tmp_path / "precious", tmp_path / "work.files"
    target.write_bytes(b"x" * 40)  # the size of the array
    folder.mkdir()
    (folder / "features-0").symlink_to(target)
    in_files(folder)["a"][:] = 1
    assert target.read_bytes() == b"x" * 40
    (tmp_path / "other.files").symlink_to(folder)
    with pytest.raises(StorageError, match=r"other.files' is a link"):
        in_files(tmp_path / "other.files")


def test_a_disk_that_is_too_small_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ifcomp.io.files.shutil.disk_usage", lambda _: type("Usage", (), {"free": 99}))
    with pytest.raises(StorageError, match="100 bytes are needed"):
        in_files(tmp_path / "work.files")


@pytest.mark.parametrize(("memory_bytes", "in_file"), [(0, True), (10**6, False)])
def test_a_copy_is_independent(memory_bytes: int, in_file: bool) -> None:
    array = np.arange(20_000.0).reshape(10_000, 2)
    copy = copied(array, memory_bytes)
    assert isinstance(copy, np.memmap) == in_file
    np.testing.assert_array_equal(copy, array)
    copy[:] = 0
    assert array[1].tolist() == [2, 3]
