"""Data sets from files, conversion against Pillow, normalisation by hand, and batches."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import skimage
import torch
from PIL import Image

from experiments import datasets
from experiments.datasets import Batches, Dataset, MissingDataError, Normalisation, convert, load, separate
from ifcomp import IFComp
from ifcomp.errors import DataError, SettingError


def _pixels(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def _write_idx(path: Path, array: np.ndarray) -> None:
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(header + array.tobytes()))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("IFCOMP_DATA", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
@pytest.mark.parametrize(("split", "prefix"), [("train", "train"), ("test", "t10k")])
def test_idx_files(folder: Path, name: str, split: str, prefix: str) -> None:
    images, labels = _pixels(5, 28, 28), np.arange(5, dtype=np.uint8)
    _write_idx(folder / name / f"{prefix}-images-idx3-ubyte.gz", images)
    _write_idx(folder / name / f"{prefix}-labels-idx1-ubyte.gz", labels)
    data = load(name, split)
    assert data.name == f"{name}-{split}"
    assert np.array_equal(data.images.numpy(), images)
    assert data.labels.dtype == torch.int64
    assert data.labels.tolist() == [0, 1, 2, 3, 4]
    assert len(data.class_names) == 10


def test_numpy_files(folder: Path) -> None:
    colour, grey = _pixels(4, 32, 32, 3), _pixels(3, 28, 28)
    for name in ("cifar10", "kmnist", "tinyimagenet"):
        (folder / name).mkdir()
    np.save(folder / "cifar10/x_test.npy", colour)
    np.save(folder / "cifar10/y_test.npy", np.array([3, 8, 8, 0], np.uint8))
    np.savez(folder / "kmnist/kmnist-test-imgs.npz", grey)
    np.savez(folder / "tinyimagenet/val_3000_32x32.npz", x=colour, y=np.array([0, 199, 7, 7], np.uint8))
    assert np.array_equal(load("cifar10").images.numpy(), colour)
    assert [load("cifar10").class_names[label] for label in load("cifar10").labels] == [
        "cat",
        "ship",
        "ship",
        "airplane",
    ]
    assert load("kmnist").labels is None
    assert load("tinyimagenet").labels.tolist() == [0, 199, 7, 7]


def test_classes_of_cifar10_are_left_out_of_tinyimagenet(folder: Path) -> None:
    (folder / "tinyimagenet").mkdir()
    labels = np.array([0, 1, 196, 15, 102, 0], np.uint8)  # cat, reel, lifeboat, school bus, cougar, cat
    np.savez(folder / "tinyimagenet/val_3000_32x32.npz", x=_pixels(6, 32, 32, 3), y=labels)
    near = load("tinyimagenet-near")
    assert near.labels.tolist() == [1, 15, 102]
    assert torch.equal(near.images, load("tinyimagenet").images[[1, 3, 4]])
    assert len(datasets.TINYIMAGENET_IN_CIFAR10) == 23


@pytest.mark.parametrize("name", sorted(datasets.PICTURES))
def test_squares_are_cut_from_pictures(name: str) -> None:
    squares = load(name)
    assert squares.images.shape == (3000, 32, 32) if name == "textures" else (3000, 32, 32, 3)
    assert torch.equal(squares.images, load(name).images)
    assert len(squares.images.flatten(1).unique(dim=0)) > 2900
    folder = Path(skimage.__file__).parent / "data"
    pictures = [np.asarray(Image.open(folder / file)) for file in datasets.PICTURES[name]]
    for square in squares.images[:5].numpy():
        places = (
            np.argwhere((picture == square[0, 0]).reshape(*picture.shape[:2], -1).all(-1)) for picture in pictures
        )
        assert any(
            np.array_equal(picture[row : row + 32, column : column + 32], square)
            for picture, found in zip(pictures, places, strict=True)
            for row, column in found
        )


def test_missing_pictures_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(skimage, "__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(MissingDataError, match=r"has no brick\.png, grass\.png, gravel\.png"):
        load("textures")


def test_damaged_files_are_refused(folder: Path) -> None:
    _write_idx(folder / "mnist/t10k-images-idx3-ubyte.gz", _pixels(5, 28, 28))
    _write_idx(folder / "mnist/t10k-labels-idx1-ubyte.gz", np.arange(4, dtype=np.uint8))
    with pytest.raises(DataError, match="do not belong together"):
        load("mnist")
    _write_idx(folder / "mnist/t10k-labels-idx1-ubyte.gz", np.full(5, 10, np.uint8))
    with pytest.raises(DataError, match="do not belong together"):
        load("mnist")
    (folder / "mnist/t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(b"\x00\x00\x08\x03short header and data"))
    with pytest.raises(DataError, match="complete idx file"):
        load("mnist")
    (folder / "kmnist").mkdir()
    np.savez(folder / "kmnist/kmnist-test-imgs.npz", other=_pixels(2, 28, 28))
    with pytest.raises(DataError, match="no array 'arr_0', only other"):
        load("kmnist")


@pytest.mark.parametrize("name", [name for name in datasets.SOURCES if name not in ("digits", *datasets.PICTURES)])
def test_missing_files_are_named_with_their_source(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MissingDataError, match=f"{folder}/{name.removesuffix('-near')}/"):
        load(name)
    monkeypatch.delenv("IFCOMP_DATA")
    with pytest.raises(MissingDataError, match="IFCOMP_DATA is not set"):
        load(name)


def test_unknown_names_and_splits_are_refused() -> None:
    with pytest.raises(SettingError, match="fashion-mnist"):
        load("imagenet")
    with pytest.raises(SettingError, match="no split 'train'"):
        load("notmnist", "train")


def test_digits_need_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("IFCOMP_DATA", raising=False)
    train, test = load("digits", "train"), load("digits", "test")
    assert (len(train), len(test)) == (1297, 500)
    rows = {image.tobytes() for image in train.images.numpy()}
    assert not any(image.tobytes() in rows for image in test.images.numpy())
    assert train.images.max() == 255
    assert train.labels.bincount().min() > 100


def test_separate_gives_disjoint_parts_in_order() -> None:
    data = Dataset("made", torch.arange(50, dtype=torch.uint8).reshape(50, 1, 1), torch.arange(50), ("a",) * 50)
    train, validation = separate(data, 10, seed=1)
    assert sorted(train.labels.tolist() + validation.labels.tolist()) == list(range(50))
    assert validation.labels.tolist() == sorted(validation.labels.tolist())
    assert train.images[:, 0, 0].tolist() == train.labels.tolist()
    assert separate(data, 10, seed=1)[0].digest() == train.digest() != separate(data, 10, seed=2)[0].digest()
    with pytest.raises(SettingError, match="from 1 to 49"):
        separate(data, 50)


def test_the_digest_depends_on_pixels_labels_and_shape() -> None:
    data = load("digits").first(20)
    assert len(data) == 20
    labels = data.labels.clone()
    labels[0] = (labels[0] + 1) % 10
    others = [
        data.first(19),
        Dataset(data.name, data.images, labels, data.class_names),
        data.take(torch.arange(20), "x"),
    ]
    assert [other.digest() == data.digest() for other in others] == [False, False, True]


def test_colour_to_grey_agrees_with_pillow() -> None:
    coarse = _pixels(4, 4, 4, 3).repeat(8, 1).repeat(8, 2)
    data = Dataset("made", torch.from_numpy(coarse), None, ())
    converted = convert(data, 28, 1).images.numpy().astype(int)
    expected = [
        Image.fromarray(image).convert("L").resize((28, 28), Image.Resampling.BILINEAR) for image in data.images.numpy()
    ]
    assert converted.shape == (4, 28, 28)
    assert np.abs(converted - np.stack([np.asarray(image) for image in expected])).max() <= 2  # Pillow rounds twice


def test_grey_to_colour() -> None:
    data = load("digits").first(3)
    converted = convert(data, 32, 3)
    assert converted.images.shape == (3, 32, 32, 3)
    assert converted.name == "digits-test-first3-32x32x3"
    assert (converted.images[..., 0] == converted.images[..., 2]).all()
    assert torch.equal(convert(data, 8, 1).images, data.images)
    with pytest.raises(SettingError, match="1 or 3"):
        convert(data, 8, 2)


def test_normalisation_by_hand() -> None:
    images = torch.from_numpy(_pixels(2, 3, 4, 3))
    normalisation = Normalisation((0.5, 0.25, 0.0), (0.1, 0.2, 1.0))
    normalised = normalisation(images)
    assert normalised.shape == (2, 3, 3, 4)
    for b, h, w, c in np.ndindex(2, 3, 4, 3):
        expected = (float(images[b, h, w, c]) / 255 - normalisation.mean[c]) / normalisation.std[c]
        assert float(normalised[b, c, h, w]) == pytest.approx(expected, abs=1e-5)
    with pytest.raises(DataError, match="convert"):
        normalisation(images[..., 0])


def test_batches_are_re_iterable() -> None:
    data = load("digits").first(50)
    batches = Batches(data, datasets.MNIST, batch_size=16)
    assert len(batches) == 4
    for _ in range(2):
        x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
        assert torch.equal(y, data.labels)
        assert torch.equal(x, datasets.MNIST(data.images))
    bare = Batches(Dataset("bare", data.images, None, ()), datasets.MNIST)
    assert [len(batch) for batch in bare] == [1]


def test_batches_are_data_for_a_fit() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    data = load("digits").first(50)
    table = IFComp(model).fit(Batches(data, datasets.MNIST, 16)).score(Batches(data, datasets.MNIST, 50))
    assert table.frame["label"].tolist() == data.labels.tolist()
