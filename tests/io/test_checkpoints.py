"""Checkpoints of other work, other data and damaged files are refused; one process at a time."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from resumable_jobs import LINEAR_MATRICES, NUM_BATCHES, Kill, Killed, data, fit, network, score
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from ifcomp import Checkpoint, IFComp, Relative
from ifcomp.errors import CheckpointError, DataError, SettingError, StorageError
from ifcomp.io.tensor_files import write_tensors


def resume(path: Path, batches: Any = None, model_seed: int = 0, **options: Any) -> None:
    """Resume the fit of the fixture ``unfinished_fit``."""
    limit = options.pop("max_memory", None)
    with Checkpoint(path, 0) as checkpoint:
        ifc = IFComp(network(model_seed), **{"layers": ["hidden", "head"], **options})
        ifc.fit(data() if batches is None else batches, max_memory=limit, checkpoint=checkpoint)


# Other work ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_seed": 1}, "model: "),
        ({"beta": 0.5}, "settings: [{'beta': 1.0"),
        ({"label_samples": 2}, "settings: "),
        ({"layers": ["head"]}, "selection: "),
        ({"max_memory": "1GB"}, "max_memory: None there, 1000000000 here"),
    ],
)
def test_other_work_is_refused_with_the_differences(
    unfinished_fit: Path, changed: dict[str, Any], message: str
) -> None:
    before = unfinished_fit.read_bytes()
    with pytest.raises(CheckpointError) as caught:
        resume(unfinished_fit, **changed)
    assert message in str(caught.value)
    assert "delete the file to start again" in str(caught.value)
    assert unfinished_fit.read_bytes() == before


def test_scoring_does_not_resume_a_fit(unfinished_fit: Path) -> None:
    ifc = IFComp(network()).fit(data())
    with pytest.raises(CheckpointError, match="work: fit there, score here"), Checkpoint(unfinished_fit) as checkpoint:
        ifc.score(data(), checkpoint=checkpoint)


def test_scores_of_another_fit_or_damping_are_refused(kill: Kill, tmp_path: Path) -> None:
    def score_after_fit(batches: int, **options: Any) -> None:
        ifc = IFComp(network()).fit(data()[:batches])
        with Checkpoint(tmp_path / "rows", 0) as checkpoint:
            ifc.score(data(), checkpoint=checkpoint, **options)

    kill(1)
    with pytest.raises(Killed):
        score_after_fit(3)
    kill(0)
    with pytest.raises(CheckpointError, match="fit: "):
        score_after_fit(2)
    with pytest.raises(CheckpointError, match=r"damping: Relative\(multiple=0.1\) there, Relative\(multiple=1\) here"):
        score_after_fit(3, damping=Relative(1))
    with pytest.raises(CheckpointError, match="options: "):
        score_after_fit(3, alpha=0.5)
    score_after_fit(3)


# Other data ---------------------------------------------------------------------------------------------------------


def reordered() -> list[tuple[Tensor, Tensor]]:
    (x, y), *rest = data()
    return [(x.flip(0), y.flip(0)), *rest]


def relabelled() -> list[tuple[Tensor, Tensor]]:
    (x, y), *rest = data()
    return [(x, (y + 1) % 3), *rest]


@pytest.mark.parametrize(
    "batches",
    [
        reordered(),
        relabelled(),
        data()[::-1],
        data()[:1],
        data()[:2],
        [(torch.cat([x for x, _ in data()]), torch.cat([y for _, y in data()]))],
        [part for x, y in data() for part in zip(x.split(2), y.split(2), strict=True)],
    ],
    ids=["order", "labels", "order_of_batches", "fewer", "without_end", "larger_batches", "smaller_batches"],
)
def test_other_data_is_refused(unfinished_fit: Path, batches: Any) -> None:
    before = unfinished_fit.read_bytes()
    with pytest.raises(CheckpointError, match="The data differs from the data of the checkpoint") as caught:
        resume(unfinished_fit, batches)
    assert not hasattr(caught.value, "__notes__")  # repeating the call would not help
    assert unfinished_fit.read_bytes() == before
    resume(unfinished_fit)


@pytest.mark.parametrize("place", [0, 1, 2], ids=["first_batch", "second_batch", "last_batch"])
@pytest.mark.parametrize("number", [NUM_BATCHES, NUM_BATCHES + 1, NUM_BATCHES + LINEAR_MATRICES, NUM_BATCHES + 5])
def test_other_data_after_the_first_pass_is_refused(number: int, place: int, kill: Kill, tmp_path: Path) -> None:
    """Killed at the end of the first pass, between the passes, or at the start of the second."""
    path, other = tmp_path / "work.partial", data()
    other[place] = (other[place][0], (other[place][1] + 1) % 3)
    kill(number)
    with pytest.raises(Killed):
        resume(path)
    kill(0)
    with pytest.raises(CheckpointError, match="The data differs from the data of the checkpoint"):
        resume(path, other)
    if not place:  # refused before anything was done with it
        resume(path)


def test_data_that_differs_between_the_passes_is_refused(tmp_path: Path) -> None:
    class Changing:
        reads = 0

        def __iter__(self) -> Any:
            self.reads += 1
            *rest, (x, y) = data()
            return iter([*rest, (x, (y + (self.reads > 3)) % 3)])  # the check of the order reads it twice

    with pytest.raises(CheckpointError, match="The data differs"):
        resume(tmp_path / "work.partial", Changing())


def test_shuffled_loaders_are_refused(tmp_path: Path) -> None:
    x, y = data()[0]
    loader = DataLoader(TensorDataset(x, y), 2, shuffle=True)
    with pytest.raises(DataError, match="shuffle=False"):
        fit(tmp_path / "work.partial", batches=loader)
    with pytest.raises(DataError, match="shuffle=False"):
        score(tmp_path / "work.partial", batches=loader)
    score(tmp_path / "work.partial", batches=DataLoader(TensorDataset(x, y), 2))


# Damaged files ------------------------------------------------------------------------------------------------------


def rewrite(path: Path, change: Callable[[dict[str, Any], dict[str, Tensor]], object]) -> None:
    with safe_open(path, framework="pt") as file:
        content = json.loads(file.metadata()["ifcomp-checkpoint"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(content, tensors)
    write_tensors(path, tensors, "ifcomp-checkpoint", content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "foreign": lambda path: save_file({"x": torch.ones(2)}, path),
    "schema": lambda path: rewrite(path, lambda content, _: content.update(schema=2)),
    "stage": lambda path: rewrite(path, lambda content, _: content.update(stage="lunch")),
    "no_key": lambda path: rewrite(path, lambda content, _: content.pop("key")),
    "no_settings": lambda path: rewrite(path, lambda content, _: content.pop("settings")),
    "settings_list": lambda path: rewrite(path, lambda content, _: content.update(settings=[])),
    "negative_position": lambda path: rewrite(path, lambda content, _: content.update(position=-1)),
    "shape": lambda path: rewrite(
        path, lambda _, tensors: tensors.update({"shared/basis/inputs/head": torch.ones(1, 1, 1)})
    ),
    "sums": lambda path: rewrite(path, lambda _, tensors: tensors.update({"local/moments/0/head": torch.ones(1)})),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoints_are_refused(damage: str, unfinished_fit: Path) -> None:
    DAMAGES[damage](unfinished_fit)
    with pytest.raises(CheckpointError, match=r"[Dd]elete it to start again"):
        resume(unfinished_fit)
    assert unfinished_fit.exists()


def test_a_rewritten_checkpoint_without_damage_is_resumed(unfinished_fit: Path) -> None:
    rewrite(unfinished_fit, lambda content, tensors: None)
    resume(unfinished_fit)
    assert not unfinished_fit.exists()


@pytest.mark.parametrize("change", [lambda rows: rows[:-1], lambda rows: rows.repeat(2)], ids=["fewer", "more"])
def test_rows_are_those_up_to_the_position(change: Callable[[Tensor], Tensor], kill: Kill, tmp_path: Path) -> None:
    path = tmp_path / "rows"
    kill(2)
    with pytest.raises(Killed):
        score(path)
    kill(0)
    rewrite(path, lambda _, tensors: tensors.update({name: change(rows) for name, rows in tensors.items()}))
    with pytest.raises(CheckpointError, match="the rows of all examples in order"):
        score(path)


# The context --------------------------------------------------------------------------------------------------------


def test_a_checkpoint_serves_one_call(tmp_path: Path) -> None:
    ifc, checkpoint = IFComp(network()), Checkpoint(tmp_path / "work.partial")
    with pytest.raises(SettingError, match="in a with statement"):
        ifc.fit(data(), checkpoint=checkpoint)
    with checkpoint:
        ifc.fit(data(), checkpoint=checkpoint)
        with pytest.raises(SettingError, match="serves one fit, score or audit"):
            ifc.score(data(), checkpoint=checkpoint)
        with pytest.raises(SettingError, match="entered twice"), checkpoint:
            pass
    with checkpoint:
        ifc.score(data(), checkpoint=checkpoint)


@pytest.mark.parametrize("every", [-1, float("nan"), float("inf"), "60", True, None])
def test_seconds_must_be_a_number(every: Any) -> None:
    with pytest.raises(SettingError, match="seconds of at least 0"):
        Checkpoint("work.partial", every)


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "work.partial"
    code = f"from ifcomp.io.files import file_lock\nwith file_lock({str(path)!r}): pass"  # does not import torch
    call = [sys.executable, "-c", code]
    with Checkpoint(path):
        ended = subprocess.run(call, capture_output=True, text=True, check=False)
        assert "StorageError: Another process is working on" in ended.stderr
        with pytest.raises(StorageError, match="Another process"), Checkpoint(path):
            pass
    subprocess.run(call, check=True)
    assert list(tmp_path.iterdir()) == []


def test_scratch_files_of_killed_writers_are_removed(tmp_path: Path) -> None:
    for name in (".work.partial.0123abcd", ".work.partial-1.0123abcd", ".other.0123abcd", ".work.partial.mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").write_text("half")
    with Checkpoint(tmp_path / "work.partial"):
        pass
    remaining = sorted(path.name for path in tmp_path.iterdir())
    assert remaining == [".other.0123abcd", ".work.partial-1.0123abcd", ".work.partial.mine"]
