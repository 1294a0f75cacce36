"""Data sets of PyTorch in place of batches, with the names that they know."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from cases import seeded
from ifcomp import IFComp
from ifcomp.data.forms import DataRequest, as_data
from ifcomp.errors import DataError

X = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(300) % 3


class Net(nn.Module):
    """A model with a named input and an optional one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, values: Tensor, gain: Tensor | None = None) -> Tensor:
        h = torch.tanh(self.body(values))
        return self.head(h if gain is None else h * gain)


def net() -> nn.Module:
    return seeded(Net)()


class Rows(Dataset[Any]):
    """Examples in one of several forms."""

    def __init__(self, form: str) -> None:
        self.form = form

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> Any:
        x, y = X[index], int(Y[index])
        return {
            "pairs": (x, y),
            "tensors": x,
            "arrays": (x.numpy(), np.int64(y)),
            "dicts": {"values": x, "labels": y},
            "dicts_with_others": {"id": index, "values": x, "label": y, "text": f"row {index}"},
            "other_name": {"features": x, "label": y, "text": "row"},
        }[self.form]


@pytest.mark.parametrize("form", ["pairs", "tensors", "arrays", "dicts", "dicts_with_others", "other_name"])
def test_data_sets_give_the_scores_of_batches(form: str) -> None:
    batches = [X] if form == "tensors" else [(X, Y)]
    expected = IFComp(net()).fit(batches).score(batches).frame
    pd.testing.assert_frame_equal(IFComp(net()).fit(Rows(form)).score(Rows(form)).frame, expected, rtol=1e-4, atol=1e-6)


def test_several_numeric_entries_without_a_known_name_are_refused() -> None:
    rows = [{"first": X[0], "second": X[0], "label": 0}]

    class Unknown(Rows):
        def __getitem__(self, index: int) -> Any:
            return rows[0]

    message = "entries 'first', 'second', 'label', but forward of the model takes gain, values.*collate_fn"
    with pytest.raises(DataError, match=message):
        IFComp(net()).fit(Unknown(""))


def test_a_collate_function_builds_the_batches() -> None:
    def collate(rows: list[Any]) -> Any:
        assert set(rows[0]) == {"features", "label", "text"}  # no entry is an input, so all are given
        return {"values": torch.stack([row["features"] for row in rows]), "label": [row["label"] for row in rows]}

    ifc = IFComp(net(), collate_fn=collate).fit(Rows("other_name"))
    expected = IFComp(net()).fit([(X, Y)]).score([(X, Y)]).frame
    pd.testing.assert_frame_equal(ifc.score(Rows("other_name")).frame, expected, rtol=1e-4, atol=1e-6)


def test_examples_of_several_shapes_are_refused_with_advice() -> None:
    ragged = [(X[0], 0), (X[0, :2], 1)]

    class Ragged(Rows):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Any:
            return ragged[index]

    with pytest.raises(DataError, match=r"cannot be stacked.*equal size.*collate_fn"):
        IFComp(net()).fit(Ragged(""))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return zip(X, Y, strict=True)


class NoLength(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return X[index], Y[index]


@pytest.mark.parametrize(
    ("data", "message"),
    [(Stream(), "Stream is an IterableDataset.*DataLoader"), (NoLength(), "NoLength has no __len__")],
    ids=["iterable", "no_length"],
)
def test_data_sets_without_positions_are_refused(data: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        IFComp(net()).fit(data)
    assert len(IFComp(net()).fit([X]).score(DataLoader(Stream(), 7))) == 300


# Names --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    generator = np.random.default_rng(0)
    for name in ("ant", "bee", "cat"):
        (root / name).mkdir()
        for number in range(8):
            image = Image.fromarray(generator.integers(0, 255, (4, 4), dtype=np.uint8))
            image.save(root / name / f"{number}.png")
    return root


def image_folder(root: Path, transform: Any = None) -> Any:
    torchvision = pytest.importorskip("torchvision", reason="torchvision is not installed")

    def load(image: Image.Image) -> Tensor:
        return torch.from_numpy(np.asarray(image.convert("L"), dtype=np.float32) / 255).unsqueeze(0)

    return torchvision.datasets.ImageFolder(str(root), transform=transform or load)


def image_net() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)))()


@pytest.mark.filterwarnings("ignore:The audit relies on only")
@pytest.mark.parametrize("form", ["dataset", "subset", "loader", "loader_with_a_batch_sampler", "random_loader"])
def test_files_and_classes_of_an_image_folder_are_in_the_audit(folder: Path, form: str) -> None:
    images = image_folder(folder)
    order = list(range(23, -1, -2))
    batches = [order[:5], order[5:]]
    data = {
        "dataset": images,
        "subset": Subset(images, order),
        "loader": DataLoader(Subset(images, order), 5),
        "loader_with_a_batch_sampler": DataLoader(images, batch_sampler=batches),  # type: ignore[arg-type]
        "random_loader": DataLoader(images, 5, sampler=order),
    }[form]
    frame = IFComp(image_net()).audit(data).frame
    picked = range(24) if form == "dataset" else order
    classes = np.array(["ant", "bee", "cat"])
    assert frame["label_name"].tolist() == [images.classes[images.targets[index]] for index in picked]
    assert frame["suggested_name"].tolist() == classes[frame["suggested"]].tolist()
    if form in ("dataset", "subset", "loader"):
        assert frame["name"].tolist() == [images.samples[index][0] for index in picked]
    else:
        assert "name" not in frame  # the order of the sampler is unknown


def test_images_without_a_transform_are_refused_with_advice(folder: Path) -> None:
    with pytest.raises(DataError, match=r"cannot be stacked.*convert images to tensors"):
        IFComp(image_net()).audit(image_folder(folder, transform=lambda image: image))


class Named(TensorDataset):
    """A data set with attributes as those of torchvision."""

    def __init__(self, classes: Any, **names: Any) -> None:
        super().__init__(X, Y)
        self.classes = classes
        vars(self).update(names)


@pytest.mark.parametrize(
    ("data", "classes", "names"),
    [
        (Named(["a", "b"], imgs=[("x.png", 0)] * 300), ("a", "b"), ["x.png"] * 300),
        (Named(("a", "b"), texts=["one"] * 300), ("a", "b"), ["one"] * 300),
        (Named(5, samples=X), None, None),
        (Named([], samples=[], imgs=None), None, None),
        (TensorDataset(X, Y), None, None),
    ],
    ids=["imgs", "texts", "other_types", "empty", "none"],
)
def test_names_are_read_from_attributes(data: Any, classes: Any, names: Any) -> None:
    found = as_data(data, DataRequest(net()))
    assert found.class_names == classes
    assert (None if found.example_names is None else list(found.example_names())) == names


def test_names_that_do_not_fit_are_left_out() -> None:
    frame = IFComp(net()).audit(Named(["a", "b"], texts=["one"] * 7)).frame
    assert not {"name", "label_name", "suggested_name"} & set(frame)
