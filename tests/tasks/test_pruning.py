"""Pruning: size, nesting and order of the lists of examples to keep."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ifcomp.errors import DataError, IfcompWarning, SettingError
from ifcomp.scores import ScoreTable
from ifcomp.tasks.pruning import keep_lists, warn_of_large_fractions
from tasks.tables import table_of

COMPLEXITY = [0.5, 0.1, 0.9, 0.1, 0.3]


def test_lowest_complexity_is_dropped_first_and_ties_in_order() -> None:
    result = keep_lists(table_of(COMPLEXITY, [0, 0, 1, 1, 1]), [0, 0.2, 0.4, 0.6, 0.99])
    assert {fraction: kept.tolist() for fraction, kept in result.items()} == {
        0: [0, 1, 2, 3, 4],
        0.2: [0, 2, 3, 4],  # ties are dropped in order
        0.4: [0, 2, 4],
        0.6: [0, 2],
        0.99: [2],
    }


def test_balanced_lists_drop_the_same_fraction_of_each_class() -> None:
    complexity = [1.0, 2.0, 3.0, 4.0, 50.0, 10.0, 20.0, 40.0, 30.0]
    labels = [0, 0, 0, 0, 3, 3, 3, 3, 3]
    result = keep_lists(table_of(complexity, labels, [[0.25] * 4] * 9), [0.5, 0.75], balanced=True)
    assert result[0.5].tolist() == [2, 3, 4, 7, 8]  # two of four and two of five are dropped
    assert result[0.75].tolist() == [3, 4, 7]


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), min_size=1, max_size=40),
    st.lists(st.floats(0, 0.999), min_size=1, max_size=6),
    st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_lists_are_nested_and_of_the_right_size(
    rows: list[tuple[int, int]], fractions: list[float], balanced: bool
) -> None:
    labels = np.array([label for _, label in rows])
    complexity = np.array([float(value) for value, _ in rows])
    table = table_of(complexity, labels, [[0.4, 0.3, 0.3]] * len(rows))
    result = keep_lists(table, fractions, balanced=balanced)
    previous = set(range(len(rows)))
    for fraction in sorted(fractions):
        kept = result[fraction].tolist()
        assert kept == sorted(set(kept))
        assert set(kept) <= previous
        previous = set(kept)
        groups = [labels == value for value in set(labels)] if balanced else [labels >= 0]
        for group in groups:
            inside = np.isin(np.arange(len(rows)), kept) & group
            assert group.sum() - inside.sum() == math.floor(fraction * group.sum() + 1e-9)
            dropped = group & ~inside
            if dropped.any():
                assert complexity[dropped].max() <= complexity[inside].min()


def test_fractions_are_exact_despite_rounding() -> None:
    result = keep_lists(table_of(np.arange(100.0), [0] * 100), [0.29, 0.57, 0.58])
    assert [100 - len(kept) for kept in result.values()] == [29, 57, 58]


def test_positions_are_those_of_the_index_column() -> None:
    whole = table_of(COMPLEXITY, [0] * 5)
    part = ScoreTable(whole.frame.iloc[[4, 2, 1]], whole.settings)
    assert keep_lists(part, [1 / 3])[1 / 3].tolist() == [2, 4]


def test_unusable_tables_and_fractions_are_refused() -> None:
    with pytest.raises(DataError, match="labels"):
        keep_lists(table_of(COMPLEXITY), [0.5])
    with pytest.raises(DataError, match="NaN"):
        keep_lists(table_of([1.0, math.nan], [0, 1]), [0.5])
    for fraction in (1.0, -0.1, math.nan):
        with pytest.raises(SettingError, match="fraction to drop"):
            keep_lists(table_of(COMPLEXITY, [0] * 5), [0.5, fraction])


def test_large_shares_are_warned_of() -> None:
    warn_of_large_fractions([0.3, 0.6])
    with pytest.warns(IfcompWarning, match=r"a share of 0\.8 leaves mostly hard examples\. Beyond 60%"):
        warn_of_large_fractions([0.3, 0.7, 0.8])
