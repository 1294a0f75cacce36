"""Audits of several real processes give the results of one."""

from pathlib import Path

import numpy as np

from distributed import audit_worker
from distributed.test_distributed import torchrun


def test_two_processes_give_the_audit_of_one(tmp_path: Path) -> None:
    """Every process has the whole result. Some batches have fewer examples than there are processes."""
    ended = torchrun(2, audit_worker.__file__, str(tmp_path / "rank"))
    assert ended.returncode == 0, ended.stderr
    expected = audit_worker.audits()
    assert len(expected["suspects"]) > 0
    for rank in range(2):
        found = dict(np.load(tmp_path / f"rank{rank}.npz"))
        assert found.pop("world_size") == 2
        assert set(found) == set(expected)
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, atol=1e-6, err_msg=name)
