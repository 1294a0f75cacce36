"""Every suite runs at tiny size, is stored, and appears in the tables. Speed is not tested."""

import math
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks import record
from benchmarks.page import COMPILED, page
from benchmarks.run import chosen, run, tables
from benchmarks.suite import Measured, Times
from benchmarks.suites import SUITES, fit, processes
from benchmarks.tables import rows
from ifcomp.errors import SettingError

#: Tolerances of the suites that compare results with a reference.
COMPARED = {"influence": 1e-4, "self": 1e-3, "processes": 1e-6}


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run child processes of suites in this process."""

    def directly(function: Callable[..., Any], *arguments: Any, processes: int = 1) -> Any:
        return function(*arguments)

    for module in (fit, processes):
        monkeypatch.setattr(module, "in_child", directly)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("name", SUITES)
def test_a_suite_runs_and_is_written(name: str, tmp_path: Path) -> None:
    if name in ("fit", "self"):
        pytest.importorskip("kronfluence", reason="kronfluence is not installed")
    suite, output, threads = SUITES[name], StringIO(), torch.get_num_threads()
    try:
        results = run([suite], [1], 1, True, tmp_path, Console(file=output, width=400))
    finally:
        torch.set_num_threads(threads)
    Console(file=output, width=400).print(*tables([suite], results, [1]))
    assert record.read(name, tmp_path) == results[name]
    text = page(tmp_path)
    for section in suite.sections:
        cells = rows(section, results[name], 1)
        assert [row[0].text for row in cells] == list(section.subjects)
        for row in cells:
            assert all(math.isfinite(float(entry.text.split(" ")[0].replace(",", ""))) for entry in row[1:])
            assert f"| {' | '.join(entry.text.split(' (')[0] for entry in row)} |" in text
            assert all(entry.text in output.getvalue() for entry in row)
        goals = [column.goal is not None for column in section.columns]
        assert all((entry.met is not None) <= goal for row in cells for entry, goal in zip(row[1:], goals, strict=True))
    for result in results[name]:
        assert (result.threads, result.environment["threads"], result.environment["tiny"]) == (1, 1, True)
        assert result.measured.numbers.get("difference", 0.0) <= COMPARED.get(name, 0.0)
    assert ("difference" in results[name][0].measured.numbers) == (name in COMPARED)


def test_the_page_shows_results_of_compiled_kernels_only_without_others(tmp_path: Path) -> None:
    def written(cpu: str, forward: float, threads: int = 1, **more: str) -> None:
        environment = {"cpu": cpu, "commit": None, "torch": "2", "date": "today", **more}
        times = {"forward": Times(1, [forward]), "ours": Times(1, [0.3])}
        record.write("last", [record.Run("LeNet", threads, environment, Measured(times))], tmp_path)

    written("A", 0.001, library="AVX2")
    assert "| LeNet | 1.000 | 300.000 | 300.00 |" in page(tmp_path)
    assert COMPILED in page(tmp_path)
    assert "last layer only | - | - | - |" in page(tmp_path)
    written("B", 0.1)
    written("C", 0.2, threads=2)
    text = page(tmp_path)
    assert COMPILED not in text
    assert "| 300.00 |" not in text
    assert "last layer only | 3.0 | - | - |" in text
    assert (
        text.index("| LeNet | 100.000 |")
        < text.index('??? note "More threads"')
        < text.index("    | LeNet | 200.000 |")
    )


def test_suites_are_chosen_by_name() -> None:
    assert [suite.name for suite in chosen([])] == list(SUITES)
    assert [suite.name for suite in chosen(["fit", "classes"])] == ["classes", "fit"]
    with pytest.raises(SettingError, match=r"no suite speed\. The suites are influence, classes"):
        chosen(["fit", "speed"])
