"""Files: what is written comes back bit for bit, and nothing else is accepted or executed."""

import errno
import json
import os
import pickle
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from cases import LAYER_CASES, MODEL_CASES, Positions, seeded
from comparison import as_type
from ifcomp import IFComp, Relative, ScoreTable, __version__
from ifcomp.errors import FingerprintError, StorageError
from ifcomp.io.files import written_atomically
from oracles import Inputs

CASES = {case.name: case for case in [*LAYER_CASES, *MODEL_CASES]}

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


def fitted(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> IFComp:
    case = CASES[name]
    return IFComp(case.make().to(dtype), **options).fit([as_type(case.sample(7, seed=1), dtype)])


def inputs_of(name: str, dtype: torch.dtype = torch.float32) -> Inputs:
    return as_type(CASES[name].sample(5), dtype)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A file of the simplest case."""
    path = tmp_path / "run.ifcomp"
    fitted("linear").save(path)
    return path


def model() -> nn.Module:
    """The model of `saved`."""
    return CASES["linear"].make()


def refused(path: Path, *words: str) -> str:
    """Loading the file, or scoring with it, is refused with a message that names it and has these words."""
    with pytest.raises(StorageError) as caught:
        IFComp.load(path, model()).influence(inputs_of("linear"))
    message = str(caught.value)
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in: {message}"
    return message


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


def test_a_loaded_fit_can_be_saved_again(saved: Path, tmp_path: Path) -> None:
    IFComp.load(saved, model()).save(tmp_path / "again.ifcomp")
    assert (tmp_path / "again.ifcomp").read_bytes() == saved.read_bytes()


def test_a_loaded_fit_can_be_fitted_again(saved: Path) -> None:
    loaded = IFComp.load(saved, model())
    loaded.fit([CASES["linear"].sample(7, seed=1)])
    assert torch.equal(loaded.influence(inputs_of("linear")), fitted("linear").influence(inputs_of("linear")))


class FoldedSecond(nn.Module):
    """A layer without bias on [T * B, F], the examples of one position together."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 5, bias=False)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.transpose(0, 1).reshape(-1, x.shape[2])
        return self.head(torch.relu(self.fc(rows)).view(x.shape[1], len(x), -1).mean(0))


def test_a_loaded_fit_does_not_depend_on_what_it_scores_first(tmp_path: Path) -> None:
    """Inputs without a gradient say nothing about where a layer's batch axis is."""
    x = torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(0))
    ifc = IFComp(seeded(FoldedSecond)()).fit([x])
    ifc.save(tmp_path / "run.ifcomp")
    loaded = IFComp.load(tmp_path / "run.ifcomp", seeded(FoldedSecond)())
    loaded.influence(torch.zeros_like(x))
    assert torch.equal(loaded.influence(x), ifc.influence(x))


def test_a_model_that_is_one_layer_can_be_saved(tmp_path: Path) -> None:
    layer = seeded(lambda: nn.Linear(4, 3))()
    ifc = IFComp(layer).fit([torch.ones(2, 4)])
    ifc.save(tmp_path / "run.ifcomp")
    assert torch.equal(IFComp.load(tmp_path / "run.ifcomp", layer).influence(torch.eye(4)), ifc.influence(torch.eye(4)))


def test_skipped_parameters_stay_skipped(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return seeded(lambda: Positions(leading=True))()

    torn = make()
    torn.get_submodule("token").max_norm = 100.0
    ifc = IFComp(torn, skip_uncovered=True).fit([torch.tensor([[0, 1], [2, 3]])])
    ifc.save(tmp_path / "run.ifcomp")
    loaded = IFComp.load(tmp_path / "run.ifcomp", torn)
    assert str(loaded.coverage) == str(ifc.coverage)


@pytest.mark.parametrize("kind", [str, Path])
def test_paths_may_be_text(kind: Callable[[Path], Any], tmp_path: Path) -> None:
    path = kind(tmp_path / "run.ifcomp")
    fitted("linear").save(path)
    assert IFComp.load(path, model()).factors is not None


def content(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Metadata and tensors of a file."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
        return json.loads(file.metadata()["ifcomp"]), tensors


def test_metadata_say_how_the_fit_was_made(tmp_path: Path) -> None:
    options = {"beta": 0.5, "fisher": "exact", "label_samples": 2, "seed": 5, "damping": Relative(0.25)}
    fitted("lenet", layers=["9", "11"], sua=True, **options).save(tmp_path / "run.ifcomp")
    metadata, tensors = content(tmp_path / "run.ifcomp")
    assert metadata["schema"] == 1
    assert metadata["version"] == __version__
    assert metadata["count"] == 7
    assert metadata["num_classes"] == 4
    assert metadata["settings"] == {"beta": 0.5, "fisher": "exact", "label_samples": 2, "seed": 5}
    assert metadata["blocks"] == ["9", "11"]
    assert metadata["fingerprint"].keys() == CASES["lenet"].make().state_dict().keys()
    assert {name.split("/")[0] for name in tensors} == {"9", "11"}


def test_the_file_says_nothing_about_who_and_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_another_model_is_refused_by_name(make: Callable[[], nn.Module], words: tuple[str, ...], saved: Path) -> None:
    with pytest.raises(FingerprintError) as caught:
        IFComp.load(saved, make())
    message = str(caught.value)
    assert all(word in message for word in (*words, str(saved), "fit again")), message


def test_many_differences_are_counted(tmp_path: Path) -> None:
    fitted("bert").save(tmp_path / "run.ifcomp")
    other = CASES["bert"].make().double()
    with pytest.raises(FingerprintError) as caught:
        IFComp.load(tmp_path / "run.ifcomp", other)
    count = len(other.state_dict()) - 6
    assert f"and {count} more" in str(caught.value)


def test_another_buffer_is_refused(tmp_path: Path) -> None:
    fitted("lenet").save(tmp_path / "run.ifcomp")
    other = CASES["lenet"].make()
    other.get_buffer("1.running_mean").add_(1)
    with pytest.raises(FingerprintError) as caught:
        IFComp.load(tmp_path / "run.ifcomp", other)
    assert "1.running_mean" in str(caught.value)


class Shifted(nn.Module):
    """A model with a constant that is not in its state dict."""

    def __init__(self, shift: float) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.register_buffer("shift", torch.tensor([shift]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x - self.shift)


def test_another_buffer_outside_the_state_dict_is_refused(tmp_path: Path) -> None:
    one, other = Shifted(0.0), Shifted(3.0)
    other.load_state_dict(one.state_dict())
    IFComp(one).fit([torch.eye(4)]).save(tmp_path / "run.ifcomp")
    with pytest.raises(FingerprintError) as caught:
        IFComp.load(tmp_path / "run.ifcomp", other)
    assert "shift" in str(caught.value)


def test_a_model_with_other_frozen_parts_is_refused(saved: Path) -> None:
    other = model()
    other.get_submodule("0").requires_grad_(False)
    with pytest.raises(FingerprintError) as caught:
        IFComp.load(saved, other).influence(inputs_of("linear"))
    assert "0" in str(caught.value)
    assert "it again" in str(caught.value)


# Damaged and foreign files ------------------------------------------------------------------------------------------


class Trap:
    """Unpickling it leaves a trace."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.trace,)


@pytest.mark.parametrize("kept", [0, 1, 7, 8, 9, 100, 0.5, 0.9, -1])
def test_a_truncated_file_is_refused(kept: float, saved: Path) -> None:
    whole = saved.read_bytes()
    saved.write_bytes(whole[: int(kept * len(whole)) if isinstance(kept, float) else kept])
    refused(saved, str(saved), "truncated", "safetensors file")


def test_bytes_that_were_flipped_in_the_header_are_refused(saved: Path) -> None:
    whole = bytearray(saved.read_bytes())
    for position in (0, 3, 8, 20):
        torn = bytearray(whole)
        torn[position] ^= 0x55
        saved.write_bytes(torn)
        refused(saved, str(saved))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere.ifcomp", "nowhere.ifcomp", "no such file")


def test_a_folder_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, f"'{tmp_path}': it is a folder")


def test_a_foreign_safetensors_file_is_refused(tmp_path: Path) -> None:
    save_file(dict(model().state_dict()), tmp_path / "weights.safetensors")
    refused(tmp_path / "weights.safetensors", "weights.safetensors", "not one written by ifcomp")
    save_file(dict(model().state_dict()), tmp_path / "weights.safetensors", metadata={"format": "pt"})
    refused(tmp_path / "weights.safetensors", "not one written by ifcomp")


@pytest.mark.parametrize("write", ["pickle", "torch", "torch_legacy"])
def test_a_pickle_is_refused_and_never_executed(write: str, tmp_path: Path) -> None:
    path, trace = tmp_path / "run.ifcomp", tmp_path / "executed"
    if write == "pickle":
        path.write_bytes(pickle.dumps(Trap(trace)))
    else:
        torch.save(Trap(trace), path, _use_new_zipfile_serialization=write == "torch")
    refused(path, str(path), "safetensors file")
    assert not trace.exists()


@pytest.mark.parametrize("text", ["", "hello", "{}", "PK\x03\x04", "\x00" * 64])
def test_any_other_file_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.ifcomp"
    path.write_text(text)
    refused(path, str(path), "safetensors file")


Metadata = dict[str, Any]
Tensors = dict[str, Tensor]


def rewrite(path: Path, change: Callable[[Metadata, Tensors], object]) -> None:
    metadata, tensors = content(path)
    change(metadata, tensors)
    save_file(tensors, path, metadata={"ifcomp": json.dumps(metadata)})


def put(tensors: Tensors, name: str, value: float) -> None:
    tensors[name].view(-1)[0] = value


DAMAGE: list[tuple[str, Callable[[Metadata, Tensors], object], tuple[str, ...]]] = [
    ("schema_unknown", lambda m, t: m.update(schema=99), ("schema 99", "reads 1", "fit again")),
    ("schema_missing", lambda m, t: m.pop("schema"), ("damaged", "Fit again")),
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
    ("moments_nan", lambda m, t: put(t, "0/second_moments", np.nan), ("'0'", "not finite")),
    ("moments_infinite", lambda m, t: put(t, "3/second_moments", np.inf), ("'3'", "not finite")),
    ("moments_negative", lambda m, t: put(t, "3/second_moments", -1.0), ("'3'", "negative")),
    ("basis_nan", lambda m, t: put(t, "0/basis.inputs", np.nan), ("'0'", "not finite")),
    ("moments_whole", lambda m, t: t.update({"0/second_moments": torch.ones(1, 5, 5, dtype=torch.long)}), ("'0'",)),
    ("no_moments", lambda m, t: t.pop("0/second_moments"), ("damaged", "0/second_moments")),
    ("no_inputs", lambda m, t: t.pop("0/basis.inputs"), ("0",)),
    ("no_outputs", lambda m, t: t.pop("0/basis.outputs"), ("0",)),
    ("moments_shape", lambda m, t: t.update({"0/second_moments": torch.ones(1, 4, 5)}), ("0",)),
    ("inputs_shape", lambda m, t: t.update({"0/basis.inputs": torch.eye(4)[None]}), ("0",)),
    ("outputs_shape", lambda m, t: t.update({"0/basis.outputs": torch.eye(4)[None]}), ("0",)),
]


@pytest.mark.parametrize(("change", "words"), [pytest.param(*row[1:], id=row[0]) for row in DAMAGE])
def test_damage_is_refused(change: Callable[[Metadata, Tensors], object], words: tuple[str, ...], saved: Path) -> None:
    rewrite(saved, change)
    refused(saved, *words)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", '"text"', "{}"])
def test_damaged_json_is_refused(text: str, saved: Path) -> None:
    save_file(content(saved)[1], saved, metadata={"ifcomp": text})
    refused(saved, str(saved), "metadata is damaged", "Fit again")


# Writing ------------------------------------------------------------------------------------------------------------


class Interrupted(BaseException):
    """As when someone presses Ctrl-C."""


ABORTS: list[tuple[str, BaseException]] = [
    ("disk_full", OSError(errno.ENOSPC, "No space left on device")),
    ("serialisation", SafetensorError("Error while serializing: I/O error: No space left on device")),
    ("interrupt", Interrupted()),
]


def aborting(error: BaseException) -> Callable[..., None]:
    def write(tensors: Tensors, path: Path, **_: Any) -> None:
        Path(path).write_bytes(b"half of a file")
        raise error

    return write


@pytest.mark.parametrize("error", [pytest.param(row[1], id=row[0]) for row in ABORTS])
def test_an_aborted_write_leaves_the_old_file(
    error: BaseException, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ifc, before = fitted("lenet"), saved.read_bytes()
    monkeypatch.setattr("ifcomp.io.factor_files.save_file", aborting(error))
    with pytest.raises((type(error), StorageError)):
        ifc.save(saved)
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]


@pytest.mark.parametrize("error", [pytest.param(row[1], id=row[0]) for row in ABORTS[:2]])
def test_a_full_disk_has_its_own_error(error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ifcomp.io.factor_files.save_file", aborting(error))
    with pytest.raises(StorageError) as caught:
        fitted("linear").save(tmp_path / "run.ifcomp")
    assert "run.ifcomp" in str(caught.value)
    assert "No space left" in str(caught.value)


def test_a_reader_of_the_old_file_is_not_disturbed(saved: Path) -> None:
    before = saved.read_bytes()
    with saved.open("rb") as reader:
        fitted("lenet").save(saved)
        assert reader.read() == before
    assert saved.read_bytes() != before


def test_saving_replaces_an_older_file(saved: Path) -> None:
    fitted("lenet").save(saved)
    assert IFComp.load(saved, CASES["lenet"].make()).factors is not None
    assert list(saved.parent.iterdir()) == [saved]


def unwritable(tmp_path: Path) -> dict[str, Path]:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    return {"missing": tmp_path / "missing" / "run", "file": tmp_path / "file" / "run", "folder": tmp_path / "folder"}


@pytest.mark.parametrize("kind", ["missing", "file", "folder"])
def test_a_place_that_cannot_be_written_is_refused(kind: str, tmp_path: Path) -> None:
    path = unwritable(tmp_path)[kind]
    ifc = fitted("linear")
    table = ifc.score([inputs_of("linear")])
    for write in (ifc.save, table.to_csv, table.to_parquet):
        with pytest.raises(StorageError) as caught:
            write(path)
        assert str(path) in str(caught.value)
        assert "folder" in str(caught.value).replace(str(path), "")


def test_a_folder_without_permission_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    ifc = fitted("linear")
    monkeypatch.setattr("ifcomp.io.files.Path.mkdir", denied)
    with pytest.raises(StorageError) as caught:
        ifc.save(tmp_path / "run.ifcomp")
    assert "Permission denied" in str(caught.value)
    assert "writable" in str(caught.value)


@pytest.fixture
def umask() -> Iterator[Callable[[int], int]]:
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_permissions_follow_the_umask(mask: int, mode: int, umask: Callable[[int], int], tmp_path: Path) -> None:
    ifc = fitted("linear")
    table = ifc.score([inputs_of("linear")])
    umask(mask)
    for name, write in (("run", ifc.save), ("csv", table.to_csv), ("parquet", table.to_parquet)):
        write(tmp_path / name)
        assert (tmp_path / name).stat().st_mode & 0o777 == mode


def test_a_scratch_file_is_beside_its_target(tmp_path: Path) -> None:
    with written_atomically(tmp_path / "target") as scratch:
        assert scratch.parent.parent == tmp_path  # on the same disk
        assert not (tmp_path / "target").exists()
        scratch.write_text("whole")
    assert (tmp_path / "target").read_text() == "whole"


# Tables -------------------------------------------------------------------------------------------------------------


@cache
def table(labelled: bool = True, probes: int | None = None) -> ScoreTable:
    inputs = inputs_of("lenet")
    labels = torch.tensor([0, 1, 2, 3, 0])
    data = [(inputs, labels)] if labelled else [inputs]
    return fitted("lenet", beta=0.5).score(data, alpha=0.3, probes=probes)


TABLES = [(True, None), (False, None), (True, 2), (False, 2)]


@pytest.mark.parametrize(("labelled", "probes"), TABLES)
def test_tables_come_back_from_csv(labelled: bool, probes: int | None, tmp_path: Path) -> None:
    table(labelled, probes).to_csv(tmp_path / "scores.csv")
    frame = table(labelled, probes).frame
    found = pd.read_csv(tmp_path / "scores.csv", dtype=str)
    pd.testing.assert_frame_equal(found.astype(frame.dtypes.to_dict()), frame, check_exact=True)


@pytest.mark.parametrize(("labelled", "probes"), TABLES)
def test_tables_come_back_from_parquet(labelled: bool, probes: int | None, tmp_path: Path) -> None:
    one = table(labelled, probes)
    one.to_parquet(tmp_path / "scores.parquet")
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "scores.parquet"), one.frame, check_exact=True)
    schema = pq.read_schema(tmp_path / "scores.parquet")
    settings = json.loads(schema.metadata[b"ifcomp"])
    assert settings == json.loads(json.dumps(dict(one.settings)))
    assert (settings["alpha"], settings["beta"], settings["probes"]) == (0.3, 0.5, probes)
    assert settings["training_examples"] == 7
    assert settings["version"] == __version__
    for field in schema:
        assert field.metadata[b"description"].decode() == one.descriptions[field.name]


@pytest.mark.parametrize(("labelled", "probes"), TABLES)
def test_every_column_is_described(labelled: bool, probes: int | None) -> None:
    one = table(labelled, probes)
    assert list(one.descriptions) == list(one.frame.columns)
    assert all(one.descriptions.values())
    exact = [] if probes else ["bounded_complexity"]
    for name in ("expected_influence", "parametric_complexity", "surprise", *exact):
        assert "larger = more surprising" in one.descriptions[name]
    assert "nats" in one.descriptions["parametric_complexity"]
    if labelled:
        assert "nats" in one.descriptions["error"]
        assert "larger = more suspicious" in one.descriptions["stochastic_complexity"]


@pytest.mark.parametrize(("labelled", "probes"), TABLES)
def test_columns_are_those_that_can_be_known(labelled: bool, probes: int | None) -> None:
    columns = ["index", "prediction", "confidence", "expected_influence"]
    columns += ["expected_influence_error"] if probes else []
    columns += ["parametric_complexity", *([] if probes else ["bounded_complexity"]), "surprise"]
    if labelled:
        columns += ["label", "label_probability", "suggested_label", "suggested_probability", "error"]
        columns += ["label_complexity"]
        columns += [] if probes else ["influence", "regret"]
        columns += ["stochastic_complexity"]
    assert list(table(labelled, probes).frame.columns) == columns


def test_a_printed_table_says_direction_and_unit() -> None:
    text = str(table())
    assert "5 examples" in text
    assert "larger = more surprising" in text
    assert "nats" in text
    assert all(name in text for name in table().frame.columns)


def test_a_long_table_is_printed_short() -> None:
    frame = pd.concat([table().frame] * 40, ignore_index=True)
    text = str(ScoreTable(frame, table().settings))
    assert "200 examples" in text
    assert len(text.splitlines()) < 20


def test_a_table_knows_its_length() -> None:
    assert len(table()) == 5
