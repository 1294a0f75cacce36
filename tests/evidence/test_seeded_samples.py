"""Seeded samples: sorted, without repetition, and independent of permutations with the same seed."""

import numpy as np
import pytest
import torch

from ifcomp.evidence.seeds import seeded_sample


def test_samples_are_sorted_without_repetition_and_depend_on_the_seed() -> None:
    sample = seeded_sample(1000, 300, 5)
    assert len(sample) == 300
    assert (sample.diff() > 0).all()
    assert 0 <= sample[0] <= sample[-1] < 1000
    assert torch.equal(sample, seeded_sample(1000, 300, 5))
    assert not torch.equal(sample, seeded_sample(1000, 300, 6))
    assert torch.equal(seeded_sample(7, 7, 0), torch.arange(7))
    assert len(seeded_sample(100, 10, -1)) == 10


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_samples_are_independent_of_permutations_with_the_same_seed(seed: int) -> None:
    """Wrong labels are often planted at the first indices of a permutation with seed 0."""
    permutations = (
        torch.randperm(30_000, generator=torch.Generator().manual_seed(seed)),
        torch.from_numpy(np.random.default_rng(seed).permutation(30_000)),
        torch.from_numpy(np.random.RandomState(seed).permutation(30_000)),
    )
    sample = seeded_sample(30_000, 2_000, seed)
    for permutation in permutations:
        share = torch.isin(sample, permutation[:9_000]).double().mean()
        assert share == pytest.approx(0.3, abs=0.05)
