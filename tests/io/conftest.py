"""Kills at chosen checkpoints."""

from pathlib import Path
from typing import Any

import pytest
from resumable_jobs import LINEAR_MATRICES, NUM_BATCHES, Kill, Killed, data, network
from torch import Tensor

from ifcomp import Checkpoint, IFComp
from ifcomp.io import checkpoint_files, resumable, tensor_files


@pytest.fixture
def kill(monkeypatch: pytest.MonkeyPatch) -> Kill:
    """Return a function that raises `Killed` at a checkpoint: after it is written, or in the middle of writing.

    The function returns a list with the number of checkpoints written so far. Number 0 kills nothing.
    """
    write = checkpoint_files.write_checkpoint

    def write_half(tensors: dict[str, Tensor], path: Path, **_: Any) -> None:
        Path(path).write_bytes(b"half of a f")
        raise Killed

    def kill_at(number: int, midway: bool = False) -> list[int]:
        count = [0]

        def write_or_kill(*arguments: Any) -> None:
            count[0] += 1
            with monkeypatch.context() as patch:
                if count[0] == number and midway:
                    patch.setattr(tensor_files, "save_file", write_half)
                write(*arguments)
            if count[0] == number:
                raise Killed

        monkeypatch.setattr(resumable, "write_checkpoint", write_or_kill)
        return count

    return kill_at


@pytest.fixture
def unfinished_fit(kill: Kill, tmp_path: Path) -> Path:
    """The checkpoint of a fit that was killed after two batches of the second pass."""
    path = tmp_path / "work.partial"
    kill(NUM_BATCHES + LINEAR_MATRICES + 2)
    with pytest.raises(Killed), Checkpoint(path, 0) as checkpoint:
        IFComp(network(), layers=["hidden", "head"]).fit(data(), checkpoint=checkpoint)
    kill(0)
    return path
