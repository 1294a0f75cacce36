"""What influence chooses by, and what it holds, by hand: no model is made."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from blocks import footprint, kronecker, other, table
from ifcomp.curvature.factors import BlockFactors, Factors, FitSettings, Relative
from ifcomp.errors import SettingError
from ifcomp.influence import choice, kernels
from ifcomp.influence.probes import _directions, check_probes, probe_cotangents, standard_error
from ifcomp.influence.weights import Weights, invert

GROUPED = kronecker("grouped", 2, 3, 5)
WIDE = kronecker("wide", 2, 3, 50)
TALL = kronecker("tall", 1, 8, 4)
TABLE, BARE = table("table", 7, 2), other("bare", 6)


# Kernels ------------------------------------------------------------------------------------------------------------


def test_costs() -> None:
    """Ten cotangents, seven positions, 28 pairs of them. A cached number costs 4, another one 24 to move."""
    assert choice.direct_cost(GROUPED, 7, 10) == 2 * 10 * 15 * (7 + 2 * 4)
    assert choice.pairs_cost(GROUPED, 7, 10) == 2 * 28 * (15 + 24 * 5 + 24 * 10 * 3)
    assert choice.direct_cost(kronecker("x", 1, 2048, 1024), 7, 2) == 2 * 2**21 * (7 + 2 * 4)
    assert choice.direct_cost(kronecker("x", 1, 2048, 1025), 7, 2) == 2 * 2048 * 1025 * (7 + 2 * 12)


def test_the_cheaper_kernel_is_taken() -> None:
    """Two positions of the wide one: 6 (1350 + 72 C) for pairs, 3000 C otherwise, which is less up to C = 3."""
    assert [choice.choose_kernel(WIDE, 2, count, 1.0) for count in (3, 4)] == ["direct", "pairs"]
    assert choice.choose_kernel(WIDE, 2, 4, 1000.0) == "pairs"
    assert choice.choose_kernel(WIDE, 2, 4, 1001.0) == "direct"
    assert choice.choose_kernel(WIDE, 1, 1, 1e30) == "pairs"


def session() -> Any:
    blocks = (GROUPED, WIDE, TALL, TABLE, BARE)
    return SimpleNamespace(blocks=blocks, recorded=blocks[:4], kronecker=blocks[:4], item_bytes=4)


def test_what_scoring_holds_whatever_the_data_is() -> None:
    """Numbers: second moments 30 + 300 + 32 + 14 + 6, bases 68 + 5018 + 80 + 4; the last two blocks have roots."""
    assert choice.weight_bytes(session()) == 4 * ((382 + 5170) + 382 + 20)


CONDITIONS = {"grouped": 1.0, "wide": 1.0, "tall": 1e9}


def held(monkeypatch: pytest.MonkeyPatch, at_once: int, conditions: dict[str, float], entries: int = 1 << 22) -> int:
    """Bytes for four examples and ten cotangents, of which some are worked on at once, beyond those of a slab."""
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(choice, "slab_bytes", lambda *given: asked.append(given) or 7)
    monkeypatch.setattr(kernels, "_PAIR_ENTRIES", entries)
    weights = {name: Weights(torch.ones(1), 1.0, condition) for name, condition in conditions.items()}
    there, own = footprint(positions={"wide": 2, "tall": 1, "table": 3}), session()
    found = choice.form_bytes(own, weights, 10, there, 4, at_once)
    assert asked == [(own, there, 4, at_once, {1: 1, 2: 2, 3: 1, 9: 1, 10: 10}[at_once])]  # of ten
    return found - 7


def test_what_scoring_holds_for_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide: V has 4 x 2 x 3 x 2^2 = 96 numbers, from sums of 4 x 2 x 3 x 3 = 72 pairs and outputs over 4 x 2 x 3 x 50
    = 1200 products, which are there twice. Tall: 32, from 32 sums over 16 products.
    """
    assert held(monkeypatch, 3, CONDITIONS) == 4 * (96 + 32 + 2400 + 72)
    assert held(monkeypatch, 10, CONDITIONS) == 4 * (96 + 2400 + 72)  # nothing is kept when all are worked on at once
    assert held(monkeypatch, 3, CONDITIONS, entries=700) == 4 * (96 + 32 + 1200 + 36)
    assert held(monkeypatch, 3, CONDITIONS, entries=100) == 4 * (96 + 32 + 600 + 18)  # one example at least
    assert held(monkeypatch, 9, CONDITIONS, entries=100) == 4 * (96 + 32 + 2 * 4 * 9 * 6 * 2)  # rearranged rows
    # without the wide one: products twice and sums are as much as sums before and after they are put together
    assert held(monkeypatch, 1, {**CONDITIONS, "wide": 1e9}) == 4 * (32 + 64)
    assert held(monkeypatch, 2, {**CONDITIONS, "wide": 1e9}) == 4 * (32 + 2 * 4 * 2 * 8)


# Inverse curvature --------------------------------------------------------------------------------------------------


def factors(*moments: float, dtype: torch.dtype = torch.float32) -> Factors:
    return Factors({"a": BlockFactors(torch.tensor(moments, dtype=dtype))}, 1, 2, FitSettings())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_weights_by_hand(dtype: torch.dtype) -> None:
    found = invert(factors(4.0, 1.0, 0.0, dtype=dtype), 1.0, ())["a"]
    assert_close(found.values, torch.tensor([0.2, 0.5, 1.0], dtype=dtype))
    assert (found.scale, found.condition) == (1.0, pytest.approx(5 / 3))
    found = invert(factors(4.0, 1.0, 1.0, dtype=dtype), Relative(3.0), ())["a"]  # delta = 3 * 2
    assert_close(found.values, torch.tensor([0.1, 1 / 7, 1 / 7], dtype=dtype))
    assert found.condition == pytest.approx(2 / 7)


def test_weights_are_scaled_to_at_most_1e12() -> None:
    found = invert(factors(1.0, 0.0), 1e-15, ())["a"]
    assert found.scale == pytest.approx(1e3)
    assert_close(found.values, torch.tensor([1e-3, 1e12]))
    assert found.condition == pytest.approx(0.5e15)
    assert invert(factors(1.0, 0.0), 1e-12, ())["a"].scale == 1.0
    assert invert(factors(1.0, 0.0), 0.0, ())["a"].values.tolist() == [1.0, 0.0]


def test_a_block_without_parameters_has_no_weights() -> None:
    found = invert(factors(), 1.0, ())["a"]
    assert (found.values.shape, found.scale) == ((0,), 1.0)


# Probes -------------------------------------------------------------------------------------------------------------


def test_the_error_by_hand() -> None:
    """Five of eight: the first alone, then two pairs; sums 1, 5 and 13 beside 3.8, 7.6 and 7.6."""
    variance = (2.8**2 + 2.6**2 / 2 + 5.4**2 / 2) / 2
    row = torch.tensor([[1.0, 2.0, 3.0, 5.0, 8.0], [0.0, 0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    found = standard_error(row, 8)
    assert found.tolist() == pytest.approx([(5 * (1 - 5 / 8) * variance) ** 0.5, 0.0])


def test_the_error_of_one_pair_by_hand() -> None:
    """Two of eight: half of the squared difference, times 8/7."""
    found = standard_error(torch.tensor([[1.0, 4.0]], dtype=torch.float64), 8)
    assert found.item() == pytest.approx((2 * (1 - 2 / 8) * (9 / 2 * 8 / 7)) ** 0.5)


def test_the_error_of_two_pairs_by_hand() -> None:
    """Four of six, where two pairs are all there are: ``sum_u (h_u - 2 h)^2 / 2`` with sums 3 and 9, h = 3."""
    found = standard_error(torch.tensor([[1.0, 2.0, 4.0, 5.0]], dtype=torch.float64), 6)
    assert found.item() == pytest.approx((4 * (1 - 4 / 6) * (3**2 / 2 + 3**2 / 2)) ** 0.5)


SIZES = [(2, 1), (2, 2), (3, 1), (3, 2), (3, 3), (8, 1), (8, 3), (8, 4), (8, 7), (8, 8), (9, 5), (9, 8), (9, 9)]


@pytest.mark.parametrize(("classes", "probes"), SIZES)
def test_directions_are_orthogonal_and_give_every_class_the_same_weight(classes: int, probes: int) -> None:
    for seed in range(6):
        found = torch.from_numpy(_directions(classes, probes, seed))
        assert found.shape == (classes, probes)
        assert_close(found.T @ found, torch.eye(probes, dtype=found.dtype) * classes / probes, rtol=0, atol=1e-12)
        assert_close(found.square().sum(1), torch.ones(classes, dtype=found.dtype))


def test_directions_are_drawn_from_the_seed() -> None:
    drawn = {seed: torch.from_numpy(_directions(9, 4, seed)) for seed in (0, 1, -1, 2**64 - 1, 2**64)}
    assert torch.equal(drawn[-1], drawn[2**64 - 1])
    assert torch.equal(drawn[0], drawn[2**64])
    assert not torch.equal(drawn[0].abs(), drawn[1].abs())  # other columns or another order, not signs alone
    signs = torch.stack([torch.from_numpy(_directions(2, 1, seed))[:, 0].sign() for seed in range(64)])
    assert {tuple(row) for row in signs.tolist()} == {(1, 1), (1, -1), (-1, 1), (-1, -1)}


def gram(p: Tensor, probes: int, seed: int, at_once: int = 2) -> Tensor:
    """``sum v v^T``, [B, K, K]."""
    found = probe_cotangents(p, probes, seed)
    assert found.count == probes
    v = torch.cat(list(found.chunks(at_once)))
    assert v.shape == (probes, *p.shape)
    return torch.einsum("cbk,cbl->bkl", v, v)


@pytest.mark.parametrize("classes", [2, 3, 6])
def test_cotangents_of_all_probes_give_the_covariance_of_labels(classes: int) -> None:
    p = torch.softmax(torch.arange(2.0 * classes, dtype=torch.float64).view(2, classes).sin(), 1)
    expected = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
    assert_close(gram(p, classes, 5), expected, rtol=0, atol=1e-14)


def test_cotangents_of_few_probes_give_it_on_average() -> None:
    p = torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=torch.float64)
    expected = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
    for probes in (1, 2):
        drawn = torch.stack([gram(p, probes, seed) for seed in range(400)])
        assert ((drawn.mean(0) - expected).abs() < 5 * drawn.std(0) / 20 + 1e-12).all()
        assert drawn.std(0).max() > 0.01


def test_probes_are_whole_numbers_up_to_the_classes() -> None:
    for allowed in (1, 5):
        check_probes(allowed, 5)
    for wrong in (0, 6, 2.0):
        with pytest.raises(SettingError, match=f"from 1 to the number of classes, 5, but is {wrong}"):
            check_probes(wrong, 5)  # type: ignore[arg-type]
        with pytest.raises(SettingError, match="number of classes, 5"):
            probe_cotangents(torch.full((1, 5), 0.2), wrong, 0)  # type: ignore[arg-type]
