"""Maps of features against NumPy: standardisation, weights of tokens and principal subspaces."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ifcomp.evidence.feature_maps import MAX_FEATURES, FeatureMap, Moments


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def moments_of(features: np.ndarray, counts_tokens: bool = False, batch: int = 7, seed: int = 0) -> Moments:
    moments = Moments(features.shape[1], counts_tokens, seed)
    for part in torch.tensor(features).split(batch):
        moments.add(part)
    moments.reduce()
    return moments


def map_of(features: np.ndarray, counts_tokens: bool = False, batch: int = 7, seed: int = 0) -> FeatureMap:
    found = moments_of(features, counts_tokens, batch, seed).feature_map(torch.float64)
    assert found is not None
    return found


def low_rank(rank: int, examples: int = 300, size: int = 1500) -> np.ndarray:
    """Features whose standardised version is a matrix of low rank plus noise of a hundredth of its size."""
    return normal(examples, rank) @ normal(rank, size, seed=1) + 0.01 * rank**0.5 * normal(examples, size, seed=2)


def standardise(features: np.ndarray) -> np.ndarray:
    result: np.ndarray = (features - features.mean(0)) / features.std(0)
    return result


def test_features_are_standardised_and_constant_ones_dropped() -> None:
    features = normal(20, 5) * [1, 1e-3, 1e4, 1, 1] + [0, 5, -3, 0, 0]
    features[:, 3] = 7.5
    features[:, 4] = 1e3 + 1e-9 * features[:, 4]  # rounding
    found = map_of(features)
    assert (found.size, found.columns.tolist(), found.projection) == (3, [0, 1, 2], None)
    np.testing.assert_allclose(found(torch.tensor(features)), standardise(features[:, :3]), rtol=1e-8, atol=1e-8)


def test_a_layer_of_constant_features_has_no_map() -> None:
    assert moments_of(np.ones((10, 3))).feature_map(torch.float64) is None
    assert moments_of(np.zeros((10, 3))).feature_map(torch.float64) is None


def test_token_counts_are_weighted_by_inverse_document_frequency_and_normalised() -> None:
    """Tokens of all documents have the weight 0, and tokens of none are constant."""
    generator = np.random.default_rng(0)
    counts = generator.integers(0, 3, (20, 4)).astype(float)
    counts[:, 1], counts[:, 3] = generator.integers(1, 5, 20), 0
    counts[5] = [0, 2, 0, 0]  # no token with a weight
    found = map_of(counts, counts_tokens=True)
    assert found.columns.tolist() == [0, 2]
    expected = np.zeros((20, 2))
    for row in range(20):
        for place, column in enumerate((0, 2)):
            documents = sum(count > 0 for count in counts[:, column])
            expected[row, place] = counts[row, column] * np.log(21 / (1 + documents))
        expected[row] /= np.linalg.norm(expected[row]) or 1
    np.testing.assert_allclose(found(torch.tensor(counts)), expected, rtol=1e-12)
    assert moments_of(counts[:, [1, 3]], counts_tokens=True).feature_map(torch.float64) is None


def test_up_to_1000_features_are_not_projected() -> None:
    assert map_of(normal(60, MAX_FEATURES)).projection is None


def test_wide_features_keep_their_leading_principal_components() -> None:
    """The standardised features have 20 directions with nearly all of the variance."""
    features = low_rank(20) * np.geomspace(1e-3, 1e3, 1500) + 3
    features[:, 7] = 1.0
    found = map_of(features)
    expected = standardise(np.delete(features, 7, 1))
    assert found.projection is not None
    basis = found.projection.numpy()
    np.testing.assert_allclose(basis.T @ basis, np.eye(found.size), atol=1e-10)
    np.testing.assert_allclose(found(torch.tensor(features)), expected @ basis, rtol=1e-8, atol=1e-8)
    _, _, directions = np.linalg.svd(expected, full_matrices=False)
    lost = directions[:20] - directions[:20] @ basis @ basis.T
    assert np.linalg.norm(lost, axis=1).max() < 1e-3


def test_a_sketch_of_fewer_dimensions_than_the_data_keeps_more_variance_than_a_random_projection() -> None:
    """1,200 examples of slowly decaying spectrum: no subspace of 1,000 dimensions holds all of them."""
    features = normal(1200, 1500) * np.geomspace(1, 0.01, 1500)
    rotation, _ = np.linalg.qr(normal(1500, 1500, seed=1))
    expected = standardise(features @ rotation)
    found = map_of(features @ rotation)
    assert found.size == MAX_FEATURES
    kept = np.square(found(torch.tensor(features @ rotation)).numpy()).sum() / np.square(expected).sum()
    best = np.square(np.linalg.svd(expected, compute_uv=False)[:MAX_FEATURES]).sum() / np.square(expected).sum()
    assert best - 0.01 < kept <= best


def test_the_projection_of_few_examples_has_their_rank() -> None:
    """Directions of rounding errors are dropped: centred features of 40 examples have 39 dimensions."""
    features = normal(40, 1500)
    found = map_of(features)
    assert found.size == 39
    expected = standardise(features)
    projected = found(torch.tensor(features)).numpy()
    np.testing.assert_allclose(projected @ projected.T, expected @ expected.T, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("counts_tokens", [False, True])
def test_batches_do_not_change_the_projected_features(counts_tokens: bool) -> None:
    features = low_rank(20)
    if counts_tokens:
        features = np.random.default_rng(0).poisson(0.05, features.shape).astype(float)
    found = [map_of(features, counts_tokens, batch)(torch.tensor(features)) for batch in (300, 11)]
    torch.testing.assert_close(found[0], found[1], rtol=1e-7, atol=1e-7)


def test_the_seed_determines_the_sketch() -> None:
    first, same, other = (map_of(low_rank(20), seed=seed).projection for seed in (3, 3, 4))
    assert first is not None
    assert other is not None
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
