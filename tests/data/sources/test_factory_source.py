"""Data that a function of the user returns."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from source_helpers import read_all, write_module
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

from ifcomp.data.sources import SourceOptions, open_source
from ifcomp.errors import DataError

BATCHES = "import torch\ndef data():\n    return [(torch.arange(6.).view(3, 2), torch.tensor([0, 1, 0]))] * 2\n"


def test_factory_in_the_current_folder() -> None:
    source = open_source(f"{write_module(BATCHES)}:data")
    x, y = read_all(source)
    assert (x.shape, len(source)) == ((6, 2), 6)
    assert y is not None
    assert y.tolist() == [0, 1, 0, 0, 1, 0]
    assert [preview.content for preview in source.preview([4, 0])] == [{"0": 2, "1": 3}, {"0": 0, "1": 1}]
    assert [batch.shape for batch in source.unlabelled().batches()] == [(3, 2), (3, 2)]


def test_a_module_may_be_called_factory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "factory", raising=False)
    Path("factory.py").write_text(BATCHES)
    assert len(open_source("factory:data")) == 6
    monkeypatch.delitem(sys.modules, "factory")


def test_datasets_are_put_into_batches_and_have_class_names() -> None:
    name = write_module(
        "import torch\nfrom torch.utils.data import TensorDataset\n"
        "def data():\n    made = TensorDataset(torch.ones(5, 1, 8, 8), torch.arange(5))\n"
        "    made.classes = list('abcde')\n    return made\n"
    )
    source = open_source(f"{name}:data", SourceOptions(batch_size=2))
    assert [len(x) for x, _ in source.batches()] == [2, 2, 1]
    assert source.class_names == tuple("abcde")
    assert source.preview([4])[0].kind == "image"
    assert len(source.unlabelled().batches()) == 3  # type: ignore[arg-type]


def test_previews_are_the_texts_of_a_dataset() -> None:
    name = write_module(
        "import torch\nfrom torch.utils.data import DataLoader, TensorDataset\n"
        "def data(count=3):\n    made = TensorDataset(torch.arange(6).view(3, 2), torch.arange(3))\n"
        "    made.texts = ['one', 'two', 'three'][:count]\n    return DataLoader(made, 2)\n"
        "def short():\n    return data(2)\n"
    )
    previews = open_source(f"{name}:data").preview([2, 0])
    assert [(preview.kind, preview.content, preview.name) for preview in previews] == [
        ("text", "three", "row 2"),
        ("text", "one", "row 0"),
    ]
    with pytest.raises(DataError, match="has 2 texts, but more examples"):
        open_source(f"{name}:short").preview([2])


def test_labels_of_dict_batches_are_removed() -> None:
    name = write_module(
        "import torch\nclass Data:\n    def __iter__(self):\n"
        "        yield {'input_ids': torch.ones(2, 3, dtype=torch.long), 'labels': torch.tensor([0, 1])}\n"
    )
    source = open_source(f"{name}:Data").unlabelled()
    assert [set(batch) for batch in source.batches()] == [{"input_ids"}]
    assert not hasattr(source.batches(), "__len__")
    assert source.preview([1])[0].content == "1 1 1"


@pytest.mark.parametrize(
    ("text", "message"),
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
def test_failing_factories_are_explained(text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_source(f"{write_module(text)}:data")


def test_missing_modules_are_named() -> None:
    with pytest.raises(DataError, match=r"no module 'nowhere' for the data 'nowhere.to:data', neither"):
        open_source("nowhere.to:data")


@pytest.mark.parametrize("options", [{"shuffle": True}, {"sampler": SubsetRandomSampler(range(4))}])
def test_shuffled_loaders_are_refused(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def loader() -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(4, 2)), **options)

    monkeypatch.setattr(sys.modules[__name__], "loader", loader, raising=False)
    with pytest.raises(DataError, match="shuffle=False"):
        open_source(f"{__name__}:loader")
