"""Synthetic OOD inputs for tuning detectors, generated from validation images or from random numbers.

They share no source with the reported OOD data sets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from experiments.datasets import Dataset


def halves(images: Tensor, generator: torch.Generator) -> Tensor:
    """Join the left half of an image with the right half of another."""
    other = images[_derangement(len(images), generator)]
    middle = images.shape[2] // 2
    return torch.cat([images[:, :, :middle], other[:, :, middle:]], 2)


def patches(images: Tensor, generator: torch.Generator) -> Tensor:
    """Shuffle sixteen squares of each image."""
    step = images.shape[1] // 4
    shuffled = images.clone()
    for index, image in enumerate(images):
        for target, source in enumerate(torch.randperm(16, generator=generator).tolist()):
            (row, column), (from_row, from_column) = divmod(target, 4), divmod(source, 4)
            shuffled[index, row * step : (row + 1) * step, column * step : (column + 1) * step] = image[
                from_row * step : (from_row + 1) * step, from_column * step : (from_column + 1) * step
            ]
    return shuffled


def inverted(images: Tensor, generator: torch.Generator) -> Tensor:
    """Invert the brightness."""
    return 255 - images


def noise(images: Tensor, generator: torch.Generator) -> Tensor:
    """Return uniform noise."""
    return torch.randint(0, 256, images.shape, generator=generator, dtype=torch.uint8)


def clouds(images: Tensor, generator: torch.Generator) -> Tensor:
    """Return smooth random fields over the whole range of brightness."""
    count, height, width = images.shape[:3]
    planes = images.shape[3] if images.dim() == 4 else 1
    coarse = torch.rand((count, planes, 5, 5), generator=generator)
    field = F.interpolate(coarse, (height, width), mode="bicubic", align_corners=True)
    low, high = (getattr(field.flatten(1), extremum)(1).values.view(-1, 1, 1, 1) for extremum in ("min", "max"))
    pixels = ((field - low) / (high - low) * 255).round().to(torch.uint8)
    return pixels[:, 0] if images.dim() == 3 else pixels.permute(0, 2, 3, 1).contiguous()


KINDS: Mapping[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    function.__name__: function for function in (halves, patches, inverted, noise, clouds)
}


def make(kind: str, data: Dataset, seed: int) -> Dataset:
    """Return a data set of OOD inputs without labels, one per image of ``data``."""
    images = KINDS[kind](data.images, torch.Generator().manual_seed(seed))
    return replace(data, name=f"{data.name}-{kind}s{seed}", images=images, labels=None)


def _derangement(count: int, generator: torch.Generator) -> Tensor:
    """Return a random permutation without fixed points."""
    order = torch.randperm(count, generator=generator)
    deranged = torch.empty_like(order)
    deranged[order] = order.roll(1)
    return deranged
