"""Distributions, label residuals, Fisher cotangents and label samples."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from ifcomp.curvature import labels as label_module
from ifcomp.curvature.factors import FitSettings
from ifcomp.curvature.labels import (
    Cotangents,
    _mix,
    all_label_residuals,
    fisher_cotangents,
    label_cotangents,
    pair_cotangents,
    probabilities,
    sample_labels,
    squared_residuals,
)


def double(*rows: object) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


P = double([0.5, 0.3, 0.2], [0.1, 0.2, 0.7])

#: ``p - e_y`` of every label, [K, B, K].
RESIDUALS = torch.stack([P - torch.eye(3, dtype=P.dtype)[label] for label in range(3)])


def joined(cotangents: Cotangents, size: int) -> Tensor:
    """All cotangents from chunks of a given size."""
    parts = list(cotangents.chunks(size))
    assert [len(part) for part in parts[:-1]] == [size] * (len(parts) - 1)
    assert len(parts) == math.ceil(cotangents.count / size)
    return torch.cat(parts)


# Residuals and cotangents


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_residuals_of_every_label(size: int) -> None:
    cotangents = label_cotangents(P)
    assert cotangents.count == Cotangents.of(RESIDUALS).count == 3
    torch.testing.assert_close(joined(cotangents, size), RESIDUALS)
    torch.testing.assert_close(joined(Cotangents.of(RESIDUALS), size), RESIDUALS)
    torch.testing.assert_close(all_label_residuals(P), RESIDUALS)


def test_contrasts_of_two_labels() -> None:
    cotangents = pair_cotangents(torch.tensor([0, 2]), torch.tensor([1, 0]), 4)
    assert cotangents.count == 1
    assert torch.equal(joined(cotangents, 4), double([[1, -1, 0, 0], [-1, 0, 1, 0]]))


def test_probabilities_are_in_double_and_without_a_graph() -> None:
    p = probabilities(torch.tensor([[0.0, math.log(3)]], requires_grad=True), 2.0)
    torch.testing.assert_close(p, double([0.1, 0.9]), rtol=1e-6, atol=0)
    assert not p.requires_grad
    torch.testing.assert_close(probabilities(torch.tensor([[5.0, 0.0]]), 0.0), double([0.5, 0.5]))


def test_exact_and_empirical_cotangents() -> None:
    exact = fisher_cotangents(P.log(), FitSettings(fisher="exact"), None, 0, 0)
    torch.testing.assert_close(joined(exact, 2), RESIDUALS * P.T.sqrt().unsqueeze(2))
    empirical = fisher_cotangents(P.log(), FitSettings(fisher="empirical"), torch.tensor([2, 0]), 0, 0)
    assert empirical.count == 1
    torch.testing.assert_close(joined(empirical, 2), torch.stack([RESIDUALS[2, 0], RESIDUALS[0, 1]]).unsqueeze(0))


@pytest.mark.parametrize("samples", [1, 3])
def test_a_certain_model_has_no_gradient(samples: int) -> None:
    """Only one label has positive probability, and its residual is zero."""
    cotangents = fisher_cotangents(double([1e4, 0.0, 0.0]), FitSettings(label_samples=samples), None, 0, 0)
    assert cotangents.count == samples
    assert torch.equal(joined(cotangents, 2), torch.zeros(samples, 1, 3, dtype=torch.float64))


@pytest.mark.parametrize("samples", [1, 2])
def test_sampled_cotangents_have_the_expected_length(samples: int) -> None:
    """Each is a residual scaled to ``S = E_y |p - e_y|^2 = 1 - sum p^2``, divided among the samples."""
    cotangents = fisher_cotangents(P.log(), FitSettings(label_samples=samples, seed=1), None, 0, 0)
    lengths = ((1 - P.square().sum(1)) / samples).sqrt()
    for draw in joined(cotangents, 1):
        for row, length, options in zip(draw, lengths, RESIDUALS.transpose(0, 1), strict=True):
            scaled = options * (length / options.norm(dim=1, keepdim=True))
            assert (scaled - row).abs().amax(1).min() < 1e-12


def test_squared_residuals_do_not_cancel() -> None:
    p = double([1.0, 1e-30, 3e-30], [1.0, 0.0, 0.0], [0.5, 0.5, 0.0])
    expected = double([1.6e-59 + 1e-59, 2.0, 2.0], [0.0, 2.0, 2.0], [0.5, 0.5, 1.5])
    torch.testing.assert_close(squared_residuals(p), expected, rtol=1e-12, atol=0)


# Label samples


def random_probability(size: int, classes: int) -> Tensor:
    """Distributions that are far from uniform, [B, K]."""
    generator = torch.Generator().manual_seed(0)
    return torch.softmax(1.5 * torch.randn(size, classes, generator=generator, dtype=torch.float64), 1)


def splitmix(state: int) -> int:
    """One output of splitmix64 in Python integers."""
    z = (state + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def test_random_numbers_are_those_of_splitmix64() -> None:
    assert splitmix(1234567) == 6457827717110365317  # the published value
    states = [0, 1, 1234567, 2**63, 2**64 - 1]
    assert _mix(np.array(states, np.uint64)).tolist() == [splitmix(state) for state in states]


@pytest.mark.parametrize("batch_size", [1, 7])
def test_label_samples_depend_on_the_position_only(batch_size: int) -> None:
    p = random_probability(100, 5)
    for pass_index, draw in ((0, 0), (1, 0), (0, 1), (1, 2)):
        parts = [
            sample_labels(p[first : first + batch_size], 4, pass_index, first, draw)
            for first in range(0, 100, batch_size)
        ]
        assert torch.equal(torch.cat(parts), sample_labels(p, 4, pass_index, 0, draw))


@pytest.mark.parametrize("seed", [0, 2**63 + 11])
@pytest.mark.parametrize(("pass_index", "draw"), [(0, 0), (1, 0), (0, 3)])
def test_label_frequencies_match_the_distribution(seed: int, pass_index: int, draw: int) -> None:
    p, size = random_probability(1, 6)[0], 20_000
    labels = sample_labels(p.expand(size, -1), seed, pass_index, 0, draw)
    counts = np.bincount(labels.numpy(), minlength=6)
    assert stats.chisquare(counts, size * p.numpy()).pvalue > 1e-3


@pytest.mark.parametrize(
    ("other_seed", "other_pass", "other_draw", "shift"),
    [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 1, 1, 0), (0, 0, 0, 1), (0, 0, 0, 64), (2**32, 0, 0, 0)],
)
def test_label_samples_are_independent(other_seed: int, other_pass: int, other_draw: int, shift: int) -> None:
    """Samples of another seed, pass, draw or position are independent."""
    p = random_probability(1, 4)[0].expand(20_000, -1)
    one, other = sample_labels(p, 0, 0, 0, 0), sample_labels(p, other_seed, other_pass, shift, other_draw)
    table = np.zeros((4, 4))
    np.add.at(table, (one.numpy(), other.numpy()), 1)
    assert stats.chi2_contingency(table).pvalue > 1e-3


def test_pass_and_draw_are_not_interchangeable() -> None:
    p = random_probability(200, 4)
    assert not torch.equal(sample_labels(p, 0, 1, 0, 2), sample_labels(p, 0, 2, 0, 1))


#: Distributions with labels of probability zero.
WITH_ZEROS = [
    [0.0, 1.0, 0.0],
    [1.0, 0.0, 0.0],
    [0.0, 0.0, 1.0],
    [0.0, 0.5, 0.5],
    [0.5, 0.0, 0.5],
    [0.5, 0.5, 0.0],
    [0.1, 0.9, 0.0],
    [0.3, 0.7 - 1e-16, 0.0],
    [1e-320, 1.0, 0.0],
]


@pytest.mark.parametrize("row", WITH_ZEROS, ids=str)
def test_labels_of_probability_zero_are_never_drawn(row: list[float]) -> None:
    p = double(row).expand(5000, -1)
    labels = sample_labels(p, 0, 0, 0, 0)
    assert (p.gather(1, labels.unsqueeze(1)) > 0).all()


@pytest.mark.parametrize("bits", [0, 2**64 - 1], ids=["smallest", "largest"])
@pytest.mark.parametrize("row", WITH_ZEROS, ids=str)
def test_labels_of_probability_zero_are_not_drawn_by_extreme_uniforms(
    row: list[float], bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The random generator returns its smallest or largest number."""
    monkeypatch.setattr(label_module, "_mix", lambda values: np.full(np.shape(values), bits, np.uint64))
    p = double(row, row)
    labels = sample_labels(p, 0, 0, 0, 0)
    assert (p.gather(1, labels.unsqueeze(1)) > 0).all()


def test_rounding_does_not_draw_beyond_the_last_label() -> None:
    """More than half of the smallest positive number rounds to the number itself."""
    p = double([0.0, 0.0, 5e-324]).expand(64, 3)
    assert sample_labels(p, 0, 0, 0, 0).tolist() == [2] * 64
