"""Timing, goals, records and processes: what the suites are made of."""

from functools import partial
from pathlib import Path

import pytest

from benchmarks import record, timing
from benchmarks.child import in_child, peak_memory
from benchmarks.page import page
from benchmarks.record import Run
from benchmarks.suite import Column, Goal, Measured, Section, Times
from benchmarks.suites.fit import fixed_seconds, per_example
from benchmarks.suites.growth import EXAMPLES, LABELS, bytes_an_example, growth_of_a_label, spread_of_costs
from benchmarks.suites.processes import alone_and_shared
from benchmarks.tables import Cell, cell, markdown_table
from benchmarks.timing import interleaved


def test_functions_are_called_in_turns() -> None:
    calls: list[str] = []
    functions = {name: lambda name=name: calls.append(name) or len(calls) for name in "ab"}
    found = interleaved(functions, 2)
    assert "".join(calls) == "ababab"
    assert [len(found[name].seconds) for name in "ab"] == [2, 2]
    assert [found[name].value for name in "ab"] == [5, 6]
    calls.clear()
    interleaved(functions, 1, warm_up=False)
    assert "".join(calls) == "ab"


def test_a_turn_of_a_quick_function_is_the_mean_of_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    now, took = [0.0], {"quick": iter([0.1, 0.3, 0.2, 0.5]), "slow": iter([2.0])}

    def work(name: str) -> None:
        now[0] += next(took[name])

    monkeypatch.setattr(timing, "perf_counter", lambda: now[0])
    found = interleaved({name: partial(work, name) for name in took}, 1, warm_up=False, turn=0.6)
    assert found["quick"].seconds == [pytest.approx(0.2)]  # three calls, 0.6 in all
    assert found["slow"].seconds == [2.0]


def test_the_best_round_counts() -> None:
    measured = Measured({"forward": Times(10, [0.02, 0.01]), "ours": Times(4, [0.05, 0.04, 0.08])})
    assert measured.milliseconds("forward") == pytest.approx(1)
    assert measured.milliseconds("ours") == pytest.approx(10)
    assert measured.units("ours") == pytest.approx(10)
    assert measured.ratio("forward", "ours") == pytest.approx(0.1)


def test_a_lucky_forward_pass_does_not_change_the_typical_round() -> None:
    measured = Measured({"forward": Times(10, [0.02, 0.02, 0.001]), "ours": Times(4, [0.05, 0.04, 0.08])})
    assert measured.typical_units("ours") == pytest.approx(6.25)  # of 6.25, 5 and 200


def test_a_part_of_an_example_counts_as_such() -> None:
    assert Measured({"labels": Times(0.1, [3.0])}).milliseconds("labels") == pytest.approx(30_000)


def test_goals() -> None:
    most, least = Goal("≤", 2.0), Goal("≥", {"LeNet": 20})
    assert (most.met("any", 2.0), most.met("any", 2.1)) == (True, False)
    assert (least.met("LeNet", 20), least.met("LeNet", 19), least.met("other", 0)) == (True, False, None)


def test_cells_say_whether_a_goal_is_met() -> None:
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
        *("| b | 1.5 (≤ 1.0: missed) |", "| a | 1.5 (≤ 2.0: met) |"),
    ]
    assert markdown_table(section, runs, 2) == ""


def test_records_are_added_and_replaced(tmp_path: Path) -> None:
    then, now = {"date": "then", "cpu": "one"}, {"date": "now", "cpu": "one"}
    first = [Run("a", threads, then, Measured({"x": Times(1, [1.0])})) for threads in (1, 2)]
    for own in first:
        record.write("suite", [own], tmp_path)
    assert record.read("suite", tmp_path) == first
    newer, elsewhere = (Run("a", 1, now | {"cpu": cpu}, Measured({}, {"y": 2.0})) for cpu in ("one", "another"))
    record.write("suite", [newer, elsewhere], tmp_path)
    assert record.read("suite", tmp_path) == [newer, first[1], elsewhere]
    assert record.read("other", tmp_path) == []


def test_the_cost_of_one_more_example_and_what_comes_once() -> None:
    """Two seconds once, and 5 ms an example."""
    measured = Measured({"small": Times(100, [2.5, 3.0]), "large": Times(500, [4.5, 4.6])})
    assert per_example(measured) == pytest.approx(5)
    assert fixed_seconds(measured) == pytest.approx(2)


def test_growth_with_labels() -> None:
    linear = Measured({str(count): Times(1, [0.1 + 0.02 * count]) for count in LABELS})
    square = Measured({str(count): Times(1, [count**2]) for count in LABELS})
    assert growth_of_a_label(linear) == pytest.approx(1)
    assert growth_of_a_label(square) == pytest.approx((64 + 32) / (32 + 2))


def test_growth_with_examples() -> None:
    times = {str(count): Times(count, [0.01 * count + 1]) for count in EXAMPLES}
    measured = Measured(times, {f"bytes at {count}": 1e6 + 50 * count for count in EXAMPLES})
    assert spread_of_costs(measured) == pytest.approx(0.02 / 0.01001)
    assert bytes_an_example(measured) == pytest.approx(50)


def test_peak_memory_is_above_what_is_held_at_the_start() -> None:
    """More than the C library keeps of what was freed by the tests before, which it would take it from."""
    held = bytearray(b"x" * (400 << 20))
    del held  # was larger before, which must not hide anything
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


def test_a_process_that_fails_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)benchmarks\.child:peak_memory \[\] ended with 1.*TypeError"):
        in_child(peak_memory)


def test_every_processor_has_its_own_tables(tmp_path: Path) -> None:
    place = {"torch": "2", "date": "now", "commit": "abcdef0123"}
    for cpu, units in (("one", 1.25), ("another", 1.5)):
        measured = Measured({"forward": Times(1, [1.0]), "ours": Times(1, [units])})
        record.write("last", [Run("LeNet", 1, place | {"cpu": cpu}, measured)], tmp_path)
    _, another, one = page(tmp_path).split("### last, ")
    assert another.startswith("another\n")
    assert "| 1.50 (≤ 1.30: missed) |" in another
    assert "Threads: 1; another, torch 2, now, commit abcdef0." in another
    assert one.startswith("one\n")
    assert "| 1.25 (≤ 1.30: met) |" in one
    assert "1.25" not in another
    assert "1.50" not in one
