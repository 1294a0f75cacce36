"""Brightness, contrast, saturation, JPEG compression, pixelation and elastic transforms."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image
from scipy import ndimage
from skimage import color

from experiments.corruptions.registry import Images, Streams, corruption
from experiments.corruptions.sampling import positions, sample


@corruption(0.05, 0.10, 0.15, 0.20, 0.30)
def brightness(images: Images, streams: Streams, amount: float) -> Images:
    """Add ``amount`` to the value of HSV, or to grey."""
    if images.shape[3] == 1:
        return images + amount
    hsv = color.rgb2hsv(images)
    hsv[..., 2] = np.clip(hsv[..., 2] + amount, 0, 1)
    return color.hsv2rgb(hsv)


@corruption(0.75, 0.50, 0.40, 0.30, 0.15)
def contrast(images: Images, streams: Streams, share: float) -> Images:
    """Reduce the distance from the mean colour of each image to a ``share``."""
    mean = images.mean((1, 2), keepdims=True)
    return mean + share * (images - mean)


@corruption(1.2, 1.5, 1.9, 2.4, 3.0)
def saturate(images: Images, streams: Streams, gain: float) -> Images:
    """Multiply the saturation of HSV by ``gain``; grey images are multiplied by ``gain`` instead."""
    if images.shape[3] == 1:
        return images * gain
    hsv = color.rgb2hsv(images)
    hsv[..., 1] = np.clip(hsv[..., 1] * gain, 0, 1)
    return color.hsv2rgb(hsv)


@corruption(80, 65, 58, 50, 40)
def jpeg_compression(images: Images, streams: Streams, quality: int) -> Images:
    """Encode and decode as JPEG of the given ``quality``."""
    coded = np.empty(images.shape, np.float32)
    for index, pixels in enumerate(np.rint(images * 255).astype(np.uint8)):
        stream = io.BytesIO()
        Image.fromarray(pixels.squeeze()).save(stream, "JPEG", quality=quality)
        coded[index] = np.asarray(Image.open(stream)).reshape(pixels.shape)
    return coded / 255


@corruption(0.9, 0.8, 0.7, 0.6, 0.45)
def pixelate(images: Images, streams: Streams, share: float) -> Images:
    """Reduce the resolution to a ``share`` of rows and columns by area averaging."""
    height, width = (_coarse(length, int(length * share)) for length in images.shape[1:3])
    by_channel = np.moveaxis(images, 3, 1)
    return np.moveaxis(height @ by_channel @ width.T, 1, 3)  # per image, so rounding does not depend on N


def _coarse(length: int, cells: int) -> np.ndarray:
    """Return the matrix [length, length] that replaces each pixel by the mean over the cell at its centre."""
    edges = np.linspace(0, length, cells + 1)
    pixels = np.arange(length)
    overlap = np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)
    means = np.clip(overlap, 0, None) * cells / length
    return means[((pixels + 0.5) * cells / length).astype(int)].astype(np.float32)


@corruption((0.50, 2.5), (0.70, 2.5), (0.95, 2.4), (1.20, 2.3), (1.50, 2.2))
def elastic_transform(images: Images, streams: Streams, parameter: tuple[float, float]) -> Images:
    """Displace pixels by a smooth random field.

    Args:
        images: [N, H, W, C].
        streams: Random numbers.
        parameter: Standard deviation of the displacement and of its smoothing, in pixels.
    """
    strength, smoothness = parameter
    fields = streams("field").standard_normal((len(images), 2, *images.shape[1:3]), np.float32)
    fields = ndimage.gaussian_filter(fields, (0, 0, smoothness, smoothness), mode="reflect")
    fields *= strength / fields.std((1, 2, 3), keepdims=True)
    rows, columns = positions(images)
    return sample(images, rows + fields[:, 0], columns + fields[:, 1])
