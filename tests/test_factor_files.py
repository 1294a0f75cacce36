"""`storage` alone, on factors that are typed in: no model is fitted, so that every line can be tried in no time."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ifcomp.blocks.block import Basis
from ifcomp.curvature.factors import BlockFactors, Factors, FitSettings
from ifcomp.errors import FingerprintError, StorageError
from ifcomp.io import factor_files as storage

TURN = torch.tensor([[[0.6, -0.8], [0.8, 0.6]]], dtype=torch.float64)
SETTINGS = FitSettings(beta=0.5, fisher="exact", label_samples=3, seed=11)
OPTIONS = {"damping": 0.25, "selection": {"sua": True}}
DIGESTS = {"a.weight": "0123", "a.bias": "4567"}


def stored() -> storage.Stored:
    blocks = {
        "a": BlockFactors(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]], dtype=torch.float64), Basis(TURN, TURN.mT)),
        "table": BlockFactors(torch.tensor([[[0.0, 5.0, 1e-9], [1.0, 2.0, 3.0]]]), Basis(None, TURN.float())),
        "norm": BlockFactors(torch.tensor([1.5, 2.5])),
    }
    return storage.Stored(Factors(blocks, 17, 4, SETTINGS), DIGESTS, OPTIONS, "1.2.3")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    storage.save(tmp_path / "run.ifcomp", stored())
    return tmp_path / "run.ifcomp"


def content(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
        return json.loads(file.metadata()["ifcomp"]), tensors


def refused(path: Path, *words: str) -> None:
    with pytest.raises(StorageError) as caught:
        storage.load(path)
    assert str(caught.value).startswith(f"Cannot read factors from '{path}': "), caught.value
    assert all(word in str(caught.value) for word in words), caught.value


def test_all_comes_back(path: Path) -> None:
    found, expected = storage.load(str(path)), stored()
    assert (found.fingerprint, found.options, found.version) == (DIGESTS, OPTIONS, "1.2.3")
    assert (found.factors.count, found.factors.num_classes, found.factors.settings) == (17, 4, SETTINGS)
    assert list(found.factors.blocks) == ["a", "table", "norm"]
    for name, block in expected.factors.blocks.items():
        own = found.factors.blocks[name]
        assert own.shapes == block.shapes
        assert (own.basis is None) == (block.basis is None)
        assert own.dtypes == block.dtypes
        assert torch.equal(own.second_moments, block.second_moments)
        for part in ("inputs", "outputs") if block.basis else ():
            one, other = getattr(own.basis, part), getattr(block.basis, part)
            assert (one is None and other is None) or torch.equal(one, other)


def test_the_layout_of_the_file(path: Path) -> None:
    metadata, tensors = content(path)
    assert metadata == {
        "schema": 1,
        "version": "1.2.3",
        "count": 17,
        "num_classes": 4,
        "settings": {"beta": 0.5, "fisher": "exact", "label_samples": 3, "seed": 11},
        "blocks": ["a", "table", "norm"],
        "options": OPTIONS,
        "fingerprint": DIGESTS,
    }
    assert tensors.keys() == {
        *("a/second_moments", "a/basis.inputs", "a/basis.outputs"),
        *("table/second_moments", "table/basis.outputs", "norm/second_moments"),
    }


def test_tensors_that_need_gradients_or_are_views_are_saved(tmp_path: Path) -> None:
    moments = torch.arange(6.0).view(1, 2, 3).requires_grad_().transpose(1, 2)
    factors = Factors({"a": BlockFactors(moments)}, 1, 2, FitSettings())
    storage.save(tmp_path / "run", storage.Stored(factors, {}, {}, "0"))
    assert storage.load(tmp_path / "run").factors.blocks["a"].second_moments.tolist() == [[[0, 3], [1, 4], [2, 5]]]


def test_an_error_of_the_format_is_one_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(storage, "save_file", fail)
    with pytest.raises(StorageError, match="No space left on device"):
        storage.save(tmp_path / "run", stored())
    assert not list(tmp_path.iterdir())


def put(name: str, value: Tensor | None) -> Callable[[dict[str, Any], dict[str, Tensor]], object]:
    return lambda _, tensors: tensors.pop(name) if value is None else tensors.update({name: value})


def say(**changed: Any) -> Callable[[dict[str, Any], dict[str, Tensor]], object]:
    return lambda metadata, _: metadata.update(changed)


def lose(name: str) -> Callable[[dict[str, Any], dict[str, Tensor]], object]:
    return lambda metadata, _: metadata.pop(name)


ONES = torch.ones(1, 2, 2, dtype=torch.float64)
DAMAGED, METADATA = "its metadata is damaged", ("count", "num_classes", "settings", "blocks", "options", "fingerprint")

DAMAGE: list[tuple[str, Callable[[dict[str, Any], dict[str, Tensor]], object], tuple[str, ...]]] = [
    *((f"no {name}", lose(name), (DAMAGED, f"KeyError('{name}')", "Fit again.")) for name in (*METADATA, "version")),
    *((f"{name} null", say(**{name: None}), (DAMAGED, f"{name} is a NoneType")) for name in (*METADATA, "version")),
    ("version number", say(version=1), (DAMAGED, "version is a int")),
    ("schema", say(schema=2), ("it has schema 2, this version reads 1. Use the library version", "or fit again.")),
    ("no schema", lose("schema"), (DAMAGED, "KeyError('schema')", "Fit again.")),
    ("count zero", say(count=0), (DAMAGED, "count is 0")),
    ("count true", say(count=True), (DAMAGED, "count is True")),
    ("count huge", say(count=2**63), (DAMAGED, f"count is {2**63}")),
    ("classes negative", say(num_classes=-1), (DAMAGED, "num_classes is -1")),
    ("settings unknown", say(settings={"heat": 1}), (DAMAGED, "heat")),
    ("settings wrong", say(settings={"beta": -1}), (DAMAGED, "beta must be")),
    ("block unknown", say(blocks=["b"]), (DAMAGED, "b/second_moments")),
    ("block number", say(blocks=[3]), (DAMAGED, "the name of a block is 3")),
    ("no moments", put("a/second_moments", None), (DAMAGED, "KeyError('a/second_moments')")),
    ("no outputs", put("a/basis.outputs", None), (DAMAGED, "KeyError('a/basis.outputs')")),
    ("infinite", put("a/second_moments", ONES / 0), (DAMAGED, "block 'a' has entries that are not finite")),
    ("one infinite", put("a/second_moments", torch.tensor([1, torch.inf])), ("block 'a' has entries that are not",)),
    ("nan inputs", put("a/basis.inputs", ONES * np.nan), ("block 'a' has entries that are not finite numbers",)),
    ("nan outputs", put("table/basis.outputs", ONES * np.nan), ("block 'table' has entries that are not finite",)),
    ("half", put("a/second_moments", ONES.half()), ("block 'a' has entries that are not finite numbers",)),
    ("negative", put("norm/second_moments", torch.tensor([1.0, -1e-9])), ("block 'norm' has negative second moments",)),
    ("long inputs", put("a/basis.inputs", TURN * 1.001), ("block 'a' has eigenvectors whose length is not 1",)),
    ("short outputs", put("a/basis.outputs", TURN * 0.999), ("block 'a' has eigenvectors whose length is not 1",)),
    ("one short", put("a/basis.outputs", TURN * torch.tensor([1.0, 0.9])), ("'a' has eigenvectors whose length",)),
    ("flat basis", put("a/basis.outputs", TURN[0]), ("block 'a' has eigenvectors whose length is not 1",)),
    ("oblong basis", put("a/basis.outputs", torch.ones(1, 1, 2).double()), ("'a' has eigenvectors whose length",)),
]


@pytest.mark.parametrize(("change", "words"), [pytest.param(*row[1:], id=row[0]) for row in DAMAGE])
def test_damage_is_named(change: Callable[..., object], words: tuple[str, ...], path: Path) -> None:
    metadata, tensors = content(path)
    change(metadata, tensors)
    save_file(tensors, path, metadata={"ifcomp": json.dumps(metadata)})
    refused(path, *words)


def test_what_is_just_within_bounds_is_accepted(path: Path) -> None:
    metadata, tensors = content(path)
    metadata.update(count=2**63 - 1, num_classes=1)
    tensors["a/basis.inputs"] = TURN * 1.0004
    tensors["norm/second_moments"] = torch.zeros(2)
    save_file(tensors, path, metadata={"ifcomp": json.dumps(metadata)})
    found = storage.load(path).factors
    assert (found.count, found.num_classes) == (2**63 - 1, 1)
    assert found.blocks["norm"].second_moments.tolist() == [0, 0]


def test_columns_of_a_basis_have_length_one_not_rows(path: Path) -> None:
    metadata, tensors = content(path)
    for basis, words in ((torch.tensor([[[1.0, 1.0], [0.0, 0.0]]]), None), (torch.eye(2)[None] * 2, "length is not 1")):
        tensors["table/basis.outputs"] = basis
        save_file(tensors, path, metadata={"ifcomp": json.dumps(metadata)})
        if words is None:
            storage.load(path)
        else:
            refused(path, words)


@pytest.mark.parametrize("text", ["{", "[]", "3", "null", "{}"])
def test_other_metadata_is_damaged(text: str, path: Path) -> None:
    save_file({"x": torch.ones(1)}, path, metadata={"ifcomp": text})  # without any, safetensors 0.4 breaks the header
    refused(path, DAMAGED, "Fit again.")


def test_other_files(tmp_path: Path) -> None:
    other = tmp_path / "other"
    refused(other, "there is no such file.")
    save_file({"x": torch.ones(1)}, other, metadata={"format": "pt"})
    refused(other, "it is a safetensors file, but not one written by ifcomp.")
    other.write_bytes(b"hello")
    refused(other, "safetensors")
    refused(tmp_path, "it is a folder.")


# Fingerprints -------------------------------------------------------------------------------------------------------


class Model(nn.Module):
    """A weight under two names, a bias that is a view, and a whole-numbered buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).view(2, 3))
        self.again = self.weight
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("count_again", self.count)


def digest(value: np.ndarray, kind: str) -> str:
    """The first half of SHA-256 over type, shape and bytes."""
    return hashlib.sha256(f"torch.{kind} {list(value.shape)} ".encode() + value.tobytes()).hexdigest()[:32]


def test_the_fingerprint_is_a_digest_of_type_shape_and_bytes() -> None:
    weight, count = np.arange(6, dtype=np.float32).reshape(2, 3), np.array(7)
    expected = {name: digest(weight, "float32") for name in ("weight", "again")}
    assert storage.fingerprint(Model()) == expected | dict.fromkeys(("count", "count_again"), digest(count, "int64"))
    turned = Model()
    turned.weight.data = turned.weight.data.T
    assert storage.fingerprint(turned)["again"] == digest(np.ascontiguousarray(weight.T), "float32")


def test_differences_are_listed() -> None:
    own = storage.fingerprint(Model())
    storage.check_fingerprint(own, Model(), "These")
    others = {name: value for name, value in own.items() if name != "count"} | {"again": "0", "lost": "1"}
    with pytest.raises(FingerprintError) as caught:
        storage.check_fingerprint(others, Model(), "These")
    assert str(caught.value).splitlines() == [
        "These belong to another model:",
        "  missing in this model: lost",
        "  only in this model: count",
        "  different values: again",
        "Load the weights that were fitted, or fit again.",
    ]


@pytest.mark.parametrize(("count", "said"), [(6, "n0, n1, n2, n3, n4, n5"), (7, "n0, n1, n2, n3, n4, n5 and 1 more")])
def test_six_names_are_shown(count: int, said: str) -> None:
    with pytest.raises(FingerprintError) as caught:
        storage.check_fingerprint({f"n{number}": "" for number in range(count)}, nn.ReLU(), "These")
    assert str(caught.value).splitlines()[1:-1] == [f"  missing in this model: {said}"]
