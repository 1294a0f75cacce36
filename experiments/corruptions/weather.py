"""Weather: snow, frost, fog and spatter, generated from random numbers."""

from __future__ import annotations

from functools import cache

import numpy as np
from scipy import ndimage
from scipy.spatial import cKDTree

from experiments.corruptions.registry import Images, Streams, corruption
from experiments.corruptions.sampling import smear

_LUMA = np.array([0.299, 0.587, 0.114], np.float32)
_TEXTURE = 512


def _tinted(layer: np.ndarray, colour: tuple[float, float, float], channels: int) -> np.ndarray:
    """Colour a grey layer [..., 1]; with one channel, use the luma of the colour."""
    tint = np.array(colour, np.float32)
    return layer * (tint if channels == 3 else tint @ _LUMA)


def _clouds(generator: np.random.Generator, shape: tuple[int, ...], decay: float) -> np.ndarray:
    """Return random fields [..., H, W] with amplitudes ``frequency ** -decay``, each scaled to [0, 1]."""
    rows, columns = np.fft.fftfreq(shape[-2])[:, None], np.fft.rfftfreq(shape[-1])
    frequency = np.hypot(rows, columns)
    frequency[0, 0] = np.inf
    spectrum = np.fft.rfft2(generator.standard_normal(shape, np.float32)) * frequency**-decay
    fields = np.fft.irfft2(spectrum, shape[-2:]).astype(np.float32)
    fields -= fields.min((-2, -1), keepdims=True)
    return fields / fields.max((-2, -1), keepdims=True)


@corruption(0.20, 0.35, 0.55, 0.80, 1.10)
def fog(images: Images, streams: Streams, density: float) -> Images:
    """Fog: a share ``exp(-depth)`` of each pixel, blended with the colour of the fog.

    The depth is between 0.4 and 1.6 times the ``density``.
    """
    depth = density * (0.4 + 1.2 * _clouds(streams("fog"), images.shape[:3], 1.8)[..., None])
    transmission = np.exp(-depth)
    return transmission * images + (1 - transmission) * np.float32(0.85)


@cache
def _frost_texture() -> np.ndarray:
    """Return a periodic ice texture [512, 512] in [0, 1]: needles along the borders of cells, and a grain."""
    generator = np.random.default_rng(0)
    points = generator.random((700, 2)) * _TEXTURE
    warp = 10 * (_clouds(generator, (2, _TEXTURE, _TEXTURE), 1.3) - 0.5)
    places = (np.indices((_TEXTURE, _TEXTURE)) + warp).reshape(2, -1).T % _TEXTURE
    nearest, _ = cKDTree(points, boxsize=_TEXTURE).query(places, k=2)
    border = np.exp(-(nearest[:, 1] - nearest[:, 0]) / 2.5).reshape(_TEXTURE, _TEXTURE)
    ridges = 1 - np.abs(2 * _clouds(generator, (_TEXTURE, _TEXTURE), 0.9) - 1)
    thickness = _clouds(generator, (_TEXTURE, _TEXTURE), 1.6)
    ice = thickness * (0.55 * border + 0.45 * ridges)
    low, high = np.quantile(ice, [0.05, 0.99])
    return np.clip((ice - low) / (high - low), 0, 1).astype(np.float32)


@corruption((0.95, 0.20), (0.88, 0.32), (0.80, 0.42), (0.72, 0.50), (0.62, 0.60))
def frost(images: Images, streams: Streams, parameter: tuple[float, float]) -> Images:
    """Frost: each image blended with a random crop of the ice texture.

    Args:
        images: [N, H, W, C].
        streams: Random numbers.
        parameter: Weights of image and ice.
    """
    kept, added = parameter
    count, height, width, channels = images.shape
    corners = streams("place").integers(0, _TEXTURE, (count, 2, 1))
    rows, columns = corners[:, 0] + np.arange(height), corners[:, 1] + np.arange(width)
    ice = _frost_texture()[rows[:, :, None] % _TEXTURE, columns[:, None, :] % _TEXTURE, None]
    return kept * images + added * _tinted(ice, (0.86, 0.95, 1.0), channels)


@corruption((2.0, 0.90, 1.0), (1.9, 0.82, 1.2), (1.8, 0.75, 1.4), (1.7, 0.68, 1.7), (1.6, 0.60, 2.0))
def snow(images: Images, streams: Streams, parameter: tuple[float, float, float]) -> Images:
    """Snow: streaks in one direction over a paler image.

    Args:
        images: [N, H, W, C].
        streams: Random numbers.
        parameter: Threshold of a flake in standard deviations, share of the original colour, length of the streaks in
            pixels.
    """
    threshold, kept, length = parameter
    field = ndimage.gaussian_filter(
        streams("flakes").standard_normal((*images.shape[:3], 1), np.float32), (0, 0.5, 0.5, 0), mode="wrap"
    )
    flakes = np.clip(field / field.std((1, 2, 3), keepdims=True) - threshold, 0, 1)
    angles = streams("angle").uniform(np.pi / 4, 3 * np.pi / 4, len(images))
    flakes = smear(flakes, angles, int(np.ceil(2 * length)), length)
    grey = images @ _LUMA[:, None] if images.shape[3] == 3 else images
    pale = kept * images + (1 - kept) * np.maximum(images, 0.5 + grey / 2)
    return pale + np.clip(3 * flakes, 0, 1)


@corruption((1.7, 0.5), (1.4, 0.6), (1.2, 0.65), (0.8, 0.9), (0.5, 0.95))
def spatter(images: Images, streams: Streams, parameter: tuple[float, float]) -> Images:
    """Drops on the lens: water at low severities, mud at high ones.

    Args:
        images: [N, H, W, C].
        streams: Random numbers.
        parameter: Threshold of a drop in standard deviations, opacity.
    """
    threshold, opacity = parameter
    field = ndimage.gaussian_filter(
        streams("drops").standard_normal((*images.shape[:3], 1), np.float32), (0, 1.3, 1.3, 0), mode="wrap"
    )
    drops = opacity * np.clip(3 * (field / field.std((1, 2, 3), keepdims=True) - threshold), 0, 1)
    colour = (0.69, 0.93, 0.93) if threshold >= 1 else (0.25, 0.16, 0.08)
    return (1 - drops) * images + _tinted(drops, colour, images.shape[3])
