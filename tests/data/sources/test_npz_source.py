"""Arrays in NumPy archives."""

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from source_helpers import read_all

from ifcomp.data.sources import SourceOptions, open_source
from ifcomp.errors import DataError, LabelError


def test_archive_without_labels_and_with_class_names() -> None:
    np.savez("a.npz", x=np.ones((2, 3), np.float64), classes=np.array(["cat", "dog"]))
    source = open_source("npz:a.npz")
    x, y = read_all(source)
    assert (x.dtype, y, source.class_names) == (torch.float32, None, ("cat", "dog"))
    assert source.preview([1])[0].content == {"0": 1.0, "1": 1.0, "2": 1.0}


@pytest.mark.parametrize(
    ("array", "expected", "dtype"),
    [
        (np.array([[0, 255], [51, 102]], np.uint8), [[0, 1], [0.2, 0.4]], torch.float32),
        (np.array([[7, 300], [-1, 2]], np.int32), [[7, 300], [-1, 2]], torch.int64),
        (np.array([[True, False]]), [[1, 0]], torch.float32),
        (np.array([[1.5, 2.5]], np.float16), [[1.5, 2.5]], torch.float32),
    ],
)
def test_dtypes_of_inputs(array: Any, expected: Any, dtype: torch.dtype) -> None:
    np.savez("a.npz", x=array)
    x, _ = read_all(open_source("npz:a.npz"))
    assert x.dtype == dtype
    torch.testing.assert_close(x, torch.tensor(expected, dtype=dtype))


def test_preview_of_token_ids_is_text() -> None:
    np.savez("a.npz", x=np.arange(60).reshape(2, 30))
    preview = open_source("npz:a.npz").preview([1])[0]
    assert (preview.kind, preview.content) == ("text", " ".join(map(str, range(30, 54))) + " ...")


def test_channels_are_normalised_but_not_in_previews() -> None:
    x = np.random.default_rng(0).integers(0, 256, (4, 3, 5, 5)).astype(np.uint8)
    np.savez("a.npz", x=x)
    source = open_source("npz:a.npz", SourceOptions(mean=(0.1, 0.2, 0.3), std=(2.0, 3.0, 4.0)))
    expected = (x / 255 - np.array([0.1, 0.2, 0.3])[:, None, None]) / np.array([2.0, 3.0, 4.0])[:, None, None]
    np.testing.assert_allclose(read_all(source)[0].numpy(), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(source.preview([2])[0].content, x[2] / 255, rtol=1e-6)


@pytest.mark.parametrize(("mean", "shape"), [((0.1, 0.2), (2, 3, 4, 4)), ((0.5,), (2, 3))])
def test_normalisation_needs_one_value_per_channel(mean: tuple[float, ...], shape: tuple[int, ...]) -> None:
    np.savez("a.npz", x=np.ones(shape))
    with pytest.raises(DataError, match="one for each channel"):
        open_source("npz:a.npz", SourceOptions(mean=mean))


@pytest.mark.parametrize(
    ("arrays", "error", "message"),
    [
        ({"inputs": np.ones((2, 2))}, DataError, "needs an array 'x' with the inputs, but has inputs"),
        ({}, DataError, "but has none"),
        ({"x": np.ones(3)}, DataError, r"must be numbers \[N, ...\], but is float64 of shape \[3\]"),
        ({"x": np.array([["a"]])}, DataError, "must be numbers"),
        ({"x": np.ones((3, 2)), "y": np.ones(3)}, LabelError, r"integers of shape \[3\], but is float64"),
        ({"x": np.ones((3, 2)), "y": np.ones((3, 1), int)}, LabelError, r"of shape \[3, 1\]"),
        ({"x": np.ones((3, 2)), "y": np.ones(4, int)}, LabelError, r"integers of shape \[3\]"),
        ({"x": np.ones((3, 2)), "classes": np.arange(2)}, DataError, "must be a list of strings"),
        ({"x": np.array([[{}]], object)}, DataError, "never unpickled"),
    ],
)
def test_unusable_arrays_are_refused(arrays: dict[str, Any], error: type[Exception], message: str) -> None:
    np.savez("a.npz", **arrays)
    with pytest.raises(error, match=message):
        open_source("npz:a.npz")


def test_missing_and_foreign_files_are_refused() -> None:
    with pytest.raises(DataError, match=r"no file 'gone.npz'"):
        open_source("npz:gone.npz")
    Path("text.npz").write_text("hello")
    np.save("array.npz", np.ones(3), allow_pickle=False)
    Path("array.npz.npy").rename("array.npz")
    with zipfile.ZipFile("zip.npz", "w") as file:
        file.writestr("x.npy", b"not an array")
    for name in ("text", "array", "zip"):
        with pytest.raises(DataError, match="Cannot read"):
            open_source(f"npz:{name}.npz")
