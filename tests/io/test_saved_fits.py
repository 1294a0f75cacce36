"""Saved fits: loading restores every bit, and other, damaged or foreign files are refused."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from cases import Positions, seeded
from fitted_cases import CASES, fitted, inputs_of
from ifcomp import IFComp, Relative, __version__
from ifcomp.errors import FingerprintError, StorageError
from ifcomp.io.tensor_files import write_tensors

SAVED: list[tuple[str, str, dict[str, Any]]] = [
    ("plain", "linear", {}),
    ("absolute_damping", "linear", {"damping": 1e-30}),
    ("whole_damping", "linear", {"damping": 1}),
    ("relative_damping", "linear", {"damping": Relative(0.03)}),
    ("all_settings", "linear", {"beta": 0.3, "fisher": "exact", "label_samples": 3, "seed": 2**40}),
    ("beta_zero", "linear", {"beta": 0.0}),
    ("other_parameters", "vision_transformer", {}),
    ("tied", "tied", {}),
    ("embedding", "embedding_padding", {}),
    ("demoted", "embedding_positions_flat", {}),
    ("broadcast", "embedding_positions_leading", {}),
    ("attention", "attention_cross", {}),
    ("convolutions", "lenet", {}),
    ("shared_offsets", "lenet", {"sua": True}),
    ("own_offsets", "lenet", {"sua": False}),
    ("groups", "conv2d_groups", {"sua": True}),
    ("last_layer", "lenet", {"layers": "last"}),
    ("some_layers", "vision_transformer", {"layers": ["mlp.*", "token", "norm1"]}),
    ("text", "bert", {}),
]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The file of a fit of the model that `model` returns."""
    path = tmp_path / "run.ifcomp"
    fitted("linear").save(path)
    return path


def model() -> nn.Module:
    """Return the model of the fixture `saved`."""
    return CASES["linear"].make()


def assert_refused(path: Path, *words: str) -> None:
    """Check that loading a file or scoring with it raises StorageError with these words."""
    with pytest.raises(StorageError) as caught:
        IFComp.load(path, model()).influence(inputs_of("linear"))
    message = str(caught.value)
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in: {message}"


# Round trips --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("name", "options"), [pytest.param(*row[1:], id=row[0]) for row in SAVED])
def test_a_loaded_fit_gives_the_same_bits(
    name: str, options: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    ifc, inputs = fitted(name, dtype, **options), inputs_of(name, dtype)
    ifc.save(tmp_path / "run.ifcomp")
    loaded = IFComp.load(tmp_path / "run.ifcomp", CASES[name].make().to(dtype))
    assert loaded.damping == ifc.damping
    assert loaded.settings == ifc.settings
    assert torch.equal(loaded.influence(inputs), ifc.influence(inputs))
    assert torch.equal(loaded.logit_kernel(inputs), ifc.logit_kernel(inputs))
    pd.testing.assert_frame_equal(loaded.score([inputs]).frame, ifc.score([inputs]).frame, check_exact=True)
    assert str(loaded.coverage) == str(ifc.coverage)


def test_saving_a_loaded_fit_gives_the_same_file(saved: Path, tmp_path: Path) -> None:
    IFComp.load(saved, model()).save(tmp_path / "again.ifcomp")
    assert (tmp_path / "again.ifcomp").read_bytes() == saved.read_bytes()


def test_a_loaded_fit_can_be_fitted_again(saved: Path) -> None:
    loaded = IFComp.load(saved, model())
    loaded.fit([CASES["linear"].sample(7, seed=1)])
    assert torch.equal(loaded.influence(inputs_of("linear")), fitted("linear").influence(inputs_of("linear")))


class FoldedSecond(nn.Module):
    """A layer without bias on [T * B, F], where examples vary fastest."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 5, bias=False)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.transpose(0, 1).reshape(-1, x.shape[2])
        return self.head(torch.relu(self.fc(rows)).view(x.shape[1], len(x), -1).mean(0))


def test_a_loaded_fit_does_not_depend_on_the_first_scored_inputs(tmp_path: Path) -> None:
    """Inputs without a gradient do not show which axis of a layer is the batch axis."""
    x = torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(0))
    ifc = IFComp(seeded(FoldedSecond)()).fit([x])
    ifc.save(tmp_path / "run.ifcomp")
    loaded = IFComp.load(tmp_path / "run.ifcomp", seeded(FoldedSecond)())
    loaded.influence(torch.zeros_like(x))
    assert torch.equal(loaded.influence(x), ifc.influence(x))


def test_a_model_of_one_layer_can_be_saved(tmp_path: Path) -> None:
    layer = seeded(lambda: nn.Linear(4, 3))()
    ifc = IFComp(layer).fit([torch.ones(2, 4)])
    ifc.save(tmp_path / "run.ifcomp")
    assert torch.equal(IFComp.load(tmp_path / "run.ifcomp", layer).influence(torch.eye(4)), ifc.influence(torch.eye(4)))


def test_skipped_parameters_stay_skipped(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return seeded(lambda: Positions(leading=True))()

    model = make()
    model.get_submodule("token").max_norm = 100.0
    ifc = IFComp(model, skip_uncovered=True).fit([torch.tensor([[0, 1], [2, 3]])])
    ifc.save(tmp_path / "run.ifcomp")
    loaded = IFComp.load(tmp_path / "run.ifcomp", model)
    assert str(loaded.coverage) == str(ifc.coverage)


@pytest.mark.parametrize("kind", [str, Path])
def test_paths_may_be_strings(kind: Callable[[Path], Any], tmp_path: Path) -> None:
    path = kind(tmp_path / "run.ifcomp")
    fitted("linear").save(path)
    assert IFComp.load(path, model()).factors is not None


def content(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return metadata and tensors of a file."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
        metadata = json.loads(file.metadata()["ifcomp"])
    del metadata["sha256"]
    return metadata, tensors


def test_metadata_contain_the_settings_of_the_fit(tmp_path: Path) -> None:
    options = {"beta": 0.5, "fisher": "exact", "label_samples": 2, "seed": 5, "damping": Relative(0.25)}
    fitted("lenet", layers=["9", "11"], sua=True, **options).save(tmp_path / "run.ifcomp")
    metadata, tensors = content(tmp_path / "run.ifcomp")
    assert metadata["schema"] == 2
    assert metadata["version"] == __version__
    assert metadata["count"] == 7
    assert metadata["num_classes"] == 4
    assert metadata["settings"] == {"beta": 0.5, "fisher": "exact", "label_samples": 2, "seed": 5}
    assert metadata["blocks"] == ["9", "11"]
    assert metadata["fingerprint"].keys() == CASES["lenet"].make().state_dict().keys()
    assert {name.split("/")[0] for name in tensors} == {"9", "11", "reference"}


def test_files_contain_no_personal_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "private-folder-name"
    folder.mkdir()
    for variable in ("USER", "LOGNAME", "HOME", "HOSTNAME"):
        monkeypatch.setenv(variable, f"secret-{variable.lower()}")
    monkeypatch.chdir(folder)
    fitted("linear").save("secret-run.ifcomp")
    written = (folder / "secret-run.ifcomp").read_bytes()
    assert b"secret" not in written
    assert b"private" not in written
    assert str(tmp_path).encode() not in written
    assert b"/home" not in written


def test_the_same_fit_gives_the_same_file(tmp_path: Path) -> None:
    for name in ("one", "two"):
        fitted("vision_transformer").save(tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


# Other models -------------------------------------------------------------------------------------------------------


def other_values() -> nn.Module:
    other = model()
    with torch.no_grad():
        other.get_parameter("3.bias")[1] += 1e-6
    return other


OTHERS: list[tuple[str, Callable[[], nn.Module], tuple[str, ...]]] = [
    ("values", other_values, ("different values: 3.bias",)),
    ("precision", lambda: model().double(), ("different values", "0.weight", "3.bias")),
    ("shape", lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Identity(), nn.Linear(6, 3)), ("0.weight",)),
    ("missing", lambda: CASES["linear_no_bias"].make(), ("missing in this model: 0.bias",)),
    ("extra", lambda: nn.Sequential(*model(), nn.Linear(3, 3)), ("only in this model: 4.bias, 4.weight",)),
    ("prefixed", lambda: nn.Sequential(model()), ("missing in this model", "only in this model: 0.0.bias")),
]


@pytest.mark.parametrize(("make", "words"), [pytest.param(*row[1:], id=row[0]) for row in OTHERS])
def test_other_models_are_refused_with_the_differences(
    make: Callable[[], nn.Module], words: tuple[str, ...], saved: Path
) -> None:
    with pytest.raises(FingerprintError) as caught:
        IFComp.load(saved, make())
    message = str(caught.value)
    assert all(word in message for word in (*words, str(saved), "fit again")), message


def test_long_lists_of_differences_are_shortened(tmp_path: Path) -> None:
    fitted("bert").save(tmp_path / "run.ifcomp")
    other = CASES["bert"].make().double()
    with pytest.raises(FingerprintError) as caught:
        IFComp.load(tmp_path / "run.ifcomp", other)
    count = len(other.state_dict()) - 6
    assert f"and {count} more" in str(caught.value)


def test_other_buffers_are_refused(tmp_path: Path) -> None:
    fitted("lenet").save(tmp_path / "run.ifcomp")
    other = CASES["lenet"].make()
    other.get_buffer("1.running_mean").add_(1)
    with pytest.raises(FingerprintError) as caught:
        IFComp.load(tmp_path / "run.ifcomp", other)
    assert "1.running_mean" in str(caught.value)


class Shifted(nn.Module):
    """A model with a buffer that is not in its state dict."""

    def __init__(self, shift: float) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.register_buffer("shift", torch.tensor([shift]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x - self.shift)


def test_other_buffers_outside_the_state_dict_are_refused(tmp_path: Path) -> None:
    fitted_model, other = Shifted(0.0), Shifted(3.0)
    other.load_state_dict(fitted_model.state_dict())
    IFComp(fitted_model).fit([torch.eye(4)]).save(tmp_path / "run.ifcomp")
    with pytest.raises(FingerprintError) as caught:
        IFComp.load(tmp_path / "run.ifcomp", other)
    assert "shift" in str(caught.value)


def test_other_frozen_parameters_are_refused(saved: Path) -> None:
    other = model()
    other.get_submodule("0").requires_grad_(False)
    with pytest.raises(FingerprintError) as caught:
        IFComp.load(saved, other).influence(inputs_of("linear"))
    assert "0" in str(caught.value)
    assert "it again" in str(caught.value)


# Damaged and foreign files ------------------------------------------------------------------------------------------


class Trap:
    """An object that creates a file when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.trace,)


@pytest.mark.parametrize("kept", [0, 1, 7, 8, 9, 100, 0.5, 0.9, -1])
def test_truncated_files_are_refused(kept: float, saved: Path) -> None:
    whole = saved.read_bytes()
    saved.write_bytes(whole[: int(kept * len(whole)) if isinstance(kept, float) else kept])
    assert_refused(saved, str(saved), "truncated", "safetensors file")


def test_flipped_bits_in_the_header_are_refused(saved: Path) -> None:
    whole = bytearray(saved.read_bytes())
    for position in (0, 3, 8, 20):
        damaged = bytearray(whole)
        damaged[position] ^= 0x55
        saved.write_bytes(damaged)
        assert_refused(saved, str(saved))


def test_every_flipped_bit_is_refused(saved: Path) -> None:
    """Single bits of tensors, of their digest, and of the metadata."""
    whole = saved.read_bytes()
    length = 8 + int.from_bytes(whole[:8], "little")
    places = torch.linspace(length, len(whole) - 1, 60).long().tolist()
    places += [whole.index(text) + 2 for text in (b"sha256", b'count\\": ', b"beta", b'damping\\": ')]
    for number, place in enumerate(places):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << number % 8
        saved.write_bytes(damaged)
        assert_refused(saved, str(saved))


@pytest.mark.parametrize("entry", ["blocks", "fingerprint"])
def test_names_with_line_breaks_are_refused(entry: str, saved: Path) -> None:
    """Messages list such names, so a file of somebody else could add lines to them."""
    name = "a\nError: b\x1b[2J"

    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        if entry == "blocks":
            metadata["blocks"].append(name)
            tensors[f"{name}/second_moments"] = torch.ones(3)
        else:
            metadata["fingerprint"][name] = "0"

    rewrite(saved, change)
    with pytest.raises(StorageError, match="a name contains control characters") as caught:
        IFComp.load(saved, model())
    assert len(str(caught.value).splitlines()) == 1


def test_missing_files_are_refused(tmp_path: Path) -> None:
    assert_refused(tmp_path / "nowhere.ifcomp", "nowhere.ifcomp", "no such file")


def test_folders_are_refused_as_fits(tmp_path: Path) -> None:
    assert_refused(tmp_path, f"'{tmp_path}': it is a folder")


def test_foreign_safetensors_files_are_refused(tmp_path: Path) -> None:
    save_file(dict(model().state_dict()), tmp_path / "weights.safetensors")
    assert_refused(tmp_path / "weights.safetensors", "weights.safetensors", "not one written by ifcomp")
    save_file(dict(model().state_dict()), tmp_path / "weights.safetensors", metadata={"format": "pt"})
    assert_refused(tmp_path / "weights.safetensors", "not one written by ifcomp")


@pytest.mark.parametrize("write", ["pickle", "torch", "torch_legacy"])
def test_pickles_are_refused_and_not_executed(write: str, tmp_path: Path) -> None:
    path, trace = tmp_path / "run.ifcomp", tmp_path / "executed"
    if write == "pickle":
        path.write_bytes(pickle.dumps(Trap(trace)))
    else:
        torch.save(Trap(trace), path, _use_new_zipfile_serialization=write == "torch")
    assert_refused(path, str(path), "safetensors file")
    assert not trace.exists()


@pytest.mark.parametrize("text", ["", "hello", "{}", "PK\x03\x04", "\x00" * 64])
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.ifcomp"
    path.write_text(text)
    assert_refused(path, str(path), "safetensors file")


Metadata = dict[str, Any]
Tensors = dict[str, Tensor]


def rewrite(path: Path, change: Callable[[Metadata, Tensors], object]) -> None:
    metadata, tensors = content(path)
    change(metadata, tensors)
    write_tensors(path, tensors, "ifcomp", metadata)


def set_first(tensors: Tensors, name: str, value: float) -> None:
    tensors[name].view(-1)[0] = value


DAMAGE: list[tuple[str, Callable[[Metadata, Tensors], object], tuple[str, ...]]] = [
    ("schema_unknown", lambda m, t: m.update(schema=99), ("schema 99", "reads 2", "fit again")),
    ("schema_missing", lambda m, t: m.pop("schema"), ("schema None", "fit again")),
    ("schema_text", lambda m, t: m.update(schema="1"), ("schema",)),
    ("no_count", lambda m, t: m.pop("count"), ("damaged", "count")),
    ("count_text", lambda m, t: m.update(count="many"), ("damaged", "count")),
    ("count_zero", lambda m, t: m.update(count=0), ("damaged", "count")),
    ("count_negative", lambda m, t: m.update(count=-7), ("damaged", "count")),
    ("classes_other", lambda m, t: m.update(num_classes=5), ("classes",)),
    ("no_settings", lambda m, t: m.pop("settings"), ("damaged", "settings")),
    ("settings_unknown", lambda m, t: m["settings"].update(temperature=1), ("damaged", "temperature")),
    ("settings_wrong", lambda m, t: m["settings"].update(beta=-1), ("damaged", "beta")),
    ("settings_list", lambda m, t: m.update(settings=[1, 2]), ("damaged",)),
    ("no_blocks", lambda m, t: m.pop("blocks"), ("damaged", "blocks")),
    ("blocks_number", lambda m, t: m.update(blocks=3), ("damaged",)),
    ("block_unknown", lambda m, t: m["blocks"].append("ghost"), ("ghost",)),
    ("block_lost", lambda m, t: m["blocks"].remove("0"), ("0", "it again")),
    ("no_fingerprint", lambda m, t: m.pop("fingerprint"), ("damaged", "fingerprint")),
    ("fingerprint_list", lambda m, t: m.update(fingerprint=["x"]), ("damaged",)),
    ("no_options", lambda m, t: m.pop("options"), ("damaged", "options")),
    ("options_empty", lambda m, t: m.update(options={}), ("damaged", "damping")),
    ("damping_text", lambda m, t: m["options"].update(damping="much"), ("damaged", "much")),
    ("damping_negative", lambda m, t: m["options"].update(damping=-1), ("damaged", "-1")),
    ("selection_unknown", lambda m, t: m["options"]["selection"].update(more=1), ("damaged", "more")),
    ("selection_wrong", lambda m, t: m["options"]["selection"].update(sua="maybe"), ("damaged", "maybe")),
    ("moments_nan", lambda m, t: set_first(t, "0/second_moments", np.nan), ("'0'", "not finite")),
    ("moments_infinite", lambda m, t: set_first(t, "3/second_moments", np.inf), ("'3'", "not finite")),
    ("moments_negative", lambda m, t: set_first(t, "3/second_moments", -1.0), ("'3'", "negative")),
    ("basis_nan", lambda m, t: set_first(t, "0/basis.inputs", np.nan), ("'0'", "not finite")),
    ("moments_whole", lambda m, t: t.update({"0/second_moments": torch.ones(1, 5, 5, dtype=torch.long)}), ("'0'",)),
    ("no_moments", lambda m, t: t.pop("0/second_moments"), ("damaged", "0/second_moments")),
    ("no_inputs", lambda m, t: t.pop("0/basis.inputs"), ("0",)),
    ("no_outputs", lambda m, t: t.pop("0/basis.outputs"), ("0",)),
    ("moments_shape", lambda m, t: t.update({"0/second_moments": torch.ones(1, 4, 5)}), ("0",)),
    ("inputs_shape", lambda m, t: t.update({"0/basis.inputs": torch.eye(4)[None]}), ("0",)),
    ("outputs_shape", lambda m, t: t.update({"0/basis.outputs": torch.eye(4)[None]}), ("0",)),
]


@pytest.mark.parametrize(("change", "words"), [pytest.param(*row[1:], id=row[0]) for row in DAMAGE])
def test_damaged_content_is_refused(
    change: Callable[[Metadata, Tensors], object], words: tuple[str, ...], saved: Path
) -> None:
    rewrite(saved, change)
    assert_refused(saved, *words)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", '"text"', "{}"])
def test_damaged_metadata_are_refused(text: str, saved: Path) -> None:
    save_file(content(saved)[1], saved, metadata={"ifcomp": text})
    assert_refused(saved, str(saved))
