"""A million examples: memory does not grow with their number, except for rows of results."""

import json
import os
import subprocess
import sys

import pytest

from experiments.many_examples import run

ROW_BYTES = 15 * 8 * 3  # columns of a score table, and copies of them while they are joined


def measured(verb: str, count: int) -> dict[str, float]:
    """Measure a verb in a new process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, run.__file__, verb, str(count)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    result: dict[str, float] = json.loads(ended.stdout)
    return result


@pytest.mark.second_tier
@pytest.mark.parametrize(("verb", "row_bytes"), [("fit", 0), ("score", ROW_BYTES)])
def test_memory_does_not_grow_with_a_million_examples(verb: str, row_bytes: int) -> None:
    peaks = {count: measured(verb, count)["peak"] for count in (100_000, 1_000_000)}
    assert peaks[1_000_000] - peaks[100_000] < 900_000 * row_bytes + 40e6
