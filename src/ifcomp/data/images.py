"""Image files of others, opened without trust."""

from __future__ import annotations

import os
import warnings

from PIL import Image, UnidentifiedImageError

from ifcomp.errors import DataError
from ifcomp.io.untrusted import regular_file

#: Formats that Pillow decodes itself; others may start programs.
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")


def open_image(path: str | os.PathLike[str]) -> Image.Image:
    """An image of which only the head is read; close it after use.

    Raises:
        DataError: If it is none, or claims more pixels than Pillow's ``MAX_IMAGE_PIXELS``.
    """
    shown = os.fspath(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            warnings.simplefilter("ignore", UserWarning)  # about damaged metadata, which nobody reads
            return Image.open(regular_file(path), formats=FORMATS)
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise DataError(f"'{shown}' is refused: it would take far too much memory ({error}).") from error
    except UnidentifiedImageError as error:
        raise DataError(f"Cannot read '{shown}' as an image. Formats are {', '.join(FORMATS)}.") from error
    except Exception as error:  # decoders raise whatever a damaged file makes them stumble over
        raise DataError(f"Cannot read '{shown}' as an image ({error}). Formats are {', '.join(FORMATS)}.") from error


def convert_image(image: Image.Image, mode: str, path: str | os.PathLike[str]) -> Image.Image:
    """All pixels of an opened image in another mode.

    Raises:
        DataError: If the file is damaged.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            transparent = "transparency" in image.info and mode != "RGBA"
            return image.convert("RGBA").convert(mode) if transparent else image.convert(mode)
    except Exception as error:  # as above
        raise DataError(f"Cannot decode '{os.fspath(path)}' ({error}). Is the file damaged?") from error
