"""Arrays in memory and in temporary files."""

import numpy as np
import pytest

from ifcomp.evidence.storage import allocate

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
