"""Folders of images: one subfolder a class, or images without labels."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from ifcomp.data.arrays import channel_shift
from ifcomp.data.images import convert_image, open_image
from ifcomp.data.source import Batches, Source, SourceOptions, readable
from ifcomp.errors import DataError, EmptyDataError, MemoryLimitError
from ifcomp.memory import as_text, available
from ifcomp.progress import track

if TYPE_CHECKING:
    from ifcomp.report import Preview

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm"})

#: Pixels with 8 bits a channel, which is what networks are fed with.
MODES = frozenset({"1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr"})

#: Longer side of a preview in pixels.
PREVIEW_SIZE = 128


def folder(spec: str, path: str, options: SourceOptions, class_names: Sequence[str] | None = None) -> Source:
    """Images in class subfolders, in the order of their paths; without subfolders, images without labels.

    Pixels are scaled to 0 ... 1, [N, 3, H, W], or [N, 1, H, W] with ``grey``.

    Args:
        spec: What was typed.
        path: The folder.
        options: Size, channels and normalisation.
        class_names: Names of the classes 0 ... K-1 where they are known; else the sorted names of the subfolders.

    Raises:
        DataError: If links lead out of the folder, or an image cannot be used; the message says which.
    """
    root = Path(path)
    try:
        is_folder = stat.S_ISDIR(root.stat().st_mode)
    except (OSError, ValueError) as error:
        raise DataError(f"There is no folder '{path}' that can be looked into ({error}).") from error
    if not is_folder:
        raise DataError(f"'{path}' is a file, not a folder.")
    found = _images(root)
    shown = [readable(name) for name in found]
    subfolders = sorted({name.split("/")[0] for name in shown if "/" in name})
    if subfolders and len(found) != sum("/" in name for name in found):
        loose = next(name for name in shown if "/" not in name)
        raise DataError(f"'{path}' has class subfolders, but '{loose}' is in none of them. Move it into one.")
    names = _class_names(path, subfolders, class_names) if subfolders else None
    labels = None if names is None else torch.tensor([names.index(name.split("/")[0]) for name in shown])
    size = _common_size(root, found, options)
    _check_memory(path, size, options)
    shift = channel_shift(options, (1 if options.grey else 3, *size), spec)

    def fetch(start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        pixels = np.stack([_pixels(root / name, options) for name in found[start:stop]])
        x = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255
        return shift(x), None if labels is None else labels[start:stop]

    def previews(indices: Sequence[int]) -> list[Preview]:
        from ifcomp.report import Preview

        return [Preview("image", _thumbnail(root / found[index]), shown[index]) for index in indices]

    batches = Batches(fetch, len(found), options.examples_at_once)
    return Source(spec, batches, previews, labels, names, tuple(shown))


def _images(root: Path) -> list[str]:
    """Paths of the images within the folder, sorted, with slashes; hidden files and folders are left out."""
    home = root.resolve()
    found = []
    for where, folders, files in os.walk(root, onerror=_refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in folders:
            if (Path(where) / name).is_symlink():
                raise DataError(f"'{Path(where) / name}' is a link to a folder. Links to folders are not followed.")
        for name in files:
            file = Path(where) / name
            if name.startswith(".") or file.suffix.lower() not in SUFFIXES:
                continue
            if file.is_symlink() and not file.resolve().is_relative_to(home):
                raise DataError(f"'{file}' is a link that leads out of '{root}'. Copy the image into the folder.")
            found.append(file.relative_to(root).as_posix())
    if not found:
        raise EmptyDataError(f"There are no images in '{root}': expected files such as {root / 'class-a' / '1.png'}.")
    return sorted(found, key=lambda name: name.split("/"))


def _refuse(error: OSError) -> NoReturn:
    raise DataError(f"Cannot look into the folder '{error.filename}' ({error.strerror}).") from error


def _class_names(path: str, subfolders: Sequence[str], known: Sequence[str] | None) -> tuple[str, ...]:
    unknown = sorted(set(subfolders) - set(known or subfolders))
    if unknown:
        raise DataError(
            f"'{path}' has subfolders that are no classes of the fit: {', '.join(unknown)}. "
            f"Its classes are {', '.join(known or ())}."
        )
    return tuple(known or subfolders)


def _common_size(root: Path, names: Sequence[str], options: SourceOptions) -> tuple[int, int]:
    """Height and width of all images, after a look at the head of every file."""
    sizes: dict[tuple[int, int], str] = {}
    for name in track(names, "looking at images") if len(names) > 5000 else names:
        with _opened(root / name) as image:
            sizes.setdefault((image.height, image.width), name)
    if options.image_size is not None:
        return options.image_size, options.image_size
    if len(sizes) > 1:
        (one, first), (other, second) = list(sizes.items())[:2]
        raise DataError(
            f"Images in '{root}' have different sizes: '{first}' has {one[1]}x{one[0]} pixels, "
            f"'{second}' {other[1]}x{other[0]}. Give --image-size."
        )
    return next(iter(sizes))


def _check_memory(path: str, size: tuple[int, int], options: SourceOptions) -> None:
    """Raise MemoryLimitError if one batch of images, as float32, is more than the machine has room for."""
    needed, there = options.examples_at_once * size[0] * size[1] * 3 * 4, available(torch.device("cpu"))
    if there is not None and needed > there:
        raise MemoryLimitError(
            f"A batch of {options.examples_at_once} images of '{path}', {size[1]}x{size[0]} pixels each, takes "
            f"{as_text(needed)}, but there are only {as_text(there)}. Give --image-size or a smaller --batch-size."
        )


def _opened(path: Path) -> Image.Image:
    """An image of which only the head is read, if it is of a kind and size that can be used."""
    image = open_image(path)
    if image.mode not in MODES:
        image.close()
        raise DataError(
            f"'{path}' has pixels of mode '{image.mode}', but 8 bits a channel are needed. Convert it, or load the "
            "data with a function of your own: package.module:factory."
        )
    return image


def _decoded(path: Path, mode: str) -> Image.Image:
    with _opened(path) as image:
        return convert_image(image, mode, path)


def _pixels(path: Path, options: SourceOptions) -> NDArray[np.uint8]:
    """[H, W, C]."""
    image = _decoded(path, "L" if options.grey else "RGB")
    if options.image_size is not None:
        image = image.resize((options.image_size, options.image_size), Image.Resampling.BILINEAR)
    pixels = np.array(image)
    return pixels if pixels.ndim == 3 else pixels[:, :, None]


def _thumbnail(path: Path) -> Image.Image:
    image = _decoded(path, "RGB")
    image.thumbnail((PREVIEW_SIZE, PREVIEW_SIZE))
    return image
