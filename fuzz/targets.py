"""What is fuzzed: each target takes bytes and a scratch folder, and may raise the library's own errors only."""

from __future__ import annotations

import io
import json
import os
import struct
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save
from torch import nn

from fuzz import networks
from fuzz.drawing import Draw, as_json
from ifcomp import IFComp
from ifcomp.baselines.swag import WeightMoments
from ifcomp.cli import options
from ifcomp.cli.models import _fill, read_weights
from ifcomp.cli.opened import _stored_options
from ifcomp.cli.runs import Record, read_record, record_path
from ifcomp.memory import as_bytes
from ifcomp.oracle.pairs import Pair, PairFile
from ifcomp.report import Preview, build_report
from ifcomp.sources import SourceOptions, open_source
from ifcomp.sources.factories import is_factory
from ifcomp.sources.opening import kind_of


@dataclass(frozen=True)
class Target:
    """One thing that is fuzzed.

    Attributes:
        run: Takes the bytes and a folder to write in.
        seeds: Bytes to start from.
        inputs: How many a full run makes.
        longest: Bytes of an input at most.
    """

    run: Callable[[bytes, Path], None]
    seeds: Callable[[], Iterable[bytes]]
    inputs: int
    longest: int = 4096


@cache
def model() -> nn.Module:
    """A classifier of [B, 4] with three classes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.BatchNorm1d(5), nn.Linear(5, 3)).eval()


@cache
def _data() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(1)), torch.arange(6) % 3


def _file(write: Callable[[str], object], suffix: str = "") -> bytes:
    """What a function writes to a path."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, f"file{suffix}")
        write(path)
        return Path(path).read_bytes()


# Files of a fit ------------------------------------------------------------------------------------------------------


@cache
def _fitted_file() -> bytes:
    return _file(lambda path: IFComp(model()).fit([_data()], progress=False).save(path))


def factors(data: bytes, folder: Path) -> None:
    """A file of factors, as it comes."""
    path = folder / "run.ifcomp"
    path.write_bytes(data)
    IFComp.load(path, model())


@cache
def _fitted_parts() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    with open_bytes(_fitted_file()) as file:
        return json.loads(file.metadata()["ifcomp"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


class open_bytes:  # noqa: N801  (as safe_open is called)
    """`safe_open` for bytes."""

    def __init__(self, content: bytes) -> None:
        import tempfile

        self._scratch = tempfile.NamedTemporaryFile()  # noqa: SIM115  (closed on exit)
        self._scratch.write(content)
        self._scratch.flush()

    def __enter__(self) -> Any:
        self._file = safe_open(self._scratch.name, framework="pt")
        return self._file.__enter__()

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)
        self._scratch.close()


def _damaged_tensors(draw: Draw, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = dict(tensors)
    for _ in range(draw.number(0, 2)):
        name = draw.choice(list(found) or ["none"])
        value = found.get(name, torch.ones(2, 2))
        match draw.number(0, 6):
            case 0:
                found.pop(name, None)
            case 1:
                found[draw.text().encode("utf-8", "replace").decode()] = value.clone()
            case 2:
                kinds = ("float64", "float16", "int64", "bool", "float8_e5m2", "complex64", "uint8", "bfloat16")
                found[name] = value.to(getattr(torch, draw.choice(kinds)))
            case 3:
                value = value.clone()
                if value.numel() and value.is_floating_point():
                    numbers = (float("nan"), float("inf"), -1.0, 3e38, 0.0, 1e-45)
                    value.view(-1)[draw.number(0, 255) % value.numel()] = draw.choice(numbers)
                found[name] = value
            case 4:
                found[name] = value.reshape(-1).clone()
            case _:
                found[name] = torch.ones([draw.number(0, 6) for _ in range(draw.number(0, 4))])
    return found


def factors_content(data: bytes, folder: Path) -> None:
    """A well-formed file with wrong content."""
    draw = Draw(data)
    metadata, tensors = _fitted_parts()
    for _ in range(draw.number(0, 3)):
        metadata = draw.damaged(metadata)
    path = folder / "run.ifcomp"
    path.write_bytes(save(_damaged_tensors(draw, tensors), {"ifcomp": as_json(metadata)}))
    loaded = IFComp.load(path, model())
    assert torch.isfinite(loaded.influence(_data()[0])).all()


def header(data: bytes, folder: Path) -> None:
    """A safetensors file whose header lies."""
    draw, content = Draw(data), save(dict(model().state_dict()), {"note": "x"})
    length = struct.unpack("<Q", content[:8])[0]
    head = json.loads(content[8 : 8 + length])
    for _ in range(draw.number(1, 3)):
        head = draw.damaged(head)
    text = as_json(head).encode("utf-8", "replace")
    stated = len(text) if draw.number(0, 3) else draw.choice((0, 1, 2**31, 2**63, 2**64 - 1, len(text) - 1))
    path = folder / "net.safetensors"
    path.write_bytes(struct.pack("<Q", stated) + text + content[8 + length :])
    _fill(networks.network(b""), read_weights(str(path)), "a:b", str(path))


def weights(data: bytes, folder: Path) -> None:
    """A checkpoint, as it comes: the first byte says of which kind."""
    path = folder / ("net.safetensors" if data[:1] < b"\x80" else "net.pt")
    path.write_bytes(data[1:])
    _fill(networks.network(b""), read_weights(str(path)), "a:b", str(path))


def torch_pickle(data: bytes, folder: Path) -> None:
    """A zip file of torch.save with any program for the unpickler inside."""
    path = folder / "net.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED if data[:1] > b"\xf0" else zipfile.ZIP_STORED) as file:
        file.writestr("net/data.pkl", data[1:])
        file.writestr("net/version", "3\n")
        file.writestr("net/byteorder", "little")
        file.writestr("net/data/0", bytes(range(64)))
    _fill(networks.network(b""), read_weights(str(path)), "a:b", str(path))


def _weights_seeds() -> Iterable[bytes]:
    state = networks.network(b"").state_dict()
    yield b"\x00" + save(dict(state))
    yield b"\xff" + _file(lambda path: torch.save(state, path), ".pt")
    yield b"\xff" + _file(lambda path: torch.save({"state_dict": state, "epoch": 1}, path), ".pt")
    yield b"\xff" + _file(lambda path: torch.save(state, path, _use_new_zipfile_serialization=False), ".pt")


def _pickle_seeds() -> Iterable[bytes]:
    for kind in ({}, {"state_dict": networks.network(b"").state_dict()}, {"a": torch.nn.Parameter(torch.ones(2, 2))}):
        with zipfile.ZipFile(io.BytesIO(_file(lambda path, kind=kind: torch.save(kind, path), ".pt"))) as file:
            yield b"\x00" + file.read(next(name for name in file.namelist() if name.endswith("data.pkl")))


def moments(data: bytes, folder: Path) -> None:
    """A file of weight moments: the first byte says whether only its content is wrong."""
    path, draw = folder / "moments.safetensors", Draw(data[1:])
    if data[:1] < b"\x80":
        path.write_bytes(data[1:])
    else:
        collected = WeightMoments().collect(model())
        tensors = {f"{part}{name}": value for name, value in collected.mean.items() for part in ("mean/", "variance/")}
        metadata = draw.damaged({"count": 2})
        path.write_bytes(save(_damaged_tensors(draw, tensors), {"ifcomp.swag": as_json(metadata)}))
    loaded = WeightMoments.load(path)
    loaded.check(model())
    assert all(bool(value.isfinite().all()) for value in loaded.sample(0).values())


def record(data: bytes, folder: Path) -> None:
    """The record beside a run: the first byte says whether it is JSON."""
    path, draw = folder / "run.ifcomp", Draw(data[1:])
    content = {"schema": 1, "version": "1", **vars(Record("a:b", "w", "npz:x", {"mean": [0.5]}, ["a", "b"], 3, 0.5))}
    text = as_json(draw.damaged(draw.damaged(content))).encode() if data[:1] >= b"\x40" else data[1:]
    Path(record_path(str(path))).write_bytes(text)
    found = read_record(str(path))
    assert found is not None
    assert not found.is_own
    _stored_options(found)


def pairs(data: bytes, folder: Path) -> None:
    """Results of hindsight training: the first byte says whether they are JSON."""
    path, draw = folder / "pairs.jsonl", Draw(data[1:])
    line = {"key": "k", "label": 1, **vars(Pair(-1.0, -2.0, 3, True, 0.1, 0.2))}
    path.write_bytes(as_json(draw.damaged(draw.damaged(line))).encode() if data[:1] >= b"\x40" else data[1:])
    PairFile(path)


# Data ----------------------------------------------------------------------------------------------------------------


def _use(spec: str, settings: SourceOptions | None = None) -> None:
    source = open_source(spec, settings)
    for _ in zip(source.batches(), range(2), strict=False):
        pass
    source.preview(range(min(2, len(source))))


def npz(data: bytes, folder: Path) -> None:
    """An archive of arrays: the first byte says whether it is a whole archive or the arrays in one."""
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
    kind = draw.choice(("<f4", "<i8", "|u1", "|O", "<U3", "<f2", ">f8", "|b1", "<M8[s]", "|V4", "<c8", "<U0", "[('a','<f4')]"))
    head = f"{{'descr': {kind if kind[0] == '[' else repr(kind)}, 'fortran_order': {bool(draw.number(0, 1))}, 'shape': {shape}, }}"
    if not draw.number(0, 4):
        head = draw.text()
    coded = head.encode("latin1", "replace")
    version = draw.choice((b"\x01\x00", b"\x02\x00", b"\x03\x00", b"\x09\x00"))
    length = struct.pack("<H" if version[0] == 1 else "<I", len(coded))
    return b"\x93NUMPY" + version + length + coded + draw.bytes(draw.number(0, 255))


def _npz_seeds() -> Iterable[bytes]:
    x, y = np.ones((3, 4), np.float32), np.arange(3)
    yield b"\x00" + _file(lambda path: np.savez(path, x=x, y=y, classes=np.array(["a", "b"])), ".npz")
    yield b"\x00" + _file(lambda path: np.savez_compressed(path, x=x.astype(np.uint8)), ".npz")
    yield b"\x80" + bytes(range(64))


def parquet(data: bytes, folder: Path) -> None:
    """A table."""
    path = folder / "data.parquet"
    path.write_bytes(data)
    _use(f"parquet:{path}")


def _parquet_seeds() -> Iterable[bytes]:
    for columns in (
        {"a": [0.5, 1.5], "label": [0, 1]},
        {"a": [[1, 2], [3, 4]], "label": ["x", "y"]},
        {"a": pd.Categorical(["x", "y"]), "b": [1.0, 2.0]},
    ):
        yield _file(lambda path, columns=columns: pd.DataFrame(columns).to_parquet(path, compression=None))
    yield _file(IFComp(model()).fit([_data()], progress=False).score([_data()], progress=False).to_parquet)


IMAGE_KINDS = (".png", ".jpg", ".bmp", ".gif", ".webp", ".tif", ".ppm")


def folder_of_images(data: bytes, folder: Path) -> None:
    """An image in a folder: the first byte says how its name ends."""
    place = folder / "images"
    place.mkdir(exist_ok=True)
    for old in place.iterdir():
        old.unlink()
    suffix = IMAGE_KINDS[data[0] % len(IMAGE_KINDS)] if data else ".png"
    (place / f"1{suffix}").write_bytes(data[1:])
    _use(f"folder:{place}", SourceOptions(image_size=4))


def _image_seeds() -> Iterable[bytes]:
    pixels = np.arange(27, dtype=np.uint8).reshape(3, 3, 3)
    for number, suffix in enumerate(IMAGE_KINDS):
        for mode in ("RGB", "L", "P"):
            image = Image.fromarray(pixels).convert("L" if suffix == ".ppm" and mode == "P" else mode)
            if suffix == ".jpg" and mode == "P":
                continue
            yield bytes([number]) + _file(image.save, suffix)


# Words ---------------------------------------------------------------------------------------------------------------


def words(data: bytes, folder: Path) -> None:
    """Everything that the command line parses: the first byte says what the rest is taken for."""
    text = data[1:].decode("utf-8", "surrogateescape")
    kinds: tuple[Callable[[str], object], ...] = (
        lambda text: options.damping(text),
        lambda text: as_bytes(text),
        lambda text: SourceOptions(mean=options.numbers("--mean", text), std=options.numbers("--std", text)),
        lambda text: IFComp(model(), layers=options.layers(text)).coverage,
        lambda text: is_factory(text) or kind_of(text),
        lambda text: is_factory(text) or open_source(text),
        lambda text: open_source(f"npz:{text}"),
        lambda text: open_source(f"parquet:{text}"),
        lambda text: open_source(f"folder:{folder}/none{text}"),
        lambda text: read_weights(text),
        lambda text: IFComp.load(text, model()),
        lambda text: DATA_CHOICE(text),
    )
    kinds[(data[0] if data else 0) % len(kinds)](text)


def DATA_CHOICE(text: str) -> object:  # noqa: N802  (stands among constants)
    """Class names, columns and channels of data that is there."""
    return open_source("digits", options.DataChoice(mean=text, std=text).parsed(), class_names=options.names(text))


def report(data: bytes, folder: Path) -> None:
    """A page with hostile names keeps the elements of one with harmless names."""
    from html.parser import HTMLParser

    draw = Draw(data)
    texts = [draw.text() for _ in range(6)]

    class Elements(HTMLParser):
        def __init__(self, page: str) -> None:
            super().__init__()
            self.found: list[tuple[str, list[str]]] = []
            self.feed(page)

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            self.found.append((tag, [name for name, _ in attrs]))

    pages = []
    for names in (texts, ["a", "b", "c", "d", "e", "f"]):
        path = build_report(
            folder / "report.html",
            title=names[0],
            audit=_audit(),
            previews={0: Preview("text", names[1], names[2]), 1: Preview("row", {names[3]: names[1]}, names[0])},
            class_names=[names[4], names[5], names[1]],
            provenance={"k" + names[3]: names[2]},
        )
        pages.append(Elements(path.read_text(encoding="utf-8")).found)
    assert pages[0] == pages[1]


@cache
def _audit() -> Any:
    from ifcomp.tasks.mislabel import audit_labels

    return audit_labels(IFComp(model()).fit([_data()], progress=False).score([_data()], progress=False))


# Models --------------------------------------------------------------------------------------------------------------


def inventory(data: bytes, folder: Path) -> None:
    """Modules of any kind: covered, or refused."""
    draw = Draw(data[:2])
    layers = draw.choice((None, None, "last", "*", "0*", "[", "", ("0", "1.*")))
    found = IFComp(networks.tree(data[2:]), layers=layers, sua=draw.choice(("auto", True, False)), skip_uncovered=bool(draw.number(0, 1)))
    assert 0 <= found.coverage.covered <= found.coverage.total
    str(found.coverage)


def influence(data: bytes, folder: Path) -> None:
    """Small networks: their influence is finite and not negative, or they are refused."""
    draw, made = Draw(data[:3]), networks.network(data[3:])
    dtype = next(made.parameters()).dtype
    x, y = _data()[0].to(dtype), _data()[1] % max(1, made[-1].out_features)
    before = {name: value.clone() for name, value in made.state_dict().items()}
    settings: dict[str, Any] = {"fisher": draw.choice(("sampled", "exact", "empirical")), "beta": draw.choice((1.0, 0.0, 0.3))}
    ifc = IFComp(made, **settings, skip_uncovered=bool(draw.number(0, 1))).fit([(x, y)], progress=False)
    found = ifc.influence(x)
    assert bool(torch.isfinite(found).all()), found
    assert bool((found >= 0).all()), found
    assert all(torch.equal(before[name], value) for name, value in made.state_dict().items())


def _blank(count: int = 1) -> Callable[[], Iterable[bytes]]:
    return lambda: [bytes(64), bytes(range(128)), bytes(255 - value for value in range(128))]


TARGETS: dict[str, Target] = {
    "factors": Target(factors, lambda: [_fitted_file()], 20_000, 8192),
    "factors-content": Target(factors_content, _blank(), 20_000, 256),
    "safetensors-header": Target(header, _blank(), 20_000, 512),
    "weights": Target(weights, _weights_seeds, 20_000, 8192),
    "torch-pickle": Target(torch_pickle, _pickle_seeds, 20_000, 2048),
    "moments": Target(moments, lambda: [b"\xff" + bytes(64), *(b"\x00" + seed for seed in [_fitted_file()])], 10_000),
    "record": Target(record, _blank(), 20_000, 512),
    "pairs": Target(pairs, _blank(), 10_000, 512),
    "npz": Target(npz, _npz_seeds, 30_000),
    "parquet": Target(parquet, _parquet_seeds, 20_000, 16_384),
    "folder": Target(folder_of_images, _image_seeds, 20_000),
    "words": Target(words, _blank(), 50_000, 256),
    "report": Target(report, _blank(), 2_000, 512),
    "inventory": Target(inventory, _blank(), 10_000, 128),
    "influence": Target(influence, _blank(), 3_000, 128),
}
