"""Nearest neighbours and their votes against loops over all pairs."""

import numpy as np
import pytest
import torch

from ifcomp.evidence.neighbours import Neighbours, find_neighbours, neighbour_count, votes


def features(count: int, size: int = 4, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, size))


def nearest(queries: np.ndarray, reference: np.ndarray, count: int, own: list[int]) -> list[list[int]]:
    """Positions with the largest cosines, except for the position of the query itself."""
    found = []
    for query, excluded in zip(queries, own, strict=True):
        cosines = {
            position: query @ row / (np.linalg.norm(query) * np.linalg.norm(row))
            for position, row in enumerate(reference)
            if position != excluded
        }
        found.append(sorted(cosines, key=cosines.__getitem__, reverse=True)[:count])
    return found


def find(queries: np.ndarray, reference: np.ndarray, count: int, own: list[int] | None = None) -> Neighbours:
    positions = None if own is None else torch.tensor(own)
    return find_neighbours(torch.tensor(queries), torch.tensor(reference), count, positions)


@pytest.mark.parametrize("count", [1, 3, 10])
def test_neighbours_equal_a_loop_over_all_pairs(count: int) -> None:
    queries, reference = features(20), features(11, seed=1)
    found = find(queries, reference, count)
    assert found.indices.tolist() == nearest(queries, reference, count, [-1] * 20)
    for query, positions, similarities in zip(queries, found.indices, found.similarities, strict=True):
        rows = reference[positions.tolist()]
        cosines = rows @ query / (np.linalg.norm(rows, axis=1) * np.linalg.norm(query))
        np.testing.assert_allclose(similarities, cosines, rtol=1e-12)


def test_an_example_is_not_its_own_neighbour() -> None:
    rows = features(20)
    own = list(range(20))
    found = find(rows, rows, 19, own)
    assert found.indices.tolist() == nearest(rows, rows, 19, own)
    assert not (found.indices == torch.arange(20).unsqueeze(1)).any()


def test_duplicates_are_neighbours_of_each_other_but_not_of_themselves() -> None:
    rows = np.repeat(features(10), 2, 0)
    found = find(rows, rows, 1, list(range(20)))
    assert found.indices.flatten().tolist() == [position ^ 1 for position in range(20)]
    np.testing.assert_allclose(found.similarities, 1, rtol=1e-12)


def test_examples_outside_the_sample_have_all_of_it_as_candidates() -> None:
    rows, sample = features(20), [0, 3, 4, 11, 17, 19]
    own = [sample.index(position) if position in sample else -1 for position in range(20)]
    found = find(rows, rows[sample], 5, own)
    assert found.indices.tolist() == nearest(rows, rows[sample], 5, own)


def test_many_examples_are_searched_in_blocks() -> None:
    """More than 2^25 similarities."""
    rows = features(6000, 3)
    found = find(rows, rows, 2, list(range(6000)))
    for position in (0, 2999, 5592, 5593, 5999):
        expected = nearest(rows[position : position + 1], rows, 2, [position])[0]
        assert found.indices[position].tolist() == expected


def test_rows_of_zeros_have_neighbours() -> None:
    rows = features(6)
    rows[2] = 0
    found = find(rows, rows, 3, list(range(6)))
    assert found.similarities.isfinite().all()
    assert 2 not in found.indices[2].tolist()


def test_votes_are_smoothed_by_one_vote_of_the_class_frequencies() -> None:
    labels = np.random.default_rng(2).integers(0, 3, 11)
    found = find(features(20), features(11, seed=1), 4)
    frequencies = [np.mean(labels == label) for label in range(5)]
    expected = [
        [(sum(labels[position] == label for position in positions) + frequencies[label]) / 5 for label in range(5)]
        for positions in found.indices.tolist()
    ]
    result = votes(found, torch.tensor(labels), 5)
    assert result.dtype == np.float64
    np.testing.assert_allclose(result, expected, rtol=1e-12)
    np.testing.assert_allclose(result.sum(1), 1, rtol=1e-12)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([500, 300, 200], 50),
        ([101, 100, 100], 50),
        ([99, 99, 5], 49),
        ([10, 30, 20], 10),
        ([7, 9], 4),  # the median is 8
        ([9, 0, 0, 9], 4),  # classes without examples do not count
        ([3] * 20, 1),
        ([1] * 20, 1),
        ([6], 3),
        ([1, 1], 1),
    ],
)
def test_half_the_median_class_size_votes_but_at_most_50(sizes: list[int], expected: int) -> None:
    assert neighbour_count(torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))) == expected
