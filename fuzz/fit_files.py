"""Files of a fit and of weights: factors, checkpoints, records, results of hindsight training."""

from __future__ import annotations

import io
import json
import struct
import warnings
import zipfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from fuzz.common import examples, file_bytes, fitted, model
from fuzz.drawing import Draw, as_json
from ifcomp import IFComp
from ifcomp.cli.model import load_weights, read_weights
from ifcomp.cli.record import Record, read_record
from ifcomp.cli.run import stored_options
from ifcomp.io import checkpoint_files
from ifcomp.io.factor_files import ENTRY
from ifcomp.io.tensor_files import write_tensors
from ifcomp.io.untrusted import parse_json
from ifcomp.oracle.pairs import Pair, PairFile
from ifcomp.storage import restore_results

KINDS = ("float64", "float16", "int64", "bool", "float8_e5m2", "complex64", "uint8", "bfloat16")
VALUES = (float("nan"), float("inf"), -1.0, 3e38, 0.0, 1e-45)


@cache
def _fitted_file() -> bytes:
    return file_bytes(fitted().save)


def factors_seeds() -> list[bytes]:
    """Return a file of factors."""
    return [_fitted_file()]


def factors(data: bytes, folder: Path) -> None:
    """Load the bytes as a file of factors."""
    path = folder / "run.ifcomp"
    path.write_bytes(data)
    IFComp.load(path, model())


def _parts(content: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the header and the data of a safetensors file."""
    length = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def factors_content(data: bytes, folder: Path) -> None:
    """Load a well-formed file with wrong content: it is refused, or the influence is finite."""
    draw = Draw(data)
    metadata = json.loads(_parts(_fitted_file())[0]["__metadata__"]["ifcomp"])
    for _ in range(draw.number(0, 3)):
        metadata = draw.damaged(metadata)
    path = folder / "run.ifcomp"
    _write(path, _damaged(draw, load(_fitted_file())), "ifcomp", metadata)
    influence = IFComp.load(path, model()).influence(examples()[0])
    assert bool(torch.isfinite(influence).all()), influence


def _write(path: Path, tensors: dict[str, Tensor], entry: str, content: Any) -> None:
    """Write a file with a correct digest, as far as it can have one."""
    text = as_json(content)
    if isinstance(content, dict) and text == json.dumps(content):
        write_tensors(path, tensors, entry, content)
    else:
        path.write_bytes(save(tensors, {entry: text}))


def _damaged(draw: Draw, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with some removed, renamed, converted, reshaped or with extreme values."""
    result = dict(tensors)
    for _ in range(draw.number(0, 2)):
        name = draw.choice(list(result) or ["none"])
        value = result.pop(name, torch.ones(2, 2)).clone()
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
        result[name] = value
    return result


@cache
def _checkpoint() -> nn.Module:
    """Return the module that all weights are loaded into."""
    return nn.Linear(4, 3)


def _use_weights(path: Path) -> None:
    load_weights(_checkpoint(), read_weights(str(path)), "a:b", str(path))


def header(data: bytes, folder: Path) -> None:
    """Load a safetensors file with a wrong header."""
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
    """Load the bytes as weights. The first byte selects the format."""
    path = folder / ("net.safetensors" if data[:1] < b"\x80" else "net.pt")
    path.write_bytes(data[1:])
    _use_weights(path)


def weights_seeds() -> Iterable[bytes]:
    """Return weights in every format."""
    state = _checkpoint().state_dict()
    yield b"\x00" + save(dict(state))
    yield b"\xff" + file_bytes(lambda path: torch.save(state, path), ".pt")
    yield b"\xff" + file_bytes(lambda path: torch.save({"state_dict": state, "epoch": 1}, path), ".pt")
    yield b"\xff" + file_bytes(lambda path: torch.save(state, path, _use_new_zipfile_serialization=False), ".pt")


def torch_pickle(data: bytes, folder: Path) -> None:
    """Load a torch.save file with an arbitrary pickle."""
    path = folder / "net.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED if data[:1] > b"\xf0" else zipfile.ZIP_STORED) as file:
        file.writestr("net/data.pkl", data[1:])
        file.writestr("net/version", "3\n")
        file.writestr("net/byteorder", "little")
        for index in range(2):
            file.writestr(f"net/data/{index}", bytes(range(64)))
    _use_weights(path)


def pickle_seeds() -> Iterable[bytes]:
    """Return pickles of torch.save."""
    for content in ({}, {"state_dict": _checkpoint().state_dict()}, {"a": nn.Parameter(torch.ones(2, 2))}):
        archive = file_bytes(lambda path, content=content: torch.save(content, path), ".pt")
        with zipfile.ZipFile(io.BytesIO(archive)) as file:
            yield b"\x00" + file.read(next(name for name in file.namelist() if name.endswith("data.pkl")))


def checkpoint(data: bytes, folder: Path) -> None:
    """Load a checkpoint. The first byte selects: arbitrary bytes, or a well-formed file with wrong content."""
    path, draw, content = folder / "run.partial", Draw(data[1:]), data[1:]
    key = {"beta": 1.0, "stages": ["first", "second"]}
    if data[:1] >= b"\x40":
        metadata = {"stage": "first", "position": 3, "digests": {"all": "d"}, "settings": {"a": 1}, "key": key}
        metadata["schema"] = checkpoint_files.SCHEMA
        for _ in range(draw.number(0, 2)):
            metadata = draw.damaged(metadata)
        _write(path, _damaged(draw, {"local/a": torch.ones(2)}), "ifcomp-checkpoint", metadata)
    else:
        path.write_bytes(content)
    checkpoint_files.read_checkpoint(path, key)


@cache
def _with_results() -> tuple[IFComp, dict[str, Any]]:
    """Return a predictor with a calibration and a detector, and both as plain JSON."""
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(2))
    held_out = [(x, torch.arange(60) % 3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # few examples
        ifc = IFComp(model()).fit([examples()], progress=False)
        ifc.calibrate(held_out, progress=False)
        ifc.ood_detector(held_out, progress=False)
    return ifc, json.loads(_parts(file_bytes(ifc.save))[0]["__metadata__"][ENTRY])["results"]


def fit_results(data: bytes, folder: Path) -> None:
    """Restore a wrong calibration and detector of a run. What is restored gives finite scores."""
    draw, (ifc, results) = Draw(data), _with_results()
    for _ in range(draw.number(1, 3)):
        name = draw.choice(("calibration", "detector"))
        results = {**results, name: draw.damaged(results[name])}
    try:
        plain = parse_json(as_json(results))
    except ValueError:  # nested too deeply
        return
    restore_results(ifc, plain, folder / "run.ifcomp")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        distribution = ifc.predict_proba(examples()[0])
        assert bool(torch.isfinite(distribution).all()), distribution
        assert ifc.detector is not None
        ifc.detector.predict(examples()[0])


def record(data: bytes, folder: Path) -> None:
    """Load the record of a run. The first byte selects: arbitrary bytes, or JSON with wrong content."""
    path, draw = folder / "run.ifcomp", Draw(data[1:])
    content = {"record": Record("a:b", "w", "npz:x", {"mean": [0.5]}, ["a", "b"], 3, "0").to_json()}
    text = as_json(draw.damaged(draw.damaged(content))) if data[:1] >= b"\x40" else data[1:].decode("latin-1")
    path.write_bytes(save({"a": torch.ones(2)}, {ENTRY: text}))
    loaded = read_record(str(path))
    if loaded is not None:
        assert not loaded.is_trusted
        stored_options(loaded)


def pairs(data: bytes, folder: Path) -> None:
    """Load results of hindsight training. The first byte selects: arbitrary bytes, or JSON with wrong content."""
    path, draw = folder / "pairs.jsonl", Draw(data[1:])
    line = {"key": "k", "label": 1, **vars(Pair(-1.0, -2.0, 3, True, 0.1, 0.2))}
    path.write_bytes(as_json(draw.damaged(draw.damaged(line))).encode() if data[:1] >= b"\x40" else data[1:])
    PairFile(path)
