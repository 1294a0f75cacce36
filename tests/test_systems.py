"""What differs from system to system: how much memory there is, locks, GPUs. Each system is played here."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ifcomp import distributed, memory
from ifcomp.distributed import Ranks, sharing
from ifcomp.errors import StorageError
from ifcomp.io import files
from ifcomp.io.files import locked
from ifcomp.memory import available

CPU = torch.device("cpu")


class Files:
    """Takes the place of `Path` where the system's own files are read."""

    def __init__(self, content: dict[str, str]) -> None:
        self.content = content

    def __call__(self, path: str) -> Any:
        system = self

        class File:
            def is_file(self) -> bool:
                return path in system.content

            def read_text(self) -> str:
                if path not in system.content:
                    raise FileNotFoundError(path)
                return system.content[path]

        return File()


MEMINFO = {"/proc/meminfo": "MemTotal:       9000 kB\nMemAvailable:    5000 kB\n"}


def group(limit: str, used: str) -> dict[str, str]:
    return {"/sys/fs/cgroup/memory.max": f"{limit}\n", "/sys/fs/cgroup/memory.current": f"{used}\n"}


@pytest.mark.parametrize(
    ("content", "there"),
    [
        (MEMINFO, 5_120_000),
        (MEMINFO | group("3000000", "1000000"), 2_000_000),
        (MEMINFO | group("9000000", "1000000"), 5_120_000),
        (MEMINFO | group("1000", "5000"), 0),
        (MEMINFO | group("max", "5000"), 5_120_000),
        ({"/proc/meminfo": "MemTotal: 9000 kB\n"}, 40_960),
        ({}, 40_960),
    ],
    ids=[
        "machine",
        "container",
        "roomy_container",
        "full_container",
        "container_without_limit",
        "old_linux",
        "no_linux",
    ],
)
def test_memory_is_what_the_machine_and_the_container_have_left(
    content: dict[str, str], there: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "Path", Files(content))
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 10, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert available(CPU) == there


def test_a_system_that_says_nothing_has_no_known_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "Path", Files({}))
    monkeypatch.delattr(os, "sysconf")
    assert available(CPU) is None


def test_memory_of_a_gpu_is_what_is_free_there(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"cuda:1": (700, 900), "cuda:0": (1, 900)}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: sizes[str(device)])
    assert available(torch.device("cuda", 1)) == 700


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS], ids=errno.errorcode.get)
def test_folders_that_know_no_locks_are_written_without(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files.fcntl, "flock", failing(number))
    with locked(tmp_path / "run"), locked(tmp_path / "run"):
        assert [path.name for path in tmp_path.iterdir()] == [".run.lock"]
    assert list(tmp_path.iterdir()) == []


def test_systems_without_locks_write_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "fcntl", None)
    with locked(tmp_path / "run"), locked(tmp_path / "run"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_fails_is_an_error_and_closes_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.fcntl, "flock", failing(errno.EIO))
    before = os.listdir("/proc/self/fd")
    with pytest.raises(StorageError, match="Input/output error"), locked(tmp_path / "run"):
        pytest.fail("there is no lock")
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("replaced", [False, True])
def test_a_lock_whose_file_went_meanwhile_is_taken_anew(
    replaced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that had it ended between our opening and our locking: what we locked is not what others will see."""
    lock, lost = tmp_path / ".run.lock", []

    def flock(handle: int, operation: int) -> None:
        if not lost:
            lost.append(os.fstat(handle).st_ino)
            lock.unlink()
            if replaced:
                (tmp_path / "other").touch()
                (tmp_path / "other").rename(lock)

    monkeypatch.setattr(files.fcntl, "flock", flock)
    with locked(tmp_path / "run"):
        (held,) = files._held
        assert os.path.samestat(os.fstat(held), os.stat(lock))
    assert len(lost) == 1
    assert list(tmp_path.iterdir()) == []


def failing(number: int) -> Any:
    def flock(handle: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    return flock


@pytest.mark.parametrize(("gpus", "backend", "devices"), [(True, "nccl", [1]), (False, "gloo", [])])
def test_processes_of_torchrun_meet_over_what_they_compute_on(
    gpus: bool, backend: str, devices: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, chosen, ended = [], [], []
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(distributed.dist, "is_initialized", lambda: bool(made))
    monkeypatch.setattr(distributed.dist, "init_process_group", made.append)
    monkeypatch.setattr(distributed.dist, "get_rank", lambda: 2)
    monkeypatch.setattr(distributed.dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(distributed.dist, "destroy_process_group", lambda: ended.append(True))
    with sharing() as own:
        assert own == Ranks(2, 3) == distributed.ranks()
        assert not ended
    assert (made, chosen, ended) == ([backend], devices, [True])
    assert distributed.ranks() == Ranks()
