"""Timing, goals, records, tables and child processes of the benchmarks."""

from functools import partial
from pathlib import Path

import pytest

from benchmarks import record, timing
from benchmarks.child import in_child, peak_memory
from benchmarks.page import page
from benchmarks.record import Run
from benchmarks.suite import Column, Goal, Measured, Section, Times
from benchmarks.suites.fit import fixed_seconds, per_example
from benchmarks.suites.processes import alone_and_shared
from benchmarks.tables import Cell, cell, markdown_table
from benchmarks.timing import interleaved


def test_functions_are_called_in_turns() -> None:
    calls: list[str] = []
    functions = {name: lambda name=name: calls.append(name) or len(calls) for name in "ab"}
    results = interleaved(functions, 2)
    assert "".join(calls) == "ababab"
    assert [len(results[name].seconds) for name in "ab"] == [2, 2]
    assert [results[name].value for name in "ab"] == [5, 6]
    calls.clear()
    interleaved(functions, 1, warm_up=False)
    assert "".join(calls) == "ab"


def test_short_calls_are_averaged(monkeypatch: pytest.MonkeyPatch) -> None:
    now, durations = [0.0], {"fast": iter([0.1, 0.3, 0.2, 0.5]), "slow": iter([2.0])}

    def work(name: str) -> None:
        now[0] += next(durations[name])

    monkeypatch.setattr(timing, "perf_counter", lambda: now[0])
    results = interleaved({name: partial(work, name) for name in durations}, 1, warm_up=False, turn=0.6)
    assert results["fast"].seconds == [pytest.approx(0.2)]  # three calls, 0.6 in all
    assert results["slow"].seconds == [2.0]


def test_times_are_those_of_the_best_round() -> None:
    measured = Measured({"forward": Times(10, [0.02, 0.01]), "ours": Times(4, [0.05, 0.04, 0.08])})
    assert measured.milliseconds("forward") == pytest.approx(1)
    assert measured.milliseconds("ours") == pytest.approx(10)
    assert measured.units("ours") == pytest.approx(10)
    assert measured.ratio("forward", "ours") == pytest.approx(0.1)


def test_the_median_is_robust_to_an_outlier() -> None:
    measured = Measured({"forward": Times(10, [0.02, 0.02, 0.001]), "ours": Times(4, [0.05, 0.04, 0.08])})
    assert measured.median_units("ours") == pytest.approx(6.25)  # median of 6.25, 5 and 200


def test_a_part_of_the_labels_counts_as_part_of_an_example() -> None:
    assert Measured({"labels": Times(0.1, [3.0])}).milliseconds("labels") == pytest.approx(30_000)


def test_goals() -> None:
    upper, lower = Goal("≤", 2.0), Goal("≥", {"LeNet": 20})
    assert (upper.met("any", 2.0), upper.met("any", 2.1)) == (True, False)
    assert (lower.met("LeNet", 20), lower.met("LeNet", 19), lower.met("other", 0)) == (True, False, None)


def test_cells_show_whether_a_goal_is_met() -> None:
    column = Column("value", lambda measured: measured.numbers["value"], ".1f", Goal("≤", {"a": 2.0, "b": 1.0}))
    runs = [Run(name, 1, {}, Measured({}, {"value": 1.5})) for name in "abc"]
    assert [cell(column, run) for run in runs] == [
        Cell("1.5 (≤ 2.0: met)", True),
        Cell("1.5 (≤ 1.0: missed)", False),
        Cell("1.5"),
    ]
    section = Section("Title", (column,), dict.fromkeys("ba"))
    assert markdown_table(section, runs, 1).splitlines() == [
        *("Title; threads: 1:", "", "|  | value |", "|---|---:|"),
        *("| b | 1.5 |", "| a | 1.5 |"),
    ]
    assert markdown_table(section, runs, 2) == ""


def test_records_are_added_and_replaced(tmp_path: Path) -> None:
    then, now = {"date": "then", "cpu": "one"}, {"date": "now", "cpu": "one"}
    first = [Run("a", threads, then, Measured({"x": Times(1, [1.0])})) for threads in (1, 2)]
    for run in first:
        record.write("suite", [run], tmp_path)
    assert record.read("suite", tmp_path) == first
    newer, elsewhere = (Run("a", 1, now | {"cpu": cpu}, Measured({}, {"y": 2.0})) for cpu in ("one", "another"))
    record.write("suite", [newer, elsewhere], tmp_path)
    assert record.read("suite", tmp_path) == [newer, first[1], elsewhere]
    assert record.read("other", tmp_path) == []


def test_fit_costs_per_example_and_per_fit() -> None:
    """Two seconds per fit and 5 ms per example."""
    measured = Measured({"small": Times(100, [2.5, 3.0]), "large": Times(500, [4.5, 4.6])})
    assert per_example(measured) == pytest.approx(5)
    assert fixed_seconds(measured) == pytest.approx(2)


def test_peak_memory_is_measured_above_the_start() -> None:
    """The sizes exceed the freed memory that the allocator may keep from earlier tests."""
    earlier = bytearray(b"x" * (400 << 20))
    del earlier  # an earlier, larger peak must not count
    kept: list[bytes] = []

    def work() -> None:
        kept.append(bytes(b"x" * (300 << 20)))
        kept.clear()

    assert 290 << 20 < peak_memory(work) < 330 << 20


def test_processes_share_the_work() -> None:
    alone, shared = (in_child(alone_and_shared, 3, 3, 2, True, processes=count) for count in (1, 2))
    assert shared["mean, 1"] == alone["mean, 1"]
    assert shared["mean, 2"] == pytest.approx(alone["mean, 1"], rel=1e-4)
    names = {f"{step}, {count}" for step in ("fit", "score", "forward") for count in (1, 2)}
    assert {name: len(seconds) for name, seconds in shared.items() if name in names} == dict.fromkeys(names, 2)


def test_a_failing_process_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)benchmarks\.child:peak_memory \[\] ended with 1.*TypeError"):
        in_child(peak_memory)


def test_tables_are_separate_for_each_processor(tmp_path: Path) -> None:
    environment = {"torch": "2", "date": "now", "commit": "abcdef0123"}
    for cpu, units in (("one", 1.25), ("another", 1.5)):
        measured = Measured({"forward": Times(1, [1.0]), "ours": Times(1, [units])})
        record.write("last", [Run("LeNet", 1, environment | {"cpu": cpu}, measured)], tmp_path)
    _, another, one = page(tmp_path).split("of the last layer, K = 10; threads: 1:")
    assert "| 1.50 |" in another
    assert "another, torch 2, now, commit abcdef0." in another
    assert "| 1.25 |" in one
    assert "one, torch 2, now, commit abcdef0." in one
    assert "1.25" not in another
    assert "1.50" not in one
