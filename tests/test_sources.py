"""Data by name: what each kind yields, what it shows, and everything it refuses."""

import itertools
import os
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from ifcomp.data.folders import folder
from ifcomp.data.opening import open_source
from ifcomp.data.source import Source, SourceOptions
from ifcomp.errors import DataError, EmptyDataError, LabelError, SettingError

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def in_scratch_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def together(source: Source) -> tuple[Tensor, Tensor | None]:
    """All inputs and labels; goes over the data twice and checks that it is the same."""
    once, again = list(source.batches()), list(source.batches())
    assert len(once) == len(again)
    inputs = [[batch[0] if isinstance(batch, tuple) else batch for batch in batches] for batches in (once, again)]
    assert torch.equal(torch.cat(inputs[0]), torch.cat(inputs[1]))
    labels = [batch[1] for batch in once if isinstance(batch, tuple)]
    return torch.cat(inputs[0]), torch.cat(labels) if labels else None


def options(**given: Any) -> SourceOptions:
    return SourceOptions(**given)


# Arrays ------------------------------------------------------------------------------------------------------------


def test_digits_are_those_of_the_demo() -> None:
    from ifcomp.cli.demo_study import load_data

    source = open_source("digits")
    x, y = together(source)
    assert (x.shape, x.dtype, len(source)) == ((1797, 1, 8, 8), torch.float32, 1797)
    assert source.class_names == tuple("0123456789")
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(3))
    demo = load_data(3)
    assert torch.equal(x[order[1300:]], demo.test.images)
    assert y is not None
    assert torch.equal(y[order[1300:]], demo.test.labels)
    preview = source.preview([5])[0]
    assert (preview.kind, preview.name) == ("image", "row 5")
    np.testing.assert_array_equal(preview.content, x[5].numpy())


@pytest.mark.parametrize("size", [1, 3, 7, 100])
def test_batch_size_changes_no_example(size: int) -> None:
    x, y = RNG.normal(size=(7, 4)), np.arange(7) % 3
    np.savez("a.npz", x=x, y=y)
    source = open_source("npz:a.npz", options(batch_size=size))
    sizes = [len(batch[0]) for batch in source.batches()]
    assert sizes == [min(size, 7 - start) for start in range(0, 7, size)]
    assert len(source.batches()) == len(sizes)  # type: ignore[arg-type]
    found, labels = together(source)
    np.testing.assert_array_equal(found.numpy(), x.astype(np.float32))
    assert labels is not None
    assert labels.tolist() == y.tolist()


def test_npz_without_labels_and_with_class_names() -> None:
    np.savez("a.npz", x=np.ones((2, 3), np.float64), classes=np.array(["cat", "dog"]))
    source = open_source("npz:a.npz")
    x, y = together(source)
    assert (x.dtype, y, source.class_names) == (torch.float32, None, ("cat", "dog"))
    assert source.preview([1])[0].content == {"0": 1.0, "1": 1.0, "2": 1.0}


@pytest.mark.parametrize(
    ("given", "expected", "dtype"),
    [
        (np.array([[0, 255], [51, 102]], np.uint8), [[0, 1], [0.2, 0.4]], torch.float32),
        (np.array([[7, 300], [-1, 2]], np.int32), [[7, 300], [-1, 2]], torch.int64),
        (np.array([[True, False]]), [[1, 0]], torch.float32),
        (np.array([[1.5, 2.5]], np.float16), [[1.5, 2.5]], torch.float32),
    ],
)
def test_types_of_npz_inputs(given: Any, expected: Any, dtype: torch.dtype) -> None:
    np.savez("a.npz", x=given)
    x, _ = together(open_source("npz:a.npz"))
    assert x.dtype == dtype
    torch.testing.assert_close(x, torch.tensor(expected, dtype=dtype))


def test_token_ids_are_shown_as_text() -> None:
    np.savez("a.npz", x=np.arange(60).reshape(2, 30))
    shown = open_source("npz:a.npz").preview([1])[0]
    assert (shown.kind, shown.content) == ("text", " ".join(map(str, range(30, 54))) + " ...")


def test_channels_are_normalised_and_shown_as_they_were() -> None:
    x = RNG.integers(0, 256, (4, 3, 5, 5)).astype(np.uint8)
    np.savez("a.npz", x=x)
    source = open_source("npz:a.npz", options(mean=(0.1, 0.2, 0.3), std=(2.0, 3.0, 4.0)))
    expected = (x / 255 - np.array([0.1, 0.2, 0.3])[:, None, None]) / np.array([2.0, 3.0, 4.0])[:, None, None]
    np.testing.assert_allclose(together(source)[0].numpy(), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(source.preview([2])[0].content, x[2] / 255, rtol=1e-6)


@pytest.mark.parametrize(
    ("arrays", "error", "words"),
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
def test_npz_that_cannot_be_used(arrays: dict[str, Any], error: type[Exception], words: str) -> None:
    np.savez("a.npz", **arrays)
    with pytest.raises(error, match=words):
        open_source("npz:a.npz")


def test_npz_files_that_are_none() -> None:
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


@pytest.mark.parametrize(("mean", "shape"), [((0.1, 0.2), (2, 3, 4, 4)), ((0.5,), (2, 3))])
def test_normalisation_needs_as_many_channels(mean: tuple[float, ...], shape: tuple[int, ...]) -> None:
    np.savez("a.npz", x=np.ones(shape))
    with pytest.raises(DataError, match="one for each channel"):
        open_source("npz:a.npz", options(mean=mean))


# Folders -----------------------------------------------------------------------------------------------------------


def save(name: str, pixels: Any = None, mode: str | None = None, **settings: Any) -> np.ndarray:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    pixels = RNG.integers(0, 256, (6, 5, 3)).astype(np.uint8) if pixels is None else pixels
    image = Image.fromarray(pixels)
    (image.convert(mode) if mode else image).save(name, **settings)
    return pixels


def test_folder_of_class_folders() -> None:
    written = {name: save(f"f/{name}.png") for name in ("dog/2", "dog/10", "cat/b", "cat/a/deep")}
    Path("f/cat/notes.txt").write_text("no image")
    Path("f/.hidden").mkdir()
    Path("f/cat/.DS_Store.png").write_text("no image either")
    source = open_source("folder:f", options(batch_size=3))
    assert source.class_names == ("cat", "dog")
    x, y = together(source)
    order = ["cat/a/deep", "cat/b", "dog/10", "dog/2"]
    expected = np.stack([written[name] for name in order]).transpose(0, 3, 1, 2) / 255
    np.testing.assert_allclose(x.numpy(), expected, rtol=1e-6)
    assert y is not None
    assert y.tolist() == [0, 0, 1, 1]
    shown = source.preview([3, 0])
    assert [preview.name for preview in shown] == ["dog/2.png", "cat/a/deep.png"]
    np.testing.assert_array_equal(np.asarray(shown[0].content), written["dog/2"])


def test_known_class_names_number_the_folders() -> None:
    save("f/dog/1.png")
    assert folder("folder:f", "f", options(), ["ant", "cat", "dog"]).labels.tolist() == [2]  # type: ignore[union-attr]
    with pytest.raises(DataError, match=r"no classes of the fit: dog. Its classes are ant, cat"):
        open_source("folder:f", class_names=["ant", "cat"])


def test_folder_of_images_has_no_labels() -> None:
    save("f/1.png")
    source = open_source("folder:f")
    assert (together(source)[1], source.class_names, len(source)) == (None, None, 1)
    save("f/cat/1.png")
    with pytest.raises(DataError, match=r"'1.png' is in none of them"):
        open_source("folder:f")


def test_images_are_resized_and_grey() -> None:
    one = save("f/a/1.png", RNG.integers(0, 256, (9, 4, 3)).astype(np.uint8))
    save("f/b/2.jpg")
    with pytest.raises(DataError, match=r"'a/1.png' has 4x9 pixels, 'b/2.jpg' 5x6. Give --image-size"):
        open_source("folder:f")
    x, _ = together(open_source("folder:f", options(image_size=8, grey=True, mean=(0.5,), std=(0.25,))))
    assert x.shape == (2, 1, 8, 8)
    expected = np.asarray(Image.fromarray(one).convert("L").resize((8, 8), Image.Resampling.BILINEAR)) / 255
    np.testing.assert_allclose(x[0, 0].numpy(), (expected - 0.5) / 0.25, atol=1e-5)


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "1", "LA", "CMYK"])
def test_modes_become_colours(mode: str) -> None:
    save(f"f/a/1.{'tif' if mode == 'CMYK' else 'png'}", mode=mode)
    assert together(open_source("folder:f"))[0].shape == (1, 3, 6, 5)


def test_transparent_palettes_do_not_warn() -> None:
    save("f/a/1.png", mode="P", transparency=bytes(range(200)))
    assert together(open_source("folder:f"))[0].shape == (1, 3, 6, 5)


def test_sixteen_bits_are_refused() -> None:
    save("f/a/1.png", np.full((4, 4), 40_000, np.uint16))
    with pytest.raises(DataError, match=r"mode 'I(;16)?', but 8 bits"):
        open_source("folder:f")


def test_links_out_of_the_folder_are_refused() -> None:
    save("secret/1.png")
    save("f/a/1.png")
    os.symlink(Path("f/a/1.png").resolve(), "f/a/2.png")
    assert len(open_source("folder:f")) == 2
    os.symlink("f", "g")
    assert len(open_source("folder:g")) == 2
    os.symlink(Path("secret/1.png").resolve(), "f/a/3.png")
    with pytest.raises(DataError, match="leads out of 'f'"):
        open_source("folder:f")
    Path("f/a/3.png").unlink()
    os.symlink(Path("secret").resolve(), "f/b")
    with pytest.raises(DataError, match="link to a folder"):
        open_source("folder:f")


def test_images_too_large_to_decode_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    save("f/a/1.png", np.zeros((40, 40, 3), np.uint8))
    for limit in (1000, 100):  # one warns, the other raises
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        with pytest.raises(DataError, match="far too much memory"):
            open_source("folder:f")


def test_images_that_are_none() -> None:
    save("f/a/1.png")
    Path("f/a/2.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"Cannot read .*2.png' as an image"):
        open_source("folder:f")
    whole = Path("f/a/1.png").read_bytes()
    Path("f/a/2.png").write_bytes(whole[: len(whole) - 60])
    with pytest.raises(DataError, match=r"Cannot decode .*2.png"):
        list(open_source("folder:f").batches())


def test_folders_that_are_none() -> None:
    with pytest.raises(DataError, match="no folder 'gone'"):
        open_source("folder:gone")
    Path("file").write_text("")
    with pytest.raises(DataError, match="is a file"):
        open_source("folder:file")
    Path("empty/cat").mkdir(parents=True)
    with pytest.raises(EmptyDataError, match="no images in 'empty'"):
        open_source("folder:empty")


# Tables ------------------------------------------------------------------------------------------------------------


def table(**columns: Any) -> str:
    pd.DataFrame(columns).to_parquet("t.parquet")
    return "parquet:t.parquet"


def test_numeric_columns() -> None:
    source = open_source(table(b=[1, 2], label=[1, 0], a=[0.5, np.pi], c=[True, False]))
    x, y = together(source)
    assert x.dtype == torch.float32
    np.testing.assert_array_equal(x.numpy(), np.array([[1, 0.5, 1], [2, np.pi, 0]], np.float32))
    assert y is not None
    assert y.tolist() == [1, 0]
    assert source.preview([1])[0].content == {"b": 2, "a": pytest.approx(np.pi), "c": 0}


def test_columns_may_be_named_twice() -> None:
    source = open_source(table(a=[0.5, 1.5], label=[0, 1]), options(feature_columns=("a", "label", "a")))
    assert together(source)[0].tolist() == [[0.5, 0, 0.5], [1.5, 1, 1.5]]


def test_a_list_column_and_named_labels() -> None:
    spec = table(name=["x", "y", "z"], kind=["dog", "cat", "dog"], features=[[1.5, 2], [3, 4], [5, 6]])
    given = options(label_column="kind", feature_columns=("features",))
    source = open_source(spec, given)
    x, y = together(source)
    assert x.tolist() == [[1.5, 2], [3, 4], [5, 6]]
    assert y is not None
    assert (y.tolist(), source.class_names) == ([1, 0, 1], ("cat", "dog"))
    known = open_source(spec, given, class_names=["dog", "eel", "cat"])
    assert known.labels is not None
    assert known.labels.tolist() == [0, 2, 0]
    with pytest.raises(LabelError, match="no classes of the fit: 'dog'"):
        open_source(spec, given, class_names=["cat"])


def test_a_table_without_labels_has_no_need_of_the_column_that_others_have() -> None:
    spec, given = table(a=[1.0, 2.0], b=[3.0, 4.0]), options(label_column="kind")
    with pytest.raises(DataError, match="has no column 'kind'"):
        open_source(spec, given)
    source = open_source(spec, given, labelled=False)
    assert together(source)[0].tolist() == [[1, 3], [2, 4]]
    assert source.labels is None
    with_labels = open_source(table(a=[1.0], kind=[7]), given, labelled=False).unlabelled()
    assert together(with_labels)[0].tolist() == [[1]]


def test_categories_and_whole_numbers_in_lists() -> None:
    source = open_source(table(label=pd.Categorical(["b", "a"]), ids=[[1, 2, 3], [4, 5, 6]]))
    x, y = together(source)
    assert (x.dtype, x.tolist()) == (torch.int64, [[1, 2, 3], [4, 5, 6]])
    assert y is not None
    assert y.tolist() == [1, 0]


def test_a_table_without_labels() -> None:
    x, y = together(open_source(table(a=[1.0, 2.0])))
    assert (x.tolist(), y) == ([[1], [2]], None)


@pytest.mark.parametrize(
    ("columns", "given", "error", "words"),
    [
        ({"a": [1.0]}, {"label_column": "y"}, DataError, "no column 'y'. Its columns are 'a'"),
        ({"a": [1.0]}, {"feature_columns": ("a", "b")}, DataError, "no column 'b'"),
        ({"a": [1.0], "b": ["x"], "c": ["y"]}, {}, DataError, "Column 'b', 'c' of .* is not numeric"),
        ({"a": [1.0, None]}, {}, DataError, "Column 'a' of .* has empty cells"),
        ({"a": [1.0, 2.0], "label": [1, None]}, {}, DataError, "Column 'label' of .* has empty cells"),
        ({"a": [1.0], "label": [0.5]}, {}, LabelError, "whole numbers or strings, but column 'label'"),
        ({"a": [[1.0], [1.0, 2.0]]}, {}, DataError, "have 1 to 2 values"),
        ({"a": [["x"]]}, {}, DataError, "must hold numbers"),
        ({"label": [1]}, {}, DataError, "no column with features"),
        ({"a": []}, {}, EmptyDataError, "no rows"),
    ],
)
def test_tables_that_cannot_be_used(
    columns: dict[str, Any], given: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        open_source(table(**columns), options(**given))


def test_tables_that_are_none() -> None:
    with pytest.raises(DataError, match="no file"):
        open_source("parquet:gone.parquet")
    Path("t.parquet").write_text("hello")
    with pytest.raises(DataError, match=r"Cannot read 't.parquet' as a Parquet file"):
        open_source("parquet:t.parquet")


# Factories ---------------------------------------------------------------------------------------------------------

NUMBER = itertools.count()


def module(text: str) -> str:
    """Write a module into the current folder under a name of its own."""
    name = f"made_by_user_{next(NUMBER)}"
    Path(f"{name}.py").write_text(text)
    return name


def test_a_factory_in_the_current_folder() -> None:
    name = module(
        "import torch\ndef data():\n    return [(torch.arange(6.).view(3, 2), torch.tensor([0, 1, 0]))] * 2\n"
    )
    source = open_source(f"{name}:data")
    x, y = together(source)
    assert (x.shape, len(source)) == ((6, 2), 6)
    assert y is not None
    assert y.tolist() == [0, 1, 0, 0, 1, 0]
    assert [preview.content for preview in source.preview([4, 0])] == [{"0": 2, "1": 3}, {"0": 0, "1": 1}]
    assert [batch.shape for batch in source.unlabelled().batches()] == [(3, 2), (3, 2)]


def test_a_dataset_is_put_into_batches_and_knows_its_classes() -> None:
    name = module(
        "import torch\nfrom torch.utils.data import TensorDataset\n"
        "def data():\n    made = TensorDataset(torch.ones(5, 1, 8, 8), torch.arange(5))\n"
        "    made.classes = list('abcde')\n    return made\n"
    )
    source = open_source(f"{name}:data", options(batch_size=2))
    assert [len(x) for x, _ in source.batches()] == [2, 2, 1]
    assert source.class_names == tuple("abcde")
    assert source.preview([4])[0].kind == "image"
    assert len(source.unlabelled().batches()) == 3  # type: ignore[arg-type]


def test_the_texts_of_a_dataset_are_what_is_shown_of_it() -> None:
    name = module(
        "import torch\nfrom torch.utils.data import DataLoader, TensorDataset\n"
        "def data(count=3):\n    made = TensorDataset(torch.arange(6).view(3, 2), torch.arange(3))\n"
        "    made.texts = ['one', 'two', 'three'][:count]\n    return DataLoader(made, 2)\n"
        "def short():\n    return data(2)\n"
    )
    shown = open_source(f"{name}:data").preview([2, 0])
    assert [(one.kind, one.content, one.name) for one in shown] == [
        ("text", "three", "row 2"),
        ("text", "one", "row 0"),
    ]
    with pytest.raises(DataError, match="has 2 texts, but more examples"):
        open_source(f"{name}:short").preview([2])


def test_dicts_without_their_labels() -> None:
    name = module(
        "import torch\nclass Data:\n    def __iter__(self):\n"
        "        yield {'input_ids': torch.ones(2, 3, dtype=torch.long), 'labels': torch.tensor([0, 1])}\n"
    )
    source = open_source(f"{name}:Data").unlabelled()
    assert [set(batch) for batch in source.batches()] == [{"input_ids"}]
    assert not hasattr(source.batches(), "__len__")
    assert source.preview([1])[0].content == "1 1 1"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def other(): pass", "has no 'data'"),
        ("def data(size): pass", "cannot be called without arguments"),
        ("import nothing_like_this", "ModuleNotFoundError: No module named 'nothing_like_this' in made_by_user_"),
        ("def data(:", "SyntaxError"),
        ("def data():\n    return 1 / 0", r"ZeroDivisionError: division by zero in made_by_user_\d+.py, line 2"),
        ("raise SystemExit(0)", "SystemExit"),
        ("def data(): return iter([])", "iterator, which is exhausted"),
        ("def data(): return 5", "Data must be batches"),
        ("def data(): return {}.missing", "AttributeError"),
    ],
)
def test_factories_that_fail(text: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        open_source(f"{module(text)}:data")


def test_a_missing_module() -> None:
    with pytest.raises(DataError, match=r"no module 'nowhere' for the data 'nowhere.to:data', neither"):
        open_source("nowhere.to:data")


def test_shuffled_loaders_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def loader() -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(4, 2)), shuffle=True)

    monkeypatch.setattr(sys.modules[__name__], "loader", loader, raising=False)
    with pytest.raises(DataError, match="shuffle=False"):
        open_source(f"{__name__}:loader")


def test_home_is_found(monkeypatch: pytest.MonkeyPatch, in_scratch_folder: Path) -> None:
    monkeypatch.setenv("HOME", str(in_scratch_folder))
    np.savez("a.npz", x=np.ones((2, 3)))
    assert open_source("npz:~/a.npz").spec == "npz:~/a.npz"


# Names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec", ["", "digit", "npz:", "npz", "folder:", "a.npz", "mod:", ":f", "a b:c", "csv:x.csv", "../evil:f", "m:f()"]
)
def test_names_that_mean_nothing(spec: str) -> None:
    with pytest.raises(SettingError, match=r"Data must be named as digits, npz:FILE"):
        open_source(spec)


@pytest.mark.parametrize(
    ("spec", "given", "words"),
    [
        ("digits", {"mean": (0.5,)}, "--mean means nothing for the data 'digits'"),
        ("npz:a.npz", {"image_size": 3, "grey": True}, "--image-size, --grey means nothing"),
        ("folder:f", {"label_column": "x"}, "--label-column"),
        ("m:f", {"feature_columns": ("x",)}, "--feature-columns"),
    ],
)
def test_options_that_mean_nothing(spec: str, given: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        open_source(spec, options(**given))


@pytest.mark.parametrize("given", [{"batch_size": 0}, {"image_size": -1}, {"std": (1.0, 0.0)}])
def test_settings_out_of_range(given: dict[str, Any]) -> None:
    with pytest.raises(SettingError):
        options(**given)


def test_options_of_the_fit_are_taken_over_where_they_apply() -> None:
    fitted = options(batch_size=7, image_size=32, mean=(0.5,))
    assert options(batch_size=3).or_else(fitted, ("batch_size", "mean")) == options(batch_size=3, mean=(0.5,))


def test_unlabelled_arrays_keep_their_length() -> None:
    np.savez("a.npz", x=np.ones((5, 2)), y=np.arange(5))
    source = open_source("npz:a.npz", options(batch_size=2)).unlabelled()
    assert (len(source), len(source.batches()), source.labels) == (5, 3, None)  # type: ignore[arg-type]
    assert [type(batch) for batch in source.batches()] == [Tensor] * 3
    assert not isinstance(source.batches(), Iterator)
