"""Blur: Gaussian, defocus, glass, motion and zoom."""

from __future__ import annotations

import numpy as np
from scipy import ndimage

from experiments.corruptions.registry import Images, Streams, corruption
from experiments.corruptions.sampling import smear, transform


def blurred(images: Images, sigma: float) -> Images:
    """Return each channel of each image after a Gaussian blur."""
    return ndimage.gaussian_filter(images, (0, sigma, sigma, 0), mode="nearest")


@corruption(0.4, 0.6, 0.7, 0.8, 1.0)
def gaussian_blur(images: Images, streams: Streams, sigma: float) -> Images:
    """Gaussian blur; ``sigma`` in pixels."""
    return blurred(images, sigma)


@corruption(0.7, 0.9, 1.1, 1.4, 1.8)
def defocus_blur(images: Images, streams: Streams, radius: float) -> Images:
    """Defocus: convolution with a disk of ``radius`` pixels with a soft edge."""
    reach = int(np.ceil(radius))
    rows, columns = np.mgrid[-reach : reach + 1, -reach : reach + 1]
    disk = np.clip(radius + 0.5 - np.hypot(rows, columns), 0, 1)
    return ndimage.convolve(images, (disk / disk.sum())[None, :, :, None].astype(np.float32), mode="nearest")


@corruption((0.40, 0.1), (0.45, 0.3), (0.50, 0.5), (0.55, 0.7), (0.60, 1.0))
def glass_blur(images: Images, streams: Streams, parameter: tuple[float, float]) -> Images:
    """Frosted glass: a share of the pixels is swapped with a neighbour, with a blur before and after.

    Args:
        images: [N, H, W, C].
        streams: Random numbers.
        parameter: Sigma of the blur in pixels, share of swapped pixels.
    """
    sigma, share = parameter
    shuffled = blurred(images, sigma)
    count, height, width, _ = images.shape
    shape = (count, height - 2, width - 2)
    moves = streams("move").integers(-1, 2, (*shape, 2))
    swapped = streams("choice").random(shape) < share
    index = np.arange(count)
    for row, column in np.ndindex(shape[1:]):
        source = (index, row + 1, column + 1)
        move = moves[:, row, column] * swapped[:, row, column, None]
        target = (index, source[1] + move[:, 0], source[2] + move[:, 1])
        shuffled[source], shuffled[target] = shuffled[target], shuffled[source]
    return blurred(shuffled, sigma)


@corruption((3, 0.7), (4, 1.0), (5, 1.3), (6, 1.7), (8, 2.3))
def motion_blur(images: Images, streams: Streams, parameter: tuple[int, float]) -> Images:
    """Camera motion: a random direction per image within 45 degrees of the horizontal."""
    angles = streams("angle").uniform(-np.pi / 4, np.pi / 4, len(images))
    return smear(images, angles, *parameter)


@corruption(1.06, 1.11, 1.16, 1.21, 1.26)
def zoom_blur(images: Images, streams: Streams, largest: float) -> Images:
    """Zoom during exposure by up to ``largest``."""
    zooms = np.arange(1, largest + 1e-9, 0.01)
    parts = (transform(images, np.eye(2)[None] / zoom, np.zeros((1, 2))) for zoom in zooms)
    return sum(parts, np.zeros_like(images)) / len(zooms)
