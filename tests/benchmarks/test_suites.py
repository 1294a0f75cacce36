"""Every suite runs at tiny size, is written and read again, and becomes tables; no test is about how long it took."""

import math
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks import record
from benchmarks.page import page
from benchmarks.run import chosen, run
from benchmarks.suites import SUITES, fit, growth, processes
from benchmarks.tables import rows
from ifcomp.errors import SettingError

#: Suites whose results are compared with an independent way.
COMPARED = {"influence": 1e-4, "self": 1e-3, "processes": 1e-6}


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What suites do in other processes is done in this one."""

    def directly(function: Callable[..., Any], *arguments: Any, processes: int = 1) -> Any:
        return function(*arguments)

    for module in (fit, growth, processes):
        monkeypatch.setattr(module, "in_child", directly)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("name", SUITES)
def test_a_suite_runs_and_is_written(name: str, tmp_path: Path) -> None:
    if name in ("fit", "self"):
        pytest.importorskip("kronfluence", reason="kronfluence is not installed")
    suite, shown, threads = SUITES[name], StringIO(), torch.get_num_threads()
    try:
        found = run([suite], [1], 1, True, tmp_path, Console(file=shown, width=400))
    finally:
        torch.set_num_threads(threads)
    assert record.read(name, tmp_path) == found[name]
    text = page(tmp_path)
    for section in suite.sections:
        cells = rows(section, found[name], 1)
        assert [row[0].words for row in cells] == list(section.subjects)
        for row in cells:
            assert all(math.isfinite(float(own.words.split(" ")[0].replace(",", ""))) for own in row[1:])
            assert f"| {' | '.join(own.words for own in row)} |" in text
            assert all(own.words in shown.getvalue() for own in row)
        goals = [column.goal is not None for column in section.columns]
        assert all((own.met is not None) <= goal for row in cells for own, goal in zip(row[1:], goals, strict=True))
    for own in found[name]:
        assert (own.threads, own.environment["threads"], own.environment["tiny"]) == (1, 1, True)
        assert own.measured.numbers.get("difference", 0.0) <= COMPARED.get(name, 0.0)
    assert ("difference" in found[name][0].measured.numbers) == (name in COMPARED)


def test_suites_are_chosen_by_name() -> None:
    assert [suite.name for suite in chosen([])] == list(SUITES)
    assert [suite.name for suite in chosen(["fit", "classes"])] == ["classes", "fit"]
    with pytest.raises(SettingError, match=r"no suite speed\. There are: influence, classes"):
        chosen(["fit", "speed"])
