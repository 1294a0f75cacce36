"""Disks that are full, read-only or missing, with checkpoints and saved fits."""

import errno
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from resumable_jobs import BATCH_SIZES, JOBS, NUM_BATCHES, data, fit, network, result_bytes
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ifcomp import Checkpoint, IFComp
from ifcomp.errors import CheckpointError, IfcompError, StorageError
from ifcomp.io import tensor_files


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("I/O error: No space left on device (28)")],
    ids=["os", "safetensors"],
)
def test_a_full_disk_keeps_the_last_checkpoint(
    name: str, error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job, path, count = JOBS[name][0], tmp_path / "work.partial", [0]

    def save_or_fail(*arguments: Any, **options: Any) -> None:
        count[0] += 1
        if count[0] == 3:
            raise error
        save_file(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(tensor_files, "save_file", save_or_fail)
        with pytest.raises(
            CheckpointError, match=r"No space left.*unchanged.*repeat the same command or call to resume"
        ):
            job(path)
    assert list(tmp_path.iterdir()) == [path]
    with safe_open(path, framework="pt") as file:
        assert json.loads(file.metadata()["ifcomp-checkpoint"])["position"] == sum(BATCH_SIZES[:2])
    assert result_bytes(job(path)) == result_bytes(job(tmp_path / "other"))


def test_too_little_space_is_reported_before_the_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def usage(_: Path) -> Any:
        return type("Usage", (), {"free": 500})

    monkeypatch.setattr("ifcomp.io.files.shutil.disk_usage", usage)
    model = network()
    message = r"about [\d,]+ bytes are needed .* only 500 are free"
    with pytest.raises(StorageError, match=message), Checkpoint(tmp_path / "work.partial") as checkpoint:
        IFComp(model).fit(data(), checkpoint=checkpoint)
    verification = model.calls
    IFComp(model).fit(data())
    assert model.calls >= 2 * verification + 3 * NUM_BATCHES  # only the second fit goes over the data


@pytest.mark.parametrize("kind", ["missing", "file"])
def test_an_unwritable_folder_is_reported_before_the_work(kind: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="folder that exists and is writable"), Checkpoint(tmp_path / kind / "work"):
        pytest.fail("the context was entered")


def mount_tmpfs(folder: Path, options: str) -> bool:
    try:
        call = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        return subprocess.run(call, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """A function that mounts a small disk. The test is skipped without the permission to mount."""
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        if not mount_tmpfs(folder, options):
            pytest.skip("no permission to mount a disk")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_real_full_disk(disk: Callable[[str], Path], tmp_path: Path) -> None:
    folder = disk("size=256k")
    ifc = IFComp(network()).fit(data())
    ifc.save(folder / "run.ifcomp")
    before = (folder / "run.ifcomp").read_bytes()
    (folder / "filler").write_bytes(bytes(shutil.disk_usage(folder).free))
    with pytest.raises(StorageError, match="bytes are needed"):
        fit(folder / "work.partial")
    with pytest.raises(StorageError, match=r"No space left.*unchanged"):
        IFComp(network(), layers=["hidden"]).fit(data()).save(folder / "other.ifcomp")
    with pytest.raises(StorageError, match=r"No space left.*unchanged"):
        ifc.save(folder / "run.ifcomp")
    assert (folder / "run.ifcomp").read_bytes() == before
    assert sorted(path.name for path in folder.iterdir()) == ["filler", "run.ifcomp"]


def test_a_real_read_only_disk(disk: Callable[[str], Path]) -> None:
    folder = disk("size=64k,ro")
    with pytest.raises(StorageError, match="Read-only file system"):
        fit(folder / "work.partial")
    with pytest.raises(IfcompError, match="Read-only file system"):
        IFComp(network()).fit(data()).save(folder / "run.ifcomp")
