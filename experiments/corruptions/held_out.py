"""Perturbations for tuning. None of them is among the corruptions of reported results."""

from __future__ import annotations

import numpy as np

from experiments.corruptions.registry import Images, Streams, corruption
from experiments.corruptions.sampling import transform


def _signs(streams: Streams, count: int) -> np.ndarray:
    return streams("sign").choice([-1, 1], count)


@corruption(8, 15, 22, 30, 40)
def rotation(images: Images, streams: Streams, degrees: float) -> Images:
    """Rotate to the left or right."""
    angles = np.deg2rad(degrees) * _signs(streams, len(images))
    sine, cosine = np.sin(angles), np.cos(angles)
    matrices = np.stack([np.stack([cosine, sine], 1), np.stack([-sine, cosine], 1)], 1)
    return transform(images, matrices, np.zeros((1, 2)))


@corruption(0.15, 0.25, 0.35, 0.5, 0.7)
def shear(images: Images, streams: Streams, slope: float) -> Images:
    """Shift rows in proportion to their distance from the centre."""
    matrices = np.tile(np.eye(2), (len(images), 1, 1))
    matrices[:, 1, 0] = slope * _signs(streams, len(images))
    return transform(images, matrices, np.zeros((1, 2)))


@corruption(16, 8, 6, 4, 3)
def posterize(images: Images, streams: Streams, levels: int) -> Images:
    """Quantise each channel to ``levels`` values."""
    return np.rint(images * (levels - 1)) / (levels - 1)


@corruption(1.3, 1.6, 2.0, 2.6, 3.5)
def gamma(images: Images, streams: Streams, exponent: float) -> Images:
    """Gamma correction with ``exponent`` or its inverse, at random."""
    exponents = exponent ** _signs(streams, len(images)).astype(np.float32)
    return images ** exponents[:, None, None, None]


@corruption(0.2, 0.3, 0.4, 0.5, 0.6)
def cutout(images: Images, streams: Streams, side: float) -> Images:
    """Cover a random square inside each image with grey; ``side`` is relative to the image."""
    count, height, width, _ = images.shape
    corners = streams("place").random((count, 2, 1))
    masks = []
    for length, corner in zip((height, width), corners.transpose(1, 0, 2), strict=True):
        first = np.rint(corner * (1 - side) * length)
        masks.append((np.arange(length) >= first) & (np.arange(length) < first + round(side * length)))
    return np.where((masks[0][:, :, None] & masks[1][:, None, :])[..., None], np.float32(0.5), images)
