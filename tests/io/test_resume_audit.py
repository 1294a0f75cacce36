"""Audits that were killed resume with the same data to the same bits."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from resumable_jobs import (
    AUDITED_LAYERS,
    NUM_BATCHES,
    Kill,
    Killed,
    audit,
    audit_with_reference,
    data,
    network,
    result_bytes,
)

from ifcomp import Checkpoint, IFComp
from ifcomp.distributed import ProcessInfo
from ifcomp.errors import CheckpointError, DataError, SettingError
from ifcomp.evidence.readout import Spectrum
from ifcomp.tasks.audit import LabelAudit

pytestmark = pytest.mark.filterwarnings("ignore::ifcomp.errors.IfcompWarning")  # few examples

#: Number of checkpoints of an audit without a reference.
TOTAL = 2 * NUM_BATCHES + AUDITED_LAYERS


def audit_after_fit(path: Path) -> LabelAudit:
    """Audit with label complexity."""
    with Checkpoint(path, 0) as checkpoint:
        return IFComp(network()).fit(data()).audit(data(), checkpoint=checkpoint)


def test_a_checkpoint_does_not_change_an_audit(tmp_path: Path) -> None:
    plain = IFComp(network()).audit(data())
    assert result_bytes(audit(tmp_path / "work")) == result_bytes(plain)
    reference = IFComp(network()).audit(data(), reference=data(2))
    assert result_bytes(audit_with_reference(tmp_path / "work")) == result_bytes(reference)


@pytest.mark.parametrize("layer", range(1, AUDITED_LAYERS + 1))
@pytest.mark.parametrize("job", [audit, audit_with_reference])
def test_features_survive_a_kill_while_they_are_rotated(
    job: Any, layer: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected, calls = result_bytes(job(tmp_path / "other")), [0]
    rotate = Spectrum.rotate

    def rotate_half(self: Spectrum, features: np.ndarray) -> None:
        calls[0] += 1
        if calls[0] == layer:
            rotate(self, features[:6])
            raise Killed
        rotate(self, features)

    with monkeypatch.context() as patch:
        patch.setattr(Spectrum, "rotate", rotate_half)
        with pytest.raises(Killed):
            job(tmp_path / "work")
    assert result_bytes(job(tmp_path / "work")) == expected
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [1, TOTAL, TOTAL + 1, TOTAL + NUM_BATCHES])
def test_label_complexity_of_an_audit_resumes(number: int, kill: Kill, tmp_path: Path) -> None:
    ifc = IFComp(network()).fit(data())
    expected = ifc.audit(data())
    kill(number)
    with pytest.raises(Killed):
        audit_after_fit(tmp_path / "work")
    count = kill(0)
    found = audit_after_fit(tmp_path / "work")
    assert count == [TOTAL + NUM_BATCHES - number]  # saved work is not repeated
    pd.testing.assert_frame_equal(found.frame, expected.frame, check_exact=True)
    assert found.influential is not None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", range(NUM_BATCHES, TOTAL + 1))
def test_other_data_is_refused_in_every_stage(number: int, kill: Kill, tmp_path: Path) -> None:
    kill(number)
    with pytest.raises(Killed):
        audit(tmp_path / "work")
    kill(0)
    *others, (x, y) = data()
    for batches in ([*others, (x, (y + 1) % 3)], data()[::-1], others):
        with pytest.raises((CheckpointError, DataError), match=r"data of the checkpoint|differ between the two passes"):
            audit(tmp_path / "work", batches=batches)
    assert result_bytes(audit(tmp_path / "work")) == result_bytes(audit(tmp_path / "other"))


@pytest.mark.parametrize("number", [2 * NUM_BATCHES, 4 * NUM_BATCHES, 4 * NUM_BATCHES + 1])
def test_another_reference_is_refused(number: int, kill: Kill, tmp_path: Path) -> None:
    kill(number)
    with pytest.raises(Killed):
        audit_with_reference(tmp_path / "work")
    kill(0)
    with pytest.raises(CheckpointError, match="The data differs"):
        audit(tmp_path / "work", reference=data(3))
    with pytest.raises(CheckpointError, match="has_reference: True there, False here"):
        audit(tmp_path / "work")


def test_other_weights_are_refused(kill: Kill, tmp_path: Path) -> None:
    kill(2)
    with pytest.raises(Killed):
        audit(tmp_path / "work")
    kill(0)
    with pytest.raises(CheckpointError, match=r"model: \w+ there"), Checkpoint(tmp_path / "work") as checkpoint:
        IFComp(network(1)).audit(data(), checkpoint=checkpoint)


def test_several_processes_have_no_checkpoint_of_an_audit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("ifcomp.auditing.process_info", lambda: ProcessInfo(0, 2))
    with pytest.raises(SettingError, match="Leave checkpoint= out"):
        audit(tmp_path / "work")


def test_arrays_of_an_audit_remain_when_its_files_are_removed(tmp_path: Path) -> None:
    found = audit(tmp_path / "work")
    assert list(tmp_path.iterdir()) == []
    for member in found.evidence.members:
        torch.testing.assert_close(torch.tensor(member.probabilities).sum(1), torch.ones(12), check_dtype=False)


@pytest.mark.parametrize("number", [NUM_BATCHES + 1, TOTAL])
def test_a_checkpoint_without_its_files_is_refused(number: int, kill: Kill, tmp_path: Path) -> None:
    kill(number)
    with pytest.raises(Killed):
        audit(tmp_path / "work")
    kill(0)
    shutil.rmtree(tmp_path / "work.files")
    with pytest.raises(CheckpointError, match="is missing or damaged"):
        audit(tmp_path / "work")


@pytest.mark.parametrize(
    ("number", "finished"),
    [(NUM_BATCHES + 1, AUDITED_LAYERS), (2 * NUM_BATCHES + 1, AUDITED_LAYERS + 2), (TOTAL, 3 * AUDITED_LAYERS)],
)
def test_flipped_bits_in_finished_rows_are_refused(number: int, finished: int, kill: Kill, tmp_path: Path) -> None:
    """Features and distributions of all layers are in files beside the checkpoint."""
    (tmp_path / "killed").mkdir()
    kill(number)
    with pytest.raises(Killed):
        audit(tmp_path / "killed" / "work")
    kill(0)
    expected, refused = result_bytes(audit(tmp_path / "other")), 0
    for file in sorted((tmp_path / "killed" / "work.files").iterdir()):
        folder = shutil.copytree(tmp_path / "killed", tmp_path / f"copy of {file.name}")
        content = bytearray(file.read_bytes())
        content[2] ^= 1
        (folder / "work.files" / file.name).write_bytes(content)
        try:
            found = result_bytes(audit(folder / "work"))
        except CheckpointError as error:
            refused += "was damaged or changed" in str(error)
        else:
            assert found == expected
    assert refused == finished
    assert result_bytes(audit(tmp_path / "killed" / "work")) == expected


def test_files_do_not_remain_without_a_checkpoint(tmp_path: Path) -> None:
    class Broken(list[Any]):
        reads = 0

        def __iter__(self) -> Iterator[Any]:
            self.reads += 1
            yield from data()
            if self.reads > 2:  # checks read the first batch
                assert (tmp_path / "work.files").exists()
                raise OSError("the network drive is gone")

    with pytest.raises(OSError, match="drive is gone"):
        audit(tmp_path / "work", every=3600, batches=Broken())
    assert list(tmp_path.iterdir()) == []
