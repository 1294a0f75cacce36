"""The format of factor files, on small factors without a model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ifcomp.curvature.factors import Basis, BlockFactors, Factors, FitSettings
from ifcomp.errors import StorageError
from ifcomp.io import factor_files, tensor_files
from ifcomp.io.factor_files import SavedFactors
from ifcomp.io.tensor_files import write_tensors

ROTATION = torch.tensor([[[0.6, -0.8], [0.8, 0.6]]], dtype=torch.float64)
SETTINGS = FitSettings(beta=0.5, fisher="exact", label_samples=3, seed=11)
OPTIONS = {"damping": 0.25, "selection": {"sua": True}}
DIGESTS = {"a.weight": "0123", "a.bias": "4567"}


def example() -> SavedFactors:
    blocks = {
        "a": BlockFactors(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]], dtype=torch.float64), Basis(ROTATION, ROTATION.mT)),
        "table": BlockFactors(torch.tensor([[[0.0, 5.0, 1e-9], [1.0, 2.0, 3.0]]]), Basis(None, ROTATION.float())),
        "norm": BlockFactors(torch.tensor([1.5, 2.5])),
    }
    return SavedFactors(Factors(blocks, 17, 4, SETTINGS), DIGESTS, OPTIONS, "1.2.3")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    factor_files.save(tmp_path / "run.ifcomp", example())
    return tmp_path / "run.ifcomp"


def content(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
        metadata = json.loads(file.metadata()["ifcomp"])
    del metadata["sha256"]
    return metadata, tensors


def assert_refused(path: Path, *words: str) -> None:
    with pytest.raises(StorageError) as caught:
        factor_files.load(path)
    assert str(caught.value).startswith(f"Cannot read factors from '{path}': "), caught.value
    assert all(word in str(caught.value) for word in words), caught.value


def test_loading_restores_everything(path: Path) -> None:
    loaded, expected = factor_files.load(str(path)), example()
    assert (loaded.fingerprint, loaded.options, loaded.version) == (DIGESTS, OPTIONS, "1.2.3")
    assert (loaded.factors.count, loaded.factors.num_classes, loaded.factors.settings) == (17, 4, SETTINGS)
    assert list(loaded.factors.blocks) == ["a", "table", "norm"]
    for name, block in expected.factors.blocks.items():
        restored = loaded.factors.blocks[name]
        assert restored.shapes == block.shapes
        assert (restored.basis is None) == (block.basis is None)
        assert restored.dtypes == block.dtypes
        assert torch.equal(restored.second_moments, block.second_moments)
        for part in ("inputs", "outputs") if block.basis else ():
            actual, saved = getattr(restored.basis, part), getattr(block.basis, part)
            assert (actual is None and saved is None) or torch.equal(actual, saved)


def test_names_in_the_file(path: Path) -> None:
    metadata, tensors = content(path)
    assert metadata == {
        "schema": 2,
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


def test_tensors_with_gradients_and_views_are_saved(tmp_path: Path) -> None:
    moments = torch.arange(6.0).view(1, 2, 3).requires_grad_().transpose(1, 2)
    factors = Factors({"a": BlockFactors(moments)}, 1, 2, FitSettings())
    factor_files.save(tmp_path / "run", SavedFactors(factors, {}, {}, "0"))
    assert factor_files.load(tmp_path / "run").factors.blocks["a"].second_moments.tolist() == [[[0, 3], [1, 4], [2, 5]]]


def test_errors_of_safetensors_become_storage_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(tensor_files, "save_file", fail)
    with pytest.raises(StorageError, match="No space left on device"):
        factor_files.save(tmp_path / "run", example())
    assert not list(tmp_path.iterdir())


def replace_tensor(name: str, value: Tensor | None) -> Callable[[dict[str, Any], dict[str, Tensor]], object]:
    return lambda _, tensors: tensors.pop(name) if value is None else tensors.update({name: value})


def update(**changed: Any) -> Callable[[dict[str, Any], dict[str, Tensor]], object]:
    return lambda metadata, _: metadata.update(changed)


def remove(name: str) -> Callable[[dict[str, Any], dict[str, Tensor]], object]:
    return lambda metadata, _: metadata.pop(name)


ONES = torch.ones(1, 2, 2, dtype=torch.float64)
DAMAGED, METADATA = "its metadata is damaged", ("count", "num_classes", "settings", "blocks", "options", "fingerprint")

DAMAGE: list[tuple[str, Callable[[dict[str, Any], dict[str, Tensor]], object], tuple[str, ...]]] = [
    *((f"no {name}", remove(name), (DAMAGED, f"KeyError('{name}')", "Fit again.")) for name in (*METADATA, "version")),
    *((f"{name} null", update(**{name: None}), (DAMAGED, f"{name} is a NoneType")) for name in (*METADATA, "version")),
    ("version number", update(version=1), (DAMAGED, "version is a int")),
    ("schema", update(schema=3), ("it has schema 3, this version reads 2. Use the library version", "or fit again.")),
    ("no schema", remove("schema"), ("it has schema None", "or fit again.")),
    ("count zero", update(count=0), (DAMAGED, "count is 0")),
    ("count true", update(count=True), (DAMAGED, "count is True")),
    ("count huge", update(count=2**63), (DAMAGED, f"count is {2**63}")),
    ("classes negative", update(num_classes=-1), (DAMAGED, "num_classes is -1")),
    ("settings unknown", update(settings={"heat": 1}), (DAMAGED, "heat")),
    ("settings wrong", update(settings={"beta": -1}), (DAMAGED, "beta must be")),
    ("block unknown", update(blocks=["b"]), (DAMAGED, "b/second_moments")),
    ("block number", update(blocks=[3]), (DAMAGED, "the name of a block is 3")),
    ("no moments", replace_tensor("a/second_moments", None), (DAMAGED, "KeyError('a/second_moments')")),
    ("infinite", replace_tensor("a/second_moments", ONES / 0), (DAMAGED, "block 'a' has entries that are not finite")),
    (
        "one infinite",
        replace_tensor("a/second_moments", torch.tensor([1, torch.inf])),
        ("block 'a' has entries that are not",),
    ),
    (
        "nan inputs",
        replace_tensor("a/basis.inputs", ONES * np.nan),
        ("block 'a' has entries that are not finite numbers",),
    ),
    (
        "nan outputs",
        replace_tensor("table/basis.outputs", ONES * np.nan),
        ("block 'table' has entries that are not finite",),
    ),
    ("half", replace_tensor("a/second_moments", ONES.half()), ("block 'a' has entries that are not finite numbers",)),
    (
        "negative",
        replace_tensor("norm/second_moments", torch.tensor([1.0, -1e-9])),
        ("block 'norm' has negative second moments",),
    ),
    (
        "long inputs",
        replace_tensor("a/basis.inputs", ROTATION * 1.001),
        ("block 'a' has eigenvectors whose length is not 1",),
    ),
    (
        "short outputs",
        replace_tensor("a/basis.outputs", ROTATION * 0.999),
        ("block 'a' has eigenvectors whose length is not 1",),
    ),
    (
        "one short",
        replace_tensor("a/basis.outputs", ROTATION * torch.tensor([1.0, 0.9])),
        ("'a' has eigenvectors whose length",),
    ),
    (
        "flat basis",
        replace_tensor("a/basis.outputs", ROTATION[0]),
        ("block 'a' has eigenvectors whose length is not 1",),
    ),
    (
        "oblong basis",
        replace_tensor("a/basis.outputs", torch.ones(1, 1, 2).double()),
        ("'a' has eigenvectors whose length",),
    ),
]


@pytest.mark.parametrize(("change", "words"), [pytest.param(*row[1:], id=row[0]) for row in DAMAGE])
def test_damage_is_refused_with_the_reason(change: Callable[..., object], words: tuple[str, ...], path: Path) -> None:
    metadata, tensors = content(path)
    change(metadata, tensors)
    write_tensors(path, tensors, "ifcomp", metadata)
    assert_refused(path, *words)


def test_values_at_the_bounds_are_accepted(path: Path) -> None:
    metadata, tensors = content(path)
    metadata.update(count=2**63 - 1, num_classes=1)
    tensors["a/basis.inputs"] = ROTATION * 1.0004
    tensors["norm/second_moments"] = torch.zeros(2)
    write_tensors(path, tensors, "ifcomp", metadata)
    factors = factor_files.load(path).factors
    assert (factors.count, factors.num_classes) == (2**63 - 1, 1)
    assert factors.blocks["norm"].second_moments.tolist() == [0, 0]


def test_columns_and_not_rows_of_a_basis_have_length_one(path: Path) -> None:
    metadata, tensors = content(path)
    for basis, words in ((torch.tensor([[[1.0, 1.0], [0.0, 0.0]]]), None), (torch.eye(2)[None] * 2, "length is not 1")):
        tensors["table/basis.outputs"] = basis
        write_tensors(path, tensors, "ifcomp", metadata)
        if words is None:
            factor_files.load(path)
        else:
            assert_refused(path, words)


@pytest.mark.parametrize("text", ["{", "[]", "3", "null", "{}"])
def test_other_metadata_are_refused(text: str, path: Path) -> None:
    save_file({"x": torch.ones(1)}, path, {"ifcomp": text})  # safetensors 0.4 needs a tensor
    assert_refused(path)


def test_files_of_other_kinds_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "other"
    assert_refused(other, "there is no such file.")
    save_file({"x": torch.ones(1)}, other, metadata={"format": "pt"})
    assert_refused(other, "it is a safetensors file, but not one written by ifcomp.")
    other.write_bytes(b"hello")
    assert_refused(other, "safetensors")
    assert_refused(tmp_path, "it is a folder.")


GOLDEN_FILES = sorted((Path(__file__).parents[1] / "golden").glob("*.ifcomp"))


@pytest.mark.parametrize("golden", GOLDEN_FILES, ids=lambda path: path.stem)
def test_the_bytes_of_files_do_not_change(golden: Path, tmp_path: Path) -> None:
    factor_files.save(tmp_path / "again", factor_files.load(golden))
    assert (tmp_path / "again").read_bytes() == golden.read_bytes()


def test_there_are_golden_files() -> None:
    assert len(GOLDEN_FILES) > 60
