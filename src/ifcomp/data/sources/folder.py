"""``folder:DIR``: images in one subfolder per class, or images without labels."""

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

from ifcomp.data.images import convert_image, open_image
from ifcomp.data.sources.arrays import ChannelNormalization
from ifcomp.data.sources.base import IndexedBatches, Source, SourceRequest
from ifcomp.data.sources.options import SourceOptions
from ifcomp.data.sources.previews import printable
from ifcomp.errors import DataError, EmptyDataError, MemoryLimitError
from ifcomp.memory import as_text, available
from ifcomp.progress import track

if TYPE_CHECKING:
    from ifcomp.report import Preview

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm"})

#: Modes of Pillow with at most 8 bits per channel.
SUPPORTED_MODES = frozenset({"1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr"})

#: Longer side of a preview in pixels.
PREVIEW_SIZE = 128

#: Number of images from which a progress bar is shown while their headers are read.
_PROGRESS_IMAGES = 5000


def open_folder(request: SourceRequest) -> Source:
    """Open images in class subfolders, sorted by path. Without subfolders the images have no labels.

    Inputs are float32 [N, 3, H, W], or [N, 1, H, W] with ``grey``, with values in 0 ... 1 before normalisation. The
    classes are the known class names, or the sorted names of the subfolders.

    Raises:
        DataError: If a link leads out of the folder, or an image cannot be used.
        MemoryLimitError: If one batch does not fit in memory.
    """
    path, options = request.path, request.options
    root = check_folder(path)
    files = find_images(root)
    names = [printable(file) for file in files]
    labels, class_names = class_labels(path, names, request.class_names)
    height, width = _image_size(root, files, options)
    _check_memory(path, height, width, options)
    normalize = ChannelNormalization.from_options(options, (1 if options.grey else 3, height, width), request.spec)

    def fetch(start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        pixels = np.stack([_read_pixels(root / file, options) for file in files[start:stop]])
        x = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255
        return normalize(x), None if labels is None else labels[start:stop]

    def previews(indices: Sequence[int]) -> list[Preview]:
        from ifcomp.report import Preview

        return [Preview("image", _thumbnail(root / files[index]), names[index]) for index in indices]

    batches = IndexedBatches(fetch, len(files), options.batch_size_or_default)
    return Source(request.spec, batches, previews, labels, class_names, tuple(names))


def check_folder(path: str) -> Path:
    """Return the path of a folder.

    Raises:
        DataError: If it is missing or a file.
    """
    root = Path(path)
    try:
        is_folder = stat.S_ISDIR(root.stat().st_mode)
    except (OSError, ValueError) as error:
        raise DataError(f"There is no folder '{path}' that can be read ({error}).") from error
    if not is_folder:
        raise DataError(f"'{path}' is a file, not a folder.")
    return root


def find_images(root: Path) -> list[str]:
    """Return the sorted paths of the images relative to the folder. Hidden files and folders are skipped."""
    resolved_root = os.path.realpath(root)
    paths = []
    for parent, folders, files in os.walk(root, onerror=_raise_unreadable):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in folders:
            if (Path(parent) / name).is_symlink():
                raise DataError(f"'{Path(parent) / name}' is a link to a folder. Links to folders are not followed.")
        for name in files:
            file = Path(parent) / name
            if name.startswith(".") or file.suffix.lower() not in SUFFIXES:
                continue
            if file.is_symlink() and not Path(os.path.realpath(file)).is_relative_to(resolved_root):
                raise DataError(f"'{file}' is a link that leads out of '{root}'. Copy the image into the folder.")
            paths.append(file.relative_to(root).as_posix())
    if not paths:
        raise EmptyDataError(f"There are no images in '{root}': expected files such as {root / 'class-a' / '1.png'}.")
    return sorted(paths, key=lambda path: path.split("/"))


def _raise_unreadable(error: OSError) -> NoReturn:
    raise DataError(f"Cannot read the folder '{error.filename}' ({error.strerror}).") from error


def class_labels(
    path: str, names: Sequence[str], known_classes: tuple[str, ...] | None
) -> tuple[Tensor | None, tuple[str, ...] | None]:
    """Return labels [N] and class names; None and None if there are no subfolders."""
    subfolders = sorted({name.split("/")[0] for name in names if "/" in name})
    if not subfolders:
        return None, None
    outside = next((name for name in names if "/" not in name), None)
    if outside is not None:
        raise DataError(f"'{path}' has class subfolders, but '{outside}' is in none of them. Move it into one.")
    class_names = known_classes or tuple(subfolders)
    unknown = [name for name in subfolders if name not in class_names]
    if unknown:
        raise DataError(
            f"'{path}' has subfolders that are not classes of the fit: {', '.join(unknown)}. "
            f"Its classes are {', '.join(class_names)}."
        )
    return torch.tensor([class_names.index(name.split("/")[0]) for name in names]), class_names


def _image_size(root: Path, files: Sequence[str], options: SourceOptions) -> tuple[int, int]:
    """Return the common height and width of all images, from their headers."""
    sizes: dict[tuple[int, int], str] = {}
    for file in track(files, "reading image headers") if len(files) > _PROGRESS_IMAGES else files:
        with _open_supported(root / file) as image:
            sizes.setdefault((image.height, image.width), file)
    if options.image_size is not None:
        return options.image_size, options.image_size
    if len(sizes) > 1:
        ((height, width), first), ((other_height, other_width), second) = list(sizes.items())[:2]
        raise DataError(
            f"Images in '{root}' have different sizes: '{first}' has {width}x{height} pixels, "
            f"'{second}' {other_width}x{other_height}. Give --image-size."
        )
    return next(iter(sizes))


def _check_memory(path: str, height: int, width: int, options: SourceOptions) -> None:
    """Raise MemoryLimitError if one batch of images in float32 exceeds the available memory."""
    batch_size = options.batch_size_or_default
    needed, free = batch_size * height * width * 3 * 4, available(torch.device("cpu"))
    if free is not None and needed > free:
        raise MemoryLimitError(
            f"A batch of {batch_size} images of '{path}', {width}x{height} pixels each, takes {as_text(needed)}, but "
            f"only {as_text(free)} are available. Give --image-size or a smaller --batch-size."
        )


def _open_supported(path: Path) -> Image.Image:
    """Open an image, read its header only, and check its mode."""
    image = open_image(path)
    if image.mode not in SUPPORTED_MODES:
        image.close()
        raise DataError(
            f"'{path}' has pixels of mode '{image.mode}', but at most 8 bits per channel are supported. Convert it, or "
            "load the data with your own function: package.module:factory."
        )
    return image


def _decode(path: Path, mode: str) -> Image.Image:
    with _open_supported(path) as image:
        return convert_image(image, mode, path)


def _read_pixels(path: Path, options: SourceOptions) -> NDArray[np.uint8]:
    """Return the pixels [H, W, C]."""
    image = _decode(path, "L" if options.grey else "RGB")
    if options.image_size is not None:
        image = image.resize((options.image_size, options.image_size), Image.Resampling.BILINEAR)
    pixels = np.array(image)
    return pixels if pixels.ndim == 3 else pixels[:, :, None]


def _thumbnail(path: Path) -> Image.Image:
    image = _decode(path, "RGB")
    image.thumbnail((PREVIEW_SIZE, PREVIEW_SIZE))
    return image
