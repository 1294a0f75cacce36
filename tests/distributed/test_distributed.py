"""Several processes give the same results as one, and no process hangs."""

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

from distributed import worker
from ifcomp import Checkpoint
from ifcomp.data.batches import as_batches
from ifcomp.distributed import Ranks, add_up, gather_rows, own_slices, ranks, sharing, spread
from ifcomp.errors import CheckpointError, DataError

WORKER = Path(worker.__file__)


MODULE = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
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


def test_processes_end_after_an_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to torch 2.7 a group and its threads may wait for each other forever."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    script = str(WORKER.with_name("endings.py"))
    with ThreadPoolExecutor() as pool:
        processes = list(pool.map(lambda rank: run(script, str(rank), str(tmp_path)), range(2)))
    assert [process.returncode for process in processes] == [0, 0], processes[0].stderr + processes[1].stderr


@pytest.mark.parametrize("processes", [2, 3])
def test_several_processes_agree_with_one(processes: int, tmp_path: Path) -> None:
    path = tmp_path / "results.npz"
    process = torchrun(processes, str(WORKER), str(path))
    assert process.returncode == 0, process.stderr
    expected = worker.results(worker.data())
    with np.load(path) as actual:
        assert actual["world"] == processes
        assert set(actual) == {*expected, "world"}
        for name, value in expected.items():
            np.testing.assert_allclose(actual[name], value, rtol=1e-9, atol=1e-20 * np.abs(value).max(), err_msg=name)


def test_a_process_that_dies_stops_the_others(tmp_path: Path) -> None:
    path = tmp_path / "results.npz"
    process = torchrun(2, str(WORKER), str(path), "--dies", "1")  # a hang would exceed the time limit
    assert process.returncode != 0
    assert "exitcode  : 17" in process.stderr
    assert not path.exists()


def test_slow_processes_finish_and_dead_ones_resume_to_the_same_bits(tmp_path: Path) -> None:
    path, partial_path = tmp_path / "results.npz", tmp_path / "work.partial"
    process = torchrun(2, str(WORKER), str(path), "--lags", "0.1")
    assert process.returncode == 0, process.stderr
    whole, expected = dict(np.load(path)), worker.results(worker.data())
    for name, value in expected.items():
        np.testing.assert_allclose(whole[name], value, rtol=1e-9, atol=1e-20 * np.abs(value).max(), err_msg=name)
    path.unlink()
    options = ("--checkpoint", str(partial_path))
    process = torchrun(2, str(WORKER), str(path), *options, "--dies", str(len(worker.BATCHES) + 2))
    assert process.returncode != 0
    second = tmp_path / "work.partial-1"
    assert partial_path.exists()
    second.unlink()  # as if it had died before writing
    process = torchrun(2, str(WORKER), str(path), *options)
    assert process.returncode == 0, process.stderr
    actual = dict(np.load(path))
    assert {name: value.tobytes() for name, value in actual.items()} == {
        name: value.tobytes() for name, value in whole.items()
    }
    assert [other.name for other in tmp_path.iterdir()] == ["results.npz"]


def test_another_number_of_processes_does_not_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partial_path = tmp_path / "work.partial"
    with pytest.raises(DataError), Checkpoint(partial_path, 0) as checkpoint:
        worker.results([worker.data()[0], None], checkpoint)
    assert partial_path.exists()
    monkeypatch.setattr("ifcomp.io.checkpoints.ranks", lambda: Ranks(0, 2))
    with pytest.raises(CheckpointError, match="processes: 1 there, 2 here"), Checkpoint(partial_path, 0) as checkpoint:
        worker.results(worker.data(), checkpoint)


def test_the_command_line_is_the_same_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(MODULE)
    frames = []
    for launch in (lambda *command: run("-m", *command, folder=tmp_path), partial(torchrun, 2, "-m", folder=tmp_path)):
        fitted = launch("ifcomp", "fit", "net:build", "digits", "--out", "run.ifcomp", "--json")
        assert fitted.returncode == 0, fitted.stderr
        assert json.loads(fitted.stdout)["examples"] == 1797  # printed once
        scored = launch("ifcomp", "score", "run.ifcomp", "--out", "scores.parquet")
        assert scored.returncode == 0, scored.stderr
        frames.append(pd.read_parquet(tmp_path / "scores.parquet"))
        assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == [
            "net.py",
            "run.ifcomp",
            "run.ifcomp.json",
            "scores.parquet",
        ]
        (tmp_path / "run.ifcomp").unlink()
        (tmp_path / "scores.parquet").unlink()
    pd.testing.assert_frame_equal(*frames, rtol=1e-4)


def test_one_process_does_not_share() -> None:
    with sharing() as actual:
        assert actual == ranks() == Ranks(0, 1)
    frame = pd.DataFrame({"index": [1, 0]})
    assert gather_rows(frame) is frame
    assert [float(value) for value in spread([lambda: torch.ones(1)], [torch.zeros(1)], [1.0])] == [1.0]


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_slices_cover_every_example_once(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    batches, seen = [torch.arange(size) + 100 * size for size in (4, 1, 7)], {}
    for rank in range(world):
        monkeypatch.setattr("ifcomp.distributed.ranks", lambda rank=rank: Ranks(rank, world))
        for part in own_slices(as_batches(batches)):
            for offset, value in enumerate(part.args[0].tolist()):
                assert part.position + offset not in seen
                seen[part.position + offset] = value
    assert [seen[position] for position in range(12)] == torch.cat(batches).tolist()


def test_small_tensors_are_reduced_together(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []

    def tripled(tensor: torch.Tensor) -> None:
        sent.append(tensor.numel())
        tensor.mul_(3)

    monkeypatch.setattr("ifcomp.distributed.ranks", lambda: Ranks(0, 3))
    monkeypatch.setattr("ifcomp.distributed.dist.all_reduce", tripled)
    monkeypatch.setattr("ifcomp.distributed._MESSAGE_ENTRIES", 10)
    tensors = [torch.randn(shape) for shape in [(2, 3), (4,), (1,), (3, 5), (), (0,), (2,)]]
    tensors += [torch.tensor(7), torch.arange(4)]
    expected = [3 * tensor for tensor in tensors]
    add_up(iter(tensors))
    assert sent == [10, 1, 15, 3, 5]
    assert all(torch.equal(tensor, total) for tensor, total in zip(tensors, expected, strict=True))
