"""Processes with different weights, settings or data are refused on all of them; collectives on the CPU use gloo."""

import json
from pathlib import Path

from distributed import audit_worker, mismatch_worker
from distributed.test_distributed import torchrun


def test_unequal_processes_are_refused_on_all_of_them(tmp_path: Path) -> None:
    ended = torchrun(2, mismatch_worker.__file__, str(tmp_path / "rank"))
    assert ended.returncode == 0, ended.stderr
    errors = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert errors[0] == errors[1]
    for (case, verb, subject), message in zip(mismatch_worker.CASES, errors[0], strict=True):
        assert message.startswith(f"{subject} of process 1 differ from those of process 0."), (case, verb)
        assert ("without DistributedSampler" in message) == (case not in ("weights", "settings"))


def test_tensors_on_the_cpu_are_reduced_by_gloo_beside_a_backend_without_them(tmp_path: Path) -> None:
    """A group of nccl alone is simulated: collectives of the default group refuse tensors on the CPU, and objects."""
    ended = torchrun(2, audit_worker.__file__, str(tmp_path / "rank"), "--without-cpu")
    assert ended.returncode == 0, ended.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0.npz", "rank1.npz"]
