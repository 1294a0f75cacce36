"""Data of the demo: scikit-learn's 8x8 digits in three parts, some training labels flipped, and altered digits.

Images are float32 tensors [N, 1, 8, 8] with values in 0 ... 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor

CLASSES = 10
TRAINING_EXAMPLES = 1000
VALIDATION_EXAMPLES = 300
FLIPPED_SHARE = 0.05
TILT = math.radians(25)

#: Makes other images from images; all randomness comes from the generator.
Alteration = Callable[[Tensor, torch.Generator], Tensor]


@dataclass(frozen=True)
class Digits:
    """Images [N, 1, 8, 8] and labels [N]."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def batches(self, size: int = 250) -> list[tuple[Tensor, Tensor]]:
        """In order, as `IFComp.fit` and `IFComp.score` take them."""
        return list(zip(self.images.split(size), self.labels.split(size), strict=True))


@dataclass(frozen=True)
class Data:
    """The three parts.

    Attributes:
        training: With some labels flipped.
        flipped: Which ones, [N] booleans.
        validation: Held out of training; settings are chosen here.
        test: Results are measured here, and nothing is chosen.
    """

    training: Digits
    flipped: Tensor
    validation: Digits
    test: Digits


def load_data(seed: int) -> Data:
    """Split the digits at random and flip some of the training labels to a random other class."""
    generator = torch.Generator().manual_seed(seed)
    found = load_digits()
    images = torch.tensor(found.images / 16, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(found.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=generator)
    sizes = [TRAINING_EXAMPLES, VALIDATION_EXAMPLES, len(order) - TRAINING_EXAMPLES - VALIDATION_EXAMPLES]
    training, validation, test = (Digits(images[part], labels[part]) for part in order.split(sizes))
    noisy, flipped = flip_labels(training.labels, generator)
    return Data(Digits(training.images, noisy), flipped, validation, test)


def flip_labels(labels: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Labels of which a share is replaced by another class, and which ones these are."""
    count = round(FLIPPED_SHARE * len(labels))
    chosen = torch.randperm(len(labels), generator=generator)[:count]
    noisy, flipped = labels.clone(), torch.zeros(len(labels), dtype=torch.bool)
    noisy[chosen] = (labels[chosen] + torch.randint(1, CLASSES, (count,), generator=generator)) % CLASSES
    flipped[chosen] = True
    return noisy, flipped


# Inputs from elsewhere ---------------------------------------------------------------------------------------------


def _inverted(images: Tensor, generator: torch.Generator) -> Tensor:
    return 1 - images


def _pixels_shuffled(images: Tensor, generator: torch.Generator) -> Tensor:
    """Every image in an order of its own."""
    flat = images.flatten(1)
    return flat.gather(1, torch.rand(flat.shape, generator=generator).argsort(1)).view_as(images)


def _uniform_noise(images: Tensor, generator: torch.Generator) -> Tensor:
    return torch.rand(images.shape, generator=generator)


def _mosaic(images: Tensor, generator: torch.Generator) -> Tensor:
    """The upper half of one digit above the lower half of another."""
    others = images[torch.randperm(len(images), generator=generator)]
    return torch.cat([images[:, :, :4], others[:, :, 4:]], 2)


def _blocks(images: Tensor, generator: torch.Generator) -> Tensor:
    """Black and white squares of 2x2 pixels."""
    coarse = torch.rand(len(images), 1, 4, 4, generator=generator).round()
    return coarse.repeat_interleave(2, 2).repeat_interleave(2, 3)


# Digits under shift: as hard as makes about a quarter of the validation digits come out wrong ----------------------


def _unchanged(images: Tensor, generator: torch.Generator) -> Tensor:
    return images


def _blurred(images: Tensor, generator: torch.Generator) -> Tensor:
    return F.avg_pool2d(images, 3, stride=1, padding=1)


def _noisy(images: Tensor, generator: torch.Generator) -> Tensor:
    return (images + 0.4 * torch.randn(images.shape, generator=generator)).clamp(0, 1)


def _moved(images: Tensor, generator: torch.Generator) -> Tensor:
    """One pixel to the left or right."""
    to_right = torch.rand(len(images), 1, 1, 1, generator=generator) < 0.5
    return torch.where(to_right, F.pad(images, (1, -1)), F.pad(images, (-1, 1)))


def _partly_erased(images: Tensor, generator: torch.Generator) -> Tensor:
    """A square of 3x3 pixels is empty."""
    erased = images.clone()
    for image in erased:
        row, column = torch.randint(0, 6, (2,), generator=generator).tolist()
        image[:, row : row + 3, column : column + 3] = 0
    return erased


def _speckled(images: Tensor, generator: torch.Generator) -> Tensor:
    """A fifth of the pixels is black or white at random."""
    specks = torch.rand(images.shape, generator=generator).round()
    return torch.where(torch.rand(images.shape, generator=generator) < 0.2, specks, images)


def _tilted(images: Tensor, generator: torch.Generator) -> Tensor:
    """Rotated by 25 degrees to the left or right."""
    side = torch.rand(len(images), generator=generator).sub(0.5).sign()
    sine, cosine = side * math.sin(TILT), torch.full_like(side, math.cos(TILT))
    none = torch.zeros_like(side)
    rotations = torch.stack([cosine, -sine, none, sine, cosine, none], 1).view(-1, 2, 3)
    grid = F.affine_grid(rotations, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)


#: Where the damping is chosen, and where out-of-distribution detection is measured.
VALIDATION_STRANGERS: dict[str, Alteration] = {"mosaics of two digits": _mosaic, "2x2 blocks": _blocks}
TEST_STRANGERS: dict[str, Alteration] = {
    "inverted digits": _inverted,
    "pixel-shuffled digits": _pixels_shuffled,
    "uniform noise": _uniform_noise,
}

#: Where alpha is chosen, and where calibration is measured.
VALIDATION_SHIFTS: dict[str, Alteration] = {
    "clean": _unchanged,
    "partly erased": _partly_erased,
    "tilted": _tilted,
    "speckled": _speckled,
}
TEST_SHIFTS: dict[str, Alteration] = {
    "clean": _unchanged,
    "blurred": _blurred,
    "noisy": _noisy,
    "moved": _moved,
}
