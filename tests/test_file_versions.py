"""Every file format has a version, and a file of another version is refused with the remedy."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from ifcomp import Checkpoint, IFComp
from ifcomp.cli.record import Record, read_record
from ifcomp.cli.run import write_run
from ifcomp.data.corrections import read_decisions
from ifcomp.errors import CheckpointError, DataError, StorageError
from ifcomp.io.tensor_files import write_tensors

OTHER = 99
MODEL = nn.Linear(4, 3).eval()
DATA = [(torch.arange(160.0).view(40, 4).sin(), torch.arange(40) % 3)]


def change_metadata(path: Path, key: str, change: Callable[[dict[str, Any]], object]) -> None:
    with safe_open(path, framework="pt") as file:
        metadata = json.loads(file.metadata()[key])
    change(metadata)
    write_tensors(path, load_file(path), key, metadata)


def stop() -> Any:
    """Batches whose second pass fails."""

    class Batches:
        passes = 0

        def __iter__(self) -> Any:
            self.passes += 1
            yield DATA[0]
            if self.passes > 3:  # the first passes check whether the data can be read twice
                raise InterruptedError

    return Batches()


@pytest.mark.filterwarnings("ignore:40 held-out examples are few")
def test_factors_and_calibration(tmp_path: Path) -> None:
    path = tmp_path / "run.ifcomp"
    ifc = IFComp(MODEL).fit(DATA)
    ifc.calibrate(DATA)
    ifc.save(path)
    assert IFComp.load(path, MODEL).calibration is not None
    change_metadata(path, "ifcomp", lambda metadata: metadata["results"]["calibration"].update(schema=OTHER))
    with pytest.raises(StorageError, match=r"schema 99, this version reads 1.*calibrate again"):
        IFComp.load(path, MODEL)
    change_metadata(path, "ifcomp", lambda metadata: metadata.update(schema=OTHER))
    with pytest.raises(StorageError, match=r"schema 99, this version reads 2.*or fit again"):
        IFComp.load(path, MODEL)


def test_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "work.partial"
    with pytest.raises(InterruptedError), Checkpoint(path, 0) as checkpoint:
        IFComp(MODEL).fit(stop(), checkpoint=checkpoint)
    change_metadata(path, "ifcomp-checkpoint", lambda metadata: metadata.update(schema=OTHER))
    with (
        pytest.raises(CheckpointError, match=r"schema 99, this version reads.*delete it to start again"),
        Checkpoint(path, 0) as checkpoint,
    ):
        IFComp(MODEL).fit(DATA, checkpoint=checkpoint)


def test_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    path = tmp_path / "run.ifcomp"
    write_run(str(path), IFComp(MODEL).fit(DATA), Record("net:build", None, "digits", {}, None, 5, "0").signed())
    assert read_record(str(path)) is not None
    change_metadata(path, "ifcomp", lambda metadata: metadata["record"].update(schema=OTHER))
    with pytest.raises(StorageError, match=r"schema 99, this version reads 2.*Fit again"):
        read_record(str(path))


def test_decisions(tmp_path: Path) -> None:
    path = tmp_path / "decisions.csv"
    path.write_text("index,decision,label,format\n3,drop,,1\n")
    assert read_decisions(str(path))[0].index == 3
    path.write_text("index,decision,label,format\n3,drop,,99\n")
    with pytest.raises(DataError, match=r"format '99', this version reads 1.*remove the column"):
        read_decisions(str(path))
