"""Concurrent access to files by processes and threads: readers get one complete result or a clear error."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from ifcomp import IFComp
from ifcomp.cli import keys
from ifcomp.errors import StorageError
from ifcomp.io.files import file_lock

WRITER = """
import sys
from pathlib import Path
import pandas as pd
from faults.test_races import fitted
from ifcomp.tables import write_parquet

fits = [fitted(0.5), fitted(2.0)]
frames = [pd.DataFrame({"index": range(20_000), "value": number}) for number in (0, 1)]
for turn in range(20):
    fits[turn % 2].save("run.ifcomp")
    write_parquet("table.parquet", frames[turn % 2], {"index": "", "value": ""}, {})
    Path("written").touch()
"""


ORPHAN = """
import os, signal, sys, time
from ifcomp.io.files import file_lock

with file_lock("work"):
    if os.fork() == 0:
        print("ready", flush=True)
        time.sleep(60)
        os._exit(0)
    time.sleep(60)
"""


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 4)).eval()


def inputs() -> Tensor:
    return torch.randn(16, 20, generator=torch.Generator().manual_seed(1))


def fitted(beta: float) -> IFComp:
    return IFComp(network(), beta).fit([inputs()])


def python(*arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, *arguments], env=environment, stdout=pipe, stderr=pipe, text=True)


def at_once(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Call a function in ``count`` threads that start together."""
    start = threading.Barrier(count)

    def start_together(index: int) -> Any:
        start.wait()
        return work(index)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(start_together, range(count)))


def test_a_reader_gets_a_complete_file_while_another_process_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model, x = network(), inputs()
    expected = {beta: fitted(beta).influence(x) for beta in (0.5, 2.0)}
    reads = 0
    with python("-c", WRITER) as writer:
        while writer.poll() is None:
            if not Path("written").exists():
                time.sleep(0.05)
                continue
            loaded = IFComp.load("run.ifcomp", model)
            assert torch.equal(loaded.influence(x), expected[loaded.beta])
            assert pd.read_parquet("table.parquet")["value"].nunique() == 1
            reads += 1
        assert writer.returncode == 0, writer.stderr.read() if writer.stderr else ""
    assert reads > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.ifcomp", "table.parquet", "written"]


def test_loads_in_several_threads_are_equal(tmp_path: Path) -> None:
    x, ifc = inputs(), fitted(1.0)
    ifc.save(tmp_path / "run.ifcomp")
    expected, shared, models = ifc.influence(x), network(), [network() for _ in range(8)]

    def load(index: int) -> tuple[Tensor, bool]:
        separate = IFComp.load(tmp_path / "run.ifcomp", models[index])
        other = IFComp.load(tmp_path / "run.ifcomp", shared)
        assert other.factors is not None
        same = all(
            torch.equal(block.second_moments, separate.factors.blocks[name].second_moments)
            for name, block in other.factors.blocks.items()
        )
        return separate.influence(x), same

    for loaded, same in at_once(len(models), load):
        assert torch.equal(loaded, expected)
        assert same


def test_saves_in_several_threads_leave_one_complete_file(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        fits = [fitted(beta) for beta in (0.5, 1.0, 2.0, 4.0)]
        for _ in range(5):
            at_once(len(fits), lambda index: fits[index].save(tmp_path / "run.ifcomp"))
            loaded = IFComp.load(tmp_path / "run.ifcomp", network())
            assert torch.equal(loaded.influence(inputs()), fitted(loaded.beta).influence(inputs()))
        assert (tmp_path / "run.ifcomp").stat().st_mode & 0o777 == 0o640
        assert [path.name for path in tmp_path.iterdir()] == ["run.ifcomp"]
    finally:
        assert os.umask(before) == 0o027


def test_the_key_of_records_is_created_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for attempt in range(10):
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / str(attempt)))
        folder = tmp_path / str(attempt) / "ifcomp"
        signatures = at_once(6, lambda _: keys.sign(b"content"))
        assert len(set(signatures)) == 1
        assert signatures[0]
        assert [path.name for path in folder.iterdir()] == ["run-key"]
        assert (folder / "run-key").stat().st_mode & 0o777 == 0o600


def test_a_lock_ends_with_its_process_even_if_a_child_lives_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of a data loader outlive a killed process by some seconds."""
    monkeypatch.chdir(tmp_path)
    with python("-c", ORPHAN) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
        child = int(children.read_text()) if children.exists() else pytest.skip("needs /proc")
        with pytest.raises(StorageError, match="Another process"), file_lock("work"):
            pass
        parent.kill()
        parent.wait()
        try:
            with file_lock("work"):
                os.kill(child, 0)  # the child is alive
        finally:
            os.kill(child, signal.SIGKILL)
    assert list(tmp_path.iterdir()) == []
