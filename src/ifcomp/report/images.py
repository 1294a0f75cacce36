"""Thumbnails of images as data URIs."""

from __future__ import annotations

import base64
import io
import os
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from ifcomp.data.images import open_image
from ifcomp.errors import DataError

#: Longest side of a thumbnail in pixels; smaller images keep their size.
LONGEST_SIDE = 128
#: Images up to this size in pixels are stored losslessly.
LOSSLESS_SIDE = 32
CHANNELS = (1, 3, 4)


def thumbnail(source: Any) -> str:
    """Return a PNG (small images) or WebP thumbnail as a data URI.

    Args:
        source: A path, a Pillow image, or an array [H, W], [H, W, C] or [C, H, W] with 1, 3 or 4 channels. Floats
            are in 0 ... 1; other ranges are rescaled to it. Integers are in 0 ... 255. If the first and the last axis
            could both be channels, the last one is used.

    Raises:
        DataError: If the source is not an image.
    """
    image = _as_image(source)
    if image.mode.startswith(("I", "F")):
        image = Image.fromarray(_as_bytes(np.asarray(image, dtype=np.float64)))
    image = image.convert("RGBA" if image.mode in ("RGBA", "LA", "PA") else "L" if image.mode in ("1", "L") else "RGB")
    image.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    kind = "png" if max(image.size) <= LOSSLESS_SIDE else "webp"
    stream = io.BytesIO()
    image.save(stream, kind, **({"optimize": True} if kind == "png" else {"quality": 80}))
    return f"data:image/{kind};base64,{base64.b64encode(stream.getvalue()).decode()}"


def _as_image(source: Any) -> Image.Image:
    if isinstance(source, Image.Image):
        return source
    if isinstance(source, str | os.PathLike):
        try:
            with open_image(source) as opened:
                opened.draft(opened.mode, (2 * LONGEST_SIDE, 2 * LONGEST_SIDE))
                return ImageOps.exif_transpose(opened)
        except DataError:
            raise
        except Exception as error:  # decoders raise many kinds of exceptions on a damaged file
            raise DataError(f"Cannot show '{os.fspath(source)}' as an image: {error}.") from error
    return Image.fromarray(_as_bytes(_channels_last(np.asarray(source))))


def _channels_last(values: np.ndarray) -> np.ndarray:
    if values.ndim == 3 and values.shape[0] in CHANNELS and values.shape[-1] not in CHANNELS:
        values = np.moveaxis(values, 0, -1)
    if values.ndim == 3 and values.shape[-1] == 1:
        values = values[..., 0]
    if not values.size or not (values.ndim == 2 or (values.ndim == 3 and values.shape[-1] in CHANNELS)):
        raise DataError(
            f"An image must have shape [H, W], [H, W, C] or [C, H, W] with 1, 3 or 4 channels, but has "
            f"{list(values.shape)}."
        )
    return values


def _as_bytes(values: np.ndarray) -> np.ndarray:
    """Convert to 0 ... 255; NaN becomes black."""
    if values.dtype.kind == "b":
        return values.astype(np.uint8) * np.uint8(255)
    if values.dtype.kind in "iu":
        if values.min() < 0 or values.max() > 255:
            raise DataError(
                f"Integer images must be in 0 ... 255, but this one ranges from {values.min()} to {values.max()}. "
                "Use floats in 0 ... 1 instead."
            )
        return values.astype(np.uint8)
    if values.dtype.kind != "f":
        raise DataError(f"An image must be numeric, but its dtype is {values.dtype}.")
    values = np.nan_to_num(values.astype(np.float64), posinf=1.0, neginf=0.0)
    low, high = min(0.0, values.min()), max(1.0, values.max())
    if (low, high) != (0.0, 1.0):
        low, high = values.min(), values.max()
    pixels: np.ndarray = np.rint(255 * (values - low) / ((high - low) or 1.0)).astype(np.uint8)
    return pixels
