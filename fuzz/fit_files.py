"""Files of a fit and of weights: factors, checkpoints, moments, records, results of hindsight training."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from experiments.baselines.swag import WeightMoments
from fuzz.common import examples, file_bytes, fitted, model
from fuzz.drawing import Draw, as_json
from ifcomp import IFComp
from ifcomp.cli.models import _fill, read_weights
from ifcomp.cli.opened import _stored_options
from ifcomp.cli.runs import Record, read_record, record_path
from ifcomp.io.checkpoint_files import read_checkpoint
from ifcomp.oracle.pairs import Pair, PairFile

KINDS = ("float64", "float16", "int64", "bool", "float8_e5m2", "complex64", "uint8", "bfloat16")
VALUES = (float("nan"), float("inf"), -1.0, 3e38, 0.0, 1e-45)


@cache
def _fitted_file() -> bytes:
    return file_bytes(fitted().save)


def factors_seeds() -> list[bytes]:
    """A fit."""
    return [_fitted_file()]


def factors(data: bytes, folder: Path) -> None:
    """A file of factors, as it comes."""
    path = folder / "run.ifcomp"
    path.write_bytes(data)
    IFComp.load(path, model())


def _parts(content: bytes) -> tuple[dict[str, Any], bytes]:
    """The header of a safetensors file, and the rest."""
    length = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def factors_content(data: bytes, folder: Path) -> None:
    """A well-formed file with wrong content: refused, or its influence is finite."""
    draw = Draw(data)
    metadata = json.loads(_parts(_fitted_file())[0]["__metadata__"]["ifcomp"])
    for _ in range(draw.number(0, 3)):
        metadata = draw.damaged(metadata)
    path = folder / "run.ifcomp"
    path.write_bytes(save(_damaged(draw, load(_fitted_file())), {"ifcomp": as_json(metadata)}))
    found = IFComp.load(path, model()).influence(examples()[0])
    assert bool(torch.isfinite(found).all()), found


def _damaged(draw: Draw, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Some tensors missing, renamed, of another type or shape, or with odd values."""
    found = dict(tensors)
    for _ in range(draw.number(0, 2)):
        name = draw.choice(list(found) or ["none"])
        value = found.pop(name, torch.ones(2, 2)).clone()
        match draw.number(0, 5):
            case 0:
                continue
            case 1:
                name = draw.text().encode("utf-8", "replace").decode()
            case 2:
                value = value.to(getattr(torch, draw.choice(KINDS)))
            case 3 if value.numel() and value.is_floating_point():
                value.view(-1)[draw.number(0, 255) % value.numel()] = draw.choice(VALUES)
            case 4:
                value = value.reshape(-1)
            case _:
                value = torch.ones([draw.number(0, 6) for _ in range(draw.number(0, 4))])
        found[name] = value
    return found


@cache
def _checkpoint() -> nn.Module:
    """Filled again and again."""
    return nn.Linear(4, 3)


def _use_weights(path: Path) -> None:
    _fill(_checkpoint(), read_weights(str(path)), "a:b", str(path))


def header(data: bytes, folder: Path) -> None:
    """A safetensors file whose header lies."""
    draw = Draw(data)
    head, tensors = _parts(save(dict(_checkpoint().state_dict()), {"note": "x"}))
    for _ in range(draw.number(1, 3)):
        head = draw.damaged(head)
    text = as_json(head).encode("utf-8", "replace")
    stated = len(text) if draw.number(0, 3) else draw.choice((0, 1, 2**31, 2**63, 2**64 - 1, len(text) - 1))
    path = folder / "net.safetensors"
    path.write_bytes(struct.pack("<Q", stated) + text + tensors)
    _use_weights(path)


def weights(data: bytes, folder: Path) -> None:
    """A checkpoint, as it comes: the first byte says of which kind."""
    path = folder / ("net.safetensors" if data[:1] < b"\x80" else "net.pt")
    path.write_bytes(data[1:])
    _use_weights(path)


def weights_seeds() -> Iterable[bytes]:
    """Checkpoints in every format."""
    state = _checkpoint().state_dict()
    yield b"\x00" + save(dict(state))
    yield b"\xff" + file_bytes(lambda path: torch.save(state, path), ".pt")
    yield b"\xff" + file_bytes(lambda path: torch.save({"state_dict": state, "epoch": 1}, path), ".pt")
    yield b"\xff" + file_bytes(lambda path: torch.save(state, path, _use_new_zipfile_serialization=False), ".pt")


def torch_pickle(data: bytes, folder: Path) -> None:
    """A zip file of torch.save with any program for the unpickler inside."""
    path = folder / "net.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED if data[:1] > b"\xf0" else zipfile.ZIP_STORED) as file:
        file.writestr("net/data.pkl", data[1:])
        file.writestr("net/version", "3\n")
        file.writestr("net/byteorder", "little")
        for number in range(2):
            file.writestr(f"net/data/{number}", bytes(range(64)))
    _use_weights(path)


def pickle_seeds() -> Iterable[bytes]:
    """Programs that torch.save writes."""
    for content in ({}, {"state_dict": _checkpoint().state_dict()}, {"a": nn.Parameter(torch.ones(2, 2))}):
        archive = file_bytes(lambda path, content=content: torch.save(content, path), ".pt")
        with zipfile.ZipFile(io.BytesIO(archive)) as file:
            yield b"\x00" + file.read(next(name for name in file.namelist() if name.endswith("data.pkl")))


@cache
def _moments_file() -> bytes:
    return file_bytes(WeightMoments().collect(model()).collect(nn.Sequential(*model())).save)


def moments(data: bytes, folder: Path) -> None:
    """A file of weight moments: the first byte says whether only its content is wrong."""
    path, draw = folder / "moments.safetensors", Draw(data[1:])
    content = data[1:]
    if data[:1] >= b"\x80":
        metadata = as_json(draw.damaged({"count": 2}) if draw.number(0, 1) else {"count": 2})
        content = save(_damaged(draw, load(_moments_file())), {"ifcomp.swag": metadata})
    path.write_bytes(content)
    loaded = WeightMoments.load(path)
    loaded.check(model())
    assert all(bool(value.isfinite().all()) for value in loaded.sample(0).values())


def moments_seeds() -> list[bytes]:
    """A file of weight moments, and decisions."""
    return [b"\xff" + bytes(64), b"\x00" + _moments_file()]


def checkpoint(data: bytes, folder: Path) -> None:
    """A checkpoint: the first byte says whether only its content is wrong."""
    path, draw, content = folder / "run.partial", Draw(data[1:]), data[1:]
    key = {"beta": 1.0, "stages": ["first", "second"]}
    if data[:1] >= b"\x40":
        metadata = {"schema": 3, "stage": "first", "position": 3, "digest": "d", "settings": {"a": 1}, "key": key}
        for _ in range(draw.number(0, 2)):
            metadata = draw.damaged(metadata)
        content = save(_damaged(draw, {"local/a": torch.ones(2)}), {"ifcomp-checkpoint": as_json(metadata)})
    path.write_bytes(content)
    read_checkpoint(path, key)


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
