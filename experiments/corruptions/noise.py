"""Pixel noise: Gaussian, shot, impulse and speckle."""

from __future__ import annotations

import numpy as np

from experiments.corruptions.registry import Images, Streams, corruption


@corruption(0.04, 0.06, 0.08, 0.09, 0.10)
def gaussian_noise(images: Images, streams: Streams, sigma: float) -> Images:
    """Add independent Gaussian noise of standard deviation ``sigma``."""
    return images + sigma * streams("noise").standard_normal(images.shape, np.float32)


@corruption(500, 250, 100, 75, 50)
def shot_noise(images: Images, streams: Streams, photons: int) -> Images:
    """Poisson noise; white has ``photons`` photons on average."""
    return streams("noise").poisson(images * photons) / photons


@corruption(0.01, 0.02, 0.03, 0.05, 0.07)
def impulse_noise(images: Images, streams: Streams, share: float) -> Images:
    """Salt and pepper: set a ``share`` of all values to 0 or 1."""
    place = streams("place").random(images.shape, np.float32)
    return np.where(place < share, place < share / 2, images)


@corruption(0.06, 0.10, 0.12, 0.16, 0.20)
def speckle_noise(images: Images, streams: Streams, sigma: float) -> Images:
    """Add Gaussian noise in proportion to the value."""
    return images * (1 + sigma * streams("noise").standard_normal(images.shape, np.float32))
