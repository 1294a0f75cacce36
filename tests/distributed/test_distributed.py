"""Several real processes give the results of one, and no process hangs."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file
from sklearn.datasets import load_digits

from distributed import worker
from ifcomp import Checkpoint, distributed
from ifcomp.data.batches import as_batches
from ifcomp.distributed import (
    ProcessInfo,
    all_reduce_sum,
    data_parallel,
    gather_rows,
    process_info,
    run_distributed,
    shard_batches,
)
from ifcomp.errors import CheckpointError, DataError
from ifcomp.io import resumable
from ifcomp.io.checkpoint_files import SavedState

WORKER = Path(worker.__file__)


MODULE = """
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 10))
"""


def run(*arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def torchrun(processes: int, *arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess:
    launch = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}")
    return run(*launch, *arguments, folder=folder)


def trained_weights() -> dict[str, torch.Tensor]:
    """Weights of the module's network: random features, and a last layer by least squares."""
    digits = load_digits()
    hidden = torch.nn.Linear(64, 8)
    features = hidden(torch.tensor(digits.data / 16).float()).tanh().detach()
    labels = torch.nn.functional.one_hot(torch.tensor(digits.target), 10).float()
    weight = 8 * torch.linalg.lstsq(features, labels).solution.T
    parts = {"1.weight": hidden.weight, "1.bias": hidden.bias, "3.weight": weight, "3.bias": torch.zeros(10)}
    return {name: value.detach().contiguous() for name, value in parts.items()}


def assert_equals_one_process(arrays: dict[str, np.ndarray]) -> None:
    expected = worker.results(worker.data())
    assert set(arrays) == {*expected, "world_size"}
    for name, value in expected.items():
        np.testing.assert_allclose(arrays[name], value, rtol=1e-9, atol=1e-20 * np.abs(value).max(), err_msg=name)


# Real processes -----------------------------------------------------------------------------------------------------


def test_groups_are_destroyed_without_a_deadlock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to torch 2.7 a group and its threads may wait for each other."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    script = str(WORKER.with_name("endings.py"))
    with ThreadPoolExecutor() as pool:
        ended = list(pool.map(lambda rank: run(script, str(rank), str(tmp_path)), range(2)))
    assert [process.returncode for process in ended] == [0, 0], ended[0].stderr + ended[1].stderr


@pytest.mark.parametrize("processes", [2, 3])
def test_several_processes_give_the_results_of_one(processes: int, tmp_path: Path) -> None:
    path = tmp_path / "results.npz"
    ended = torchrun(processes, str(WORKER), str(path))
    assert ended.returncode == 0, ended.stderr
    arrays = dict(np.load(path))
    assert arrays["world_size"] == processes
    assert_equals_one_process(arrays)


def test_a_process_that_dies_stops_the_others(tmp_path: Path) -> None:
    path = tmp_path / "results.npz"
    ended = torchrun(2, str(WORKER), str(path), "--dies", "1")  # the time limit would find a hang
    assert ended.returncode != 0
    assert "exitcode  : 17" in ended.stderr
    assert not path.exists()


def test_slow_processes_are_awaited_and_dead_ones_resumed_to_the_same_bits(tmp_path: Path) -> None:
    path, partial_path = tmp_path / "results.npz", tmp_path / "work.partial"
    ended = torchrun(2, str(WORKER), str(path), "--lags", "0.1")
    assert ended.returncode == 0, ended.stderr
    uninterrupted = dict(np.load(path))
    assert_equals_one_process(uninterrupted)
    path.unlink()
    options = ("--checkpoint", str(partial_path))
    ended = torchrun(2, str(WORKER), str(path), *options, "--dies", str(len(worker.BATCH_SIZES) + 2))
    assert ended.returncode != 0
    assert partial_path.exists()
    (tmp_path / "work.partial-1").unlink()  # as if rank 1 had died before its first checkpoint
    ended = torchrun(2, str(WORKER), str(path), *options)
    assert ended.returncode == 0, ended.stderr
    resumed = dict(np.load(path))
    assert {name: value.tobytes() for name, value in resumed.items()} == {
        name: value.tobytes() for name, value in uninterrupted.items()
    }
    assert [other.name for other in tmp_path.iterdir()] == ["results.npz"]


def test_corrections_are_refused_in_several_processes(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.ones((3, 2)), y=np.array([0, 1, 0]))
    (tmp_path / "decisions.csv").write_text("index,decision,label\n0,drop,\n")
    command = ("ifcomp", "apply", "decisions.csv", "--data", "npz:a.npz", "--in-place")
    refused = torchrun(2, "-m", *command, folder=tmp_path)
    assert refused.returncode != 0
    assert "ifcomp apply changes files, so it runs in one process" in refused.stderr
    assert len(np.load(tmp_path / "a.npz")["x"]) == 3
    assert run("-m", *command, folder=tmp_path).returncode == 0
    assert len(np.load(tmp_path / "a.npz")["x"]) == 2


def test_the_command_line_gives_the_same_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(MODULE)
    save_file(trained_weights(), tmp_path / "net.safetensors")
    command, frames = ("ifcomp", "fit", "net:build", "digits", "--weights", "net.safetensors", "--json"), []
    accuracies: set[float] = set()
    for launch in (lambda *command: run("-m", *command, folder=tmp_path), partial(torchrun, 2, "-m", folder=tmp_path)):
        fitted = launch(*command)
        assert fitted.returncode == 0, fitted.stderr
        content = json.loads(fitted.stdout)  # printed by one process only
        assert content["examples"] == 1797
        accuracies.add(content["training_accuracy"])
        scored = launch("ifcomp", "score", "run.ifcomp", "--out", "scores.parquet")
        assert scored.returncode == 0, scored.stderr
        frames.append(pd.read_parquet(tmp_path / "scores.parquet"))
        assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == [
            "net.py",
            "net.safetensors",
            "run.ifcomp",
            "scores.parquet",
        ]
        (tmp_path / "run.ifcomp").unlink()
        (tmp_path / "scores.parquet").unlink()
    pd.testing.assert_frame_equal(*frames, rtol=1e-4)
    assert len(accuracies) == 1
    assert 0.5 < accuracies.pop() < 1


# Simulated processes ------------------------------------------------------------------------------------------------


def test_another_number_of_processes_does_not_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partial_path = tmp_path / "work.partial"
    with pytest.raises(DataError), Checkpoint(partial_path, 0) as checkpoint:
        worker.results([worker.data()[0], None], checkpoint)
    assert partial_path.exists()
    monkeypatch.setattr("ifcomp.io.checkpoints.process_info", lambda: ProcessInfo(0, 2))
    with pytest.raises(CheckpointError, match="processes: 1 there, 2 here"), Checkpoint(partial_path, 0) as checkpoint:
        worker.results(worker.data(), checkpoint)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_all_processes_resume_in_the_latest_stage(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 has an older checkpoint, rank 1 the latest one, rank 2 none."""
    digests = {"first batch": "0", "all": "1"}
    states = [
        SavedState("a", 5, {"first batch": "0"}, {"a": 2}, {}, {"sum": torch.ones(1)}),
        SavedState("b", 3, digests, {"a": 7, "b": 4}, {"basis": torch.eye(2)}, {"sum": torch.ones(2)}),
        None,
    ]
    monkeypatch.setattr(resumable, "process_info", lambda: ProcessInfo(rank, 3))
    monkeypatch.setattr(resumable, "all_gather_objects", lambda value: [0, 1, -1])
    monkeypatch.setattr(
        resumable, "broadcast_object", lambda _, source: (states[source].shared, states[source].digests)
    )
    state = resumable._synchronize(states[rank], ["a", "b"])
    assert state is not None
    assert state.stage == "b"
    assert torch.equal(state.shared["basis"], torch.eye(2))
    assert (state.position, set(state.local)) == ((3, {"sum"}) if rank == 1 else (0, set()))
    assert state.digests == digests
    assert state.settings == [{"a": 2}, {"a": 7, "b": 4}, {}][rank]


@pytest.mark.parametrize(("gpus", "backend", "devices"), [(True, "cpu:gloo,cuda:nccl", [1]), (False, "gloo", [])])
def test_the_backend_depends_on_the_device(
    gpus: bool, backend: str, devices: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    created, selected, destroyed = [], [], []
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", selected.append)
    monkeypatch.setattr(distributed.dist, "is_initialized", lambda: bool(created))
    monkeypatch.setattr(distributed.dist, "barrier", lambda: None)
    monkeypatch.setattr(distributed.dist, "init_process_group", created.append)
    monkeypatch.setattr(distributed.dist, "get_rank", lambda: 2)
    monkeypatch.setattr(distributed.dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(distributed.dist, "destroy_process_group", lambda: destroyed.append(True))
    with data_parallel() as process:
        assert process == ProcessInfo(2, 3) == process_info()
        assert not destroyed
    assert (created, selected, destroyed) == ([backend], devices, [True])
    assert process_info() == ProcessInfo()


def test_one_process_changes_nothing() -> None:
    with data_parallel() as process:
        assert process == process_info() == ProcessInfo(0, 1)
    frame = pd.DataFrame({"index": [1, 0]})
    assert gather_rows(frame) is frame
    assert [float(value) for value in run_distributed([lambda: torch.ones(1)], [torch.zeros(1)], [1.0])] == [1.0]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_shards_contain_every_example_once(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    batches, values = [torch.arange(size) + 100 * size for size in (4, 1, 7)], {}
    for rank in range(world_size):
        monkeypatch.setattr("ifcomp.distributed.process_info", lambda rank=rank: ProcessInfo(rank, world_size))
        for shard in shard_batches(as_batches(batches)):
            for offset, value in enumerate(shard.args[0].tolist()):
                assert shard.position + offset not in values
                values[shard.position + offset] = value
    assert [values[position] for position in range(12)] == torch.cat(batches).tolist()


def test_small_tensors_are_reduced_together(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def triple(tensor: torch.Tensor, group: object) -> None:
        sizes.append(tensor.numel())
        tensor.mul_(3)

    monkeypatch.setattr("ifcomp.distributed.process_info", lambda: ProcessInfo(0, 3))
    monkeypatch.setattr("ifcomp.distributed.dist.all_reduce", triple)
    tensors = [torch.randn(shape) for shape in [(2, 3), (4,), (1,), (3, 5), (), (0,), (2,)]]
    tensors += [torch.tensor(7), torch.arange(4)]
    expected = [3 * tensor for tensor in tensors]
    all_reduce_sum(iter(tensors), bucket_elements=10)
    assert sizes == [10, 1, 15, 3, 5]
    assert all(torch.equal(tensor, total) for tensor, total in zip(tensors, expected, strict=True))
