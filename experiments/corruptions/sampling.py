"""Images read off at other places: bilinear, all images at once, mirrored at the edges."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional as F


def sample(images: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Values of images [N, H, W, C] at positions ``rows``, ``columns`` [N or 1, H', W'] in pixels, [N, H', W', C]."""
    count, height, width, _ = images.shape
    scaled = np.stack([(2 * columns + 1) / width - 1, (2 * rows + 1) / height - 1], -1).astype(np.float32)
    grid = torch.from_numpy(scaled).expand(count, -1, -1, -1)
    planes = torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))
    found = F.grid_sample(planes, grid, mode="bilinear", padding_mode="reflection", align_corners=False)
    return found.numpy().transpose(0, 2, 3, 1)


def positions(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of every pixel, [1, H, W] each."""
    rows, columns = (axis.astype(np.float32)[None] for axis in np.indices(images.shape[1:3]))
    return rows, columns


def transform(images: np.ndarray, matrices: np.ndarray, shifts: np.ndarray) -> np.ndarray:
    """Images read off at ``matrix @ (position - centre) + centre + shift``, in (row, column).

    Args:
        images: [N, H, W, C].
        matrices: [N or 1, 2, 2].
        shifts: [N or 1, 2] in pixels.
    """
    centre = (np.array(images.shape[1:3]) - 1) / 2
    offsets = np.stack([axis[0] for axis in positions(images)], -1) - centre
    places = np.einsum("nij,hwj->nhwi", matrices, offsets) + centre + shifts[:, None, None]
    return sample(images, places[..., 0], places[..., 1])


def smear(images: np.ndarray, angles: np.ndarray, reach: int, sigma: float) -> np.ndarray:
    """Motion blur: each image [N, H, W, C] averaged along its own direction.

    Args:
        images: [N, H, W, C].
        angles: [N] in radians against the horizontal.
        reach: Pixels to each side.
        sigma: Standard deviation of the Gaussian weights along the way, in pixels.
    """
    rows, columns = positions(images)
    steps = np.arange(-reach, reach + 1)
    weights = np.exp(-(steps**2) / (2 * sigma**2))
    sine, cosine = np.sin(angles)[:, None, None], np.cos(angles)[:, None, None]
    parts = (
        weight * sample(images, rows + step * sine, columns + step * cosine)
        for step, weight in zip(steps, weights / weights.sum(), strict=True)
    )
    return sum(parts, np.zeros_like(images))
