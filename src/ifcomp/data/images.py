"""Image files of others, decoded safely."""

from __future__ import annotations

import os
import warnings

from PIL import Image, UnidentifiedImageError

from ifcomp.errors import DataError
from ifcomp.io.untrusted import regular_file

#: Formats that Pillow decodes itself. Other formats may start external programs.
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")


def open_image(path: str | os.PathLike[str]) -> Image.Image:
    """Open an image and read its header only. The caller closes it.

    Raises:
        DataError: If the file is not an image, or has more pixels than Pillow's ``MAX_IMAGE_PIXELS``.
    """
    name = os.fspath(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            warnings.simplefilter("ignore", UserWarning)  # about damaged metadata, which is not used
            return Image.open(regular_file(path), formats=FORMATS)
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise DataError(f"'{name}' is refused: it would take far too much memory ({error}).") from error
    except UnidentifiedImageError as error:
        raise DataError(f"Cannot read '{name}' as an image. Formats are {', '.join(FORMATS)}.") from error
    except Exception as error:  # decoders of damaged files raise errors of many types
        raise DataError(f"Cannot read '{name}' as an image ({error}). Formats are {', '.join(FORMATS)}.") from error


def convert_image(image: Image.Image, mode: str, path: str | os.PathLike[str]) -> Image.Image:
    """Decode an opened image and convert it to another mode.

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
