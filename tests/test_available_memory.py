"""Available memory on machines, in containers and on GPUs."""

import os
from typing import Any

import pytest
import torch

from ifcomp import memory
from ifcomp.memory import available

CPU = torch.device("cpu")


class FakePath:
    """Replaces `Path` by files with the given contents."""

    def __init__(self, contents: dict[str, str]) -> None:
        self.contents = contents

    def __call__(self, path: str) -> Any:
        contents = self.contents

        class File:
            def is_file(self) -> bool:
                return path in contents

            def read_text(self) -> str:
                if path not in contents:
                    raise FileNotFoundError(path)
                return contents[path]

        return File()


MEMINFO = {"/proc/meminfo": "MemTotal:       9000 kB\nMemAvailable:    5000 kB\n"}


def control_group(limit: str, used: str) -> dict[str, str]:
    return {"/sys/fs/cgroup/memory.max": f"{limit}\n", "/sys/fs/cgroup/memory.current": f"{used}\n"}


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        pytest.param(MEMINFO, 5_120_000, id="machine"),
        pytest.param(MEMINFO | control_group("3000000", "1000000"), 2_000_000, id="small_container"),
        pytest.param(MEMINFO | control_group("9000000", "1000000"), 5_120_000, id="large_container"),
        pytest.param(MEMINFO | control_group("1000", "5000"), 0, id="full_container"),
        pytest.param(MEMINFO | control_group("max", "5000"), 5_120_000, id="unlimited_container"),
        pytest.param({"/proc/meminfo": "MemTotal: 9000 kB\n"}, 40_960, id="old_linux"),
        pytest.param({}, 40_960, id="not_linux"),
    ],
)
def test_available_memory_is_limited_by_machine_and_container(
    contents: dict[str, str], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "Path", FakePath(contents))
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 10, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert available(CPU) == expected


def test_available_memory_may_be_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "Path", FakePath({}))
    monkeypatch.delattr(os, "sysconf")
    assert available(CPU) is None


def test_available_memory_of_a_gpu_is_its_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"cuda:1": (700, 900), "cuda:0": (1, 900)}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: sizes[str(device)])
    assert available(torch.device("cuda", 1)) == 700
