"""Untrusted data: npz archives, Parquet and CSV files, folders of images, decisions about labels."""

from __future__ import annotations

import shutil
import struct
import zipfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd
from PIL import Image

from fuzz.common import examples, file_bytes, fitted
from fuzz.drawing import Draw
from ifcomp.data.corrections import carry_out, open_labels, read_decisions, resolve_decisions
from ifcomp.data.sources import SourceOptions, open_source

#: Dtypes in the headers of npy arrays.
KINDS = (
    *map(repr, ("<f4", "<i8", "|u1", "|O", "<U3", "<f2", ">f8", "|b1", "<M8[s]", "|V4", "<c8", "<U0")),
    "[('a', '<f4')]",
)
FORMATS = ("npz", "csv", "parquet", "folder")
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


def csv(data: bytes, folder: Path) -> None:
    """Read a CSV file."""
    path = folder / "data.csv"
    path.write_bytes(data)
    _use(f"csv:{path}")


def csv_seeds() -> Iterable[bytes]:
    """Return tables with different separators, line breaks, labels and quotes."""
    yield b"a,label\n0.5,0\n1.5,1\n"
    yield b'\xef\xbb\xbf"a";label;b\r\n1;x;true\r\n\r\n2;"y;""z""";False'
    yield b"sep=\t\na\tb\n1e5\t-2\n"


def decisions(data: bytes, folder: Path) -> None:
    """Apply decisions to data in every format. The first byte selects the format.

    The corrected file is readable, and the images of a folder are neither lost nor outside of their folders.
    """
    path, kind = folder / "decisions.csv", FORMATS[data[0] % len(FORMATS)] if data else "npz"
    path.write_bytes(data[1:])
    data_path = _correctable(kind, folder / "correctable")
    opened = open_labels(f"{kind}:{data_path}")
    corrections = resolve_decisions(read_decisions(str(path)), opened, str(path))
    out = str(folder / f"out.{'csv' if kind == 'folder' else kind}")
    moves = opened.write(corrections, out)
    if kind != "folder":
        assert open_labels(f"{kind}:{out}").count == opened.count - len(corrections.dropped)
        return
    carry_out(moves)
    parents = {data_path / name for name in ("cat", "dog")} | {Path(f"{data_path}_dropped") / n for n in ("cat", "dog")}
    assert all(move.target.parent in parents and move.target.read_text() == move.source.name for move in moves)


def _correctable(kind: str, folder: Path) -> Path:
    """Write six labelled examples and return their path."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    if kind == "folder":
        for index in range(6):
            image = folder / "images" / ("cat", "dog")[index % 2] / f"{index}.png"
            image.parent.mkdir(parents=True, exist_ok=True)
            image.write_text(image.name)
        return folder / "images"
    path, labels = folder / f"data.{kind}", np.arange(6) % 2
    if kind == "npz":
        np.savez(path, x=np.ones((6, 2)), y=labels, classes=np.array(["cat", "dog"]))
    elif kind == "csv":
        pd.DataFrame({"a": 1.0, "label": np.array(["cat", "dog"])[labels]}).to_csv(path, index=False)
    else:
        pd.DataFrame({"a": 1.0, "label": np.array(["cat", "dog"])[labels]}).to_parquet(path)
    return path


def decisions_seeds() -> Iterable[bytes]:
    """Return decisions for every format."""
    for index in range(len(FORMATS)):
        yield bytes([index]) + b"index,decision,label,given\n0,relabel,dog,cat\n3,drop,,1\n4,keep,,\n"
        yield bytes([index]) + b"\xef\xbb\xbfindex;decision;label\r\n5;relabel;0\r\n1;relabel;../cat\r\n"


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
