"""Untrusted data: npz archives, Parquet files, folders of images."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd
from PIL import Image

from fuzz.common import examples, file_bytes, fitted
from fuzz.drawing import Draw
from ifcomp.data.sources import SourceOptions, open_source

#: Dtypes in the headers of npy arrays.
KINDS = (
    *map(repr, ("<f4", "<i8", "|u1", "|O", "<U3", "<f2", ">f8", "|b1", "<M8[s]", "|V4", "<c8", "<U0")),
    "[('a', '<f4')]",
)
IMAGE_KINDS = (".png", ".jpg", ".bmp", ".gif", ".webp", ".tif", ".ppm")


def _use(spec: str, settings: SourceOptions | None = None) -> None:
    source = open_source(spec, settings)
    for _ in zip(source.batches(), range(2), strict=False):
        pass
    source.preview(range(min(2, len(source))))


def npz(data: bytes, folder: Path) -> None:
    """Read an npz archive. The first byte selects: the bytes are the archive, or describe its arrays."""
    path, draw = folder / "data.npz", Draw(data[1:])
    if data[:1] < b"\x40":
        path.write_bytes(data[1:])
    else:
        with zipfile.ZipFile(path, "w", draw.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as file:
            for name in ("x.npy", "y.npy", "classes.npy")[: draw.number(1, 3)]:
                file.writestr(name, _array(draw))
    _use(f"npz:{path}")


def _array(draw: Draw) -> bytes:
    shape = tuple(draw.choice((0, 1, 2, 3, 6, 2**31, 2**62, -1)) for _ in range(draw.number(0, 5)))
    head = f"{{'descr': {draw.choice(KINDS)}, 'fortran_order': {bool(draw.number(0, 1))}, 'shape': {shape}, }}"
    coded = (head if draw.number(0, 4) else draw.text()).encode("latin1", "replace")
    version = draw.choice((b"\x01\x00", b"\x02\x00", b"\x03\x00", b"\x09\x00"))
    length = struct.pack("<H" if version[0] == 1 else "<I", len(coded))
    return b"\x93NUMPY" + version + length + coded + draw.bytes(draw.number(0, 255))


def npz_seeds() -> Iterable[bytes]:
    """Return archives and descriptions of arrays."""
    x, y = np.ones((3, 4), np.float32), np.arange(3)
    yield b"\x00" + file_bytes(lambda path: np.savez(path, x=x, y=y, classes=np.array(["a", "b"])), ".npz")
    yield b"\x00" + file_bytes(lambda path: np.savez_compressed(path, x=x.astype(np.uint8)), ".npz")
    yield b"\x80" + bytes(range(64))


def parquet(data: bytes, folder: Path) -> None:
    """Read a Parquet file."""
    path = folder / "data.parquet"
    path.write_bytes(data)
    _use(f"parquet:{path}")


def parquet_seeds() -> Iterable[bytes]:
    """Return tables of features and a table of scores."""
    tables = (
        pd.DataFrame({"a": [0.5, 1.5], "label": [0, 1]}),
        pd.DataFrame({"a": [[1, 2], [3, 4]], "label": ["x", "y"]}),
        pd.DataFrame({"label": pd.Categorical(["x", "y"]), "b": [1.0, 2.0]}),
    )
    for table in tables:
        yield file_bytes(lambda path, table=table: table.to_parquet(path, compression=None))
    yield file_bytes(fitted().score([examples()], progress=False).to_parquet)


def folder_of_images(data: bytes, folder: Path) -> None:
    """Read an image from a folder. The first byte selects the suffix of the file."""
    images = folder / "images"
    images.mkdir(exist_ok=True)
    for old in images.iterdir():
        old.unlink()
    suffix = IMAGE_KINDS[data[0] % len(IMAGE_KINDS)] if data else ".png"
    (images / f"1{suffix}").write_bytes(data[1:])
    _use(f"folder:{images}", SourceOptions(image_size=4))


def image_seeds() -> Iterable[bytes]:
    """Return images in every format."""
    image = Image.fromarray(np.arange(27, dtype=np.uint8).reshape(3, 3, 3))
    for index, suffix in enumerate(IMAGE_KINDS):
        for mode in ("RGB", "L") if suffix in (".jpg", ".ppm") else ("RGB", "L", "P"):
            yield bytes([index]) + file_bytes(image.convert(mode).save, suffix)
