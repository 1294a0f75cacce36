"""Names of data and their options."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from source_helpers import read_all
from torch import Tensor

from ifcomp.data.sources import SourceOptions, complete_name, open_source
from ifcomp.errors import SettingError


@pytest.mark.parametrize(
    "spec",
    [
        *("", "digit", "digits:", "digits:x", "npz:", "npz", "folder:", "a.txt", "mod:", ":f"),
        *("a b:c", "csv:", "tsv:x.tsv", "../evil:f", "m:f()"),
    ],
)
def test_unknown_names_are_refused(spec: str) -> None:
    forms = r"digits, npz:FILE, folder:DIR, parquet:FILE, csv:FILE or package\.module:factory"
    with pytest.raises(SettingError, match=f"Data must be named as {forms}, but is '"):
        open_source(spec)


def test_paths_without_a_prefix(scratch_folder: Path) -> None:
    np.savez("a.npz", x=np.ones((2, 3)), y=np.array([0, 1]))
    Path("My table.CSV").write_text("u,label\n1,0\n2,1\n")
    Path("images").mkdir()
    Path("notes.txt").touch()
    names = {"a.npz": "npz:a.npz", "./a.npz": "npz:./a.npz", "My table.CSV": "csv:My table.CSV"}
    names |= {"images": "folder:images", "images/": "folder:images/", "npz:a.npz": "npz:a.npz", "m:f": "m:f"}
    assert {name: complete_name(name) for name in names} == names
    assert open_source("a.npz").spec == "npz:a.npz"
    assert len(open_source("My table.CSV")) == 2
    with pytest.raises(SettingError, match=r"There is no file 'b\.parquet'\. Data must be named as"):
        open_source("b.parquet")
    with pytest.raises(SettingError, match=r"Did you mean npz:notes\.txt or parquet:notes\.txt or csv:notes\.txt"):
        open_source("notes.txt")


def test_digest_depends_on_content_and_order_but_not_on_the_batches(scratch_folder: Path) -> None:
    x, y = np.arange(30.0).reshape(10, 3), np.arange(10) % 2
    variants = {"a": (x, y), "order": (x[::-1], y[::-1]), "label": (x, 1 - y), "shape": (x.reshape(10, 3, 1), y)}
    for name, (inputs, labels) in variants.items():
        np.savez(f"{name}.npz", x=inputs, y=labels)
    digests = {name: open_source(f"{name}.npz").digest() for name in variants}
    assert len(set(digests.values())) == len(variants)
    assert open_source("a.npz", SourceOptions(batch_size=3)).digest() == digests["a"]
    assert open_source("a.npz").unlabelled().digest() not in digests.values()


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("digits", {"mean": (0.5,)}, "--mean does not apply to the data 'digits'"),
        ("npz:a.npz", {"image_size": 3, "grey": True}, "--image-size, --grey does not apply"),
        ("folder:f", {"label_column": "x"}, "--label-column"),
        ("m:f", {"feature_columns": ("x",)}, "--feature-columns"),
    ],
)
def test_options_that_do_not_apply_are_refused(spec: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        open_source(spec, SourceOptions(**options))


@pytest.mark.parametrize("options", [{"batch_size": 0}, {"image_size": -1}, {"std": (1.0, 0.0)}])
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(SettingError):
        SourceOptions(**options)


def test_options_are_filled_from_defaults_that_apply() -> None:
    defaults = SourceOptions(batch_size=7, image_size=32, mean=(0.5,))
    filled = SourceOptions(batch_size=3).with_defaults(defaults, ("batch_size", "mean"))
    assert filled == SourceOptions(batch_size=3, mean=(0.5,))


def test_home_folder_is_expanded(monkeypatch: pytest.MonkeyPatch, scratch_folder: Path) -> None:
    monkeypatch.setenv("HOME", str(scratch_folder))
    np.savez("a.npz", x=np.ones((2, 3)))
    assert open_source("npz:~/a.npz").spec == "npz:~/a.npz"


@pytest.mark.parametrize("size", [1, 3, 7, 100])
def test_batch_size_changes_no_example(size: int) -> None:
    x, y = np.random.default_rng(0).normal(size=(7, 4)), np.arange(7) % 3
    np.savez("a.npz", x=x, y=y)
    source = open_source("npz:a.npz", SourceOptions(batch_size=size))
    sizes = [len(batch[0]) for batch in source.batches()]
    assert sizes == [min(size, 7 - start) for start in range(0, 7, size)]
    assert len(source.batches()) == len(sizes)  # type: ignore[arg-type]
    inputs, labels = read_all(source)
    np.testing.assert_array_equal(inputs.numpy(), x.astype(np.float32))
    assert labels is not None
    assert labels.tolist() == y.tolist()


def test_unlabelled_arrays_keep_their_length() -> None:
    np.savez("a.npz", x=np.ones((5, 2)), y=np.arange(5))
    source = open_source("npz:a.npz", SourceOptions(batch_size=2)).unlabelled()
    assert (len(source), len(source.batches()), source.labels) == (5, 3, None)  # type: ignore[arg-type]
    assert [type(batch) for batch in source.batches()] == [Tensor] * 3
    assert not isinstance(source.batches(), Iterator)


def test_digits_equal_those_of_the_demo() -> None:
    from ifcomp.cli.demo_study import load_data

    source = open_source("digits")
    x, y = read_all(source)
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
