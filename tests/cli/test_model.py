"""Weights are never unpickled, and all differences to the model are listed."""

import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import Tensor, nn

from ifcomp.cli.model import check_model, load_model, read_weights
from ifcomp.data.sources import IndexedBatches, Source
from ifcomp.errors import LogitsError, ModelError, SettingError

STATE = {"weight": torch.ones(3, 2), "bias": torch.zeros(3)}


class Linear(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 3)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x))


MODULE = nn.Linear(2, 3)


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def load(weights: str | None, name: str = "Linear") -> nn.Module:
    return load_model(f"{__name__}:{name}", weights, "cpu")


def test_formats_of_weights() -> None:
    save_file(STATE, "a.safetensors")
    torch.save(STATE, "a.pt")
    torch.save({"epoch": 3, "state_dict": STATE, "optimizer": {"lr": 0.1}}, "checkpoint.pt")
    torch.save({"model_state_dict": STATE}, "other.pt")
    for name in ("a.safetensors", "a.pt", "checkpoint.pt", "other.pt"):
        model = load(name)
        assert torch.equal(model.get_parameter("weight"), STATE["weight"])
        assert not model.training


def test_module_instead_of_a_factory() -> None:
    assert load(None, "MODULE") is MODULE


def test_tied_weights_are_stored_once() -> None:
    tied = Tied()
    save_model(tied, "tied.safetensors")
    assert len(read_weights("tied.safetensors")) == 3
    assert torch.equal(load("tied.safetensors", "Tied").get_parameter("one.weight"), tied.one.weight)


def test_differences_are_listed() -> None:
    save_file({"weight": torch.ones(4, 2), "bia": torch.zeros(3)}, "a.safetensors")
    with pytest.raises(ModelError) as caught:
        load("a.safetensors")
    assert str(caught.value).splitlines()[1:] == [
        "  missing: bias",
        "  unexpected: bia",
        "  of another shape: weight [4, 2] instead of [3, 2]",
    ]
    save_file({**STATE, **{f"extra.{number}": torch.ones(1) for number in range(12)}}, "b.safetensors")
    with pytest.raises(ModelError, match=r"unexpected: extra.0, .* and 4 more"):
        load("b.safetensors")


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (Path("exploded"),)  # type: ignore[return-value]


@pytest.mark.parametrize("name", ["bomb.pt", "bomb.pkl", "bomb.safetensors"])
def test_nothing_is_unpickled(name: str) -> None:
    torch.save({"weight": Bomb()}, "bomb.pt")
    Path("bomb.pkl").write_bytes(pickle.dumps(Bomb()))
    Path("bomb.safetensors").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ModelError, match="unpickling are refused"):
        load(name)
    assert not Path("exploded").exists()


def test_whole_models_are_refused() -> None:
    torch.save(nn.Linear(2, 3), "whole.pt")
    with pytest.raises(ModelError, match=r"torch.save\(model.state_dict\(\), file\)"):
        load("whole.pt")


@pytest.mark.parametrize("content", [b"", b"\x08\x00\x00\x00\x00\x00\x00\x00{", b"PK\x03\x04 cut off"])
@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
def test_damaged_files(name: str, content: bytes) -> None:
    Path(name).write_bytes(content)
    with pytest.raises(ModelError, match=f"Cannot read tensors from '{name}'"):
        load(name)


@pytest.mark.parametrize("content", [{"epoch": 3}, [1, 2], {"state_dict": {"a": 3}}])
def test_files_without_tensors(content: object) -> None:
    torch.save(content, "a.pt")
    with pytest.raises(ModelError, match="must contain tensors by name"):
        load("a.pt")


def test_unavailable_devices() -> None:
    for device in ("nowhere", "cuda:99"):
        with pytest.raises(SettingError, match="--device"):
            load_model(f"{__name__}:Linear", None, device)


def make_source(x: Tensor, labels: Tensor | None = None) -> Source:
    return Source("data", IndexedBatches(lambda a, b: (x[a:b], None), len(x), 4), lambda indices: [], labels)


def test_check_model_returns_the_number_of_classes() -> None:
    assert check_model(Linear(), make_source(torch.ones(5, 2)), "model") == 3
    with pytest.raises(LogitsError, match="logits must have shape"):
        check_model(nn.Flatten(0), make_source(torch.ones(5, 2)), "model")
