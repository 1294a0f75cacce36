"""Bilinear sampling of batches of images with reflection at the edges."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional as F


def sample(images: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Sample images [N, H, W, C] at ``rows`` and ``columns`` [N or 1, H', W'] in pixels; return [N, H', W', C]."""
    count, height, width, _ = images.shape
    scaled = np.stack([(2 * columns + 1) / width - 1, (2 * rows + 1) / height - 1], -1).astype(np.float32)
    grid = torch.from_numpy(scaled).expand(count, -1, -1, -1)
    planes = torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))
    sampled = F.grid_sample(planes, grid, mode="bilinear", padding_mode="reflection", align_corners=False)
    return sampled.numpy().transpose(0, 2, 3, 1)


def positions(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the row and column of every pixel, [1, H, W] each."""
    rows, columns = (axis.astype(np.float32)[None] for axis in np.indices(images.shape[1:3]))
    return rows, columns


def transform(images: np.ndarray, matrices: np.ndarray, shifts: np.ndarray) -> np.ndarray:
    """Sample images at ``matrix @ (position - centre) + centre + shift`` in (row, column) coordinates.

    Args:
        images: [N, H, W, C].
        matrices: [N or 1, 2, 2].
        shifts: [N or 1, 2] in pixels.
    """
    centre = (np.array(images.shape[1:3]) - 1) / 2
    offsets = np.stack([axis[0] for axis in positions(images)], -1) - centre
    sources = np.einsum("nij,hwj->nhwi", matrices, offsets) + centre + shifts[:, None, None]
    return sample(images, sources[..., 0], sources[..., 1])


def smear(images: np.ndarray, angles: np.ndarray, reach: int, sigma: float) -> np.ndarray:
    """Average each image along a direction (motion blur).

    Args:
        images: [N, H, W, C].
        angles: [N] in radians from the horizontal.
        reach: Number of pixels to each side.
        sigma: Standard deviation of the Gaussian weights in pixels.
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
