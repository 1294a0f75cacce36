"""Small pieces of the curvature against numbers worked out by hand or by plain Python."""

import math

import numpy as np
import pytest
import torch
from ifcomp.curvature.rotation import (
    RotationPlan,
    apply_basis,
    rotated_columns,
    rotated_slabs,
    sum_equal_indices,
    turn_rows,
)
from torch import Tensor
from torch.testing import assert_close

from blocks import Recorded, kronecker
from ifcomp.blocks.block import Basis
from ifcomp.curvature import rotation
from ifcomp.curvature.factors import (
    BlockFactors,
    Covariance,
    Covariances,
    Factors,
    FitSettings,
    Relative,
    check_damping,
    check_finite,
    covariance_sums,
    inverse_curvature,
)
from ifcomp.curvature.health import with_health
from ifcomp.curvature.labels import (
    Cotangents,
    _mix,
    all_label_residuals,
    fisher_cotangents,
    label_cotangents,
    pair_cotangents,
    probabilities,
    sample_labels,
)
from ifcomp.errors import MergeError, NonFiniteError, SettingError
from ifcomp.layers.inventory import Coverage


def double(*rows: object) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


# Labels -------------------------------------------------------------------------------------------------------------

P = double([0.5, 0.3, 0.2], [0.1, 0.2, 0.7])


def together(cotangents: Cotangents, size: int) -> Tensor:
    parts = list(cotangents.chunks(size))
    assert [len(part) for part in parts[:-1]] == [size] * (len(parts) - 1)
    assert len(parts) == math.ceil(cotangents.count / size)
    return torch.cat(parts)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_residuals_of_every_label(size: int) -> None:
    expected = torch.stack([P - torch.eye(3, dtype=P.dtype)[label] for label in range(3)])
    found = label_cotangents(P)
    assert found.count == 3
    assert_close(together(found, size), expected)
    assert_close(all_label_residuals(P), expected)
    assert_close(together(Cotangents.of(expected), size), expected)
    assert Cotangents.of(expected).count == 3


def test_contrasts_of_two_labels() -> None:
    found = pair_cotangents(torch.tensor([0, 2]), torch.tensor([1, 0]), 4)
    assert found.count == 1
    assert torch.equal(together(found, 4), double([[1, -1, 0, 0], [-1, 0, 1, 0]]))


def test_probabilities_are_in_double_and_without_a_graph() -> None:
    found = probabilities(torch.tensor([[0.0, math.log(3)]], requires_grad=True), 2.0)
    assert_close(found, double([0.1, 0.9]), rtol=1e-6, atol=0)
    assert not found.requires_grad
    assert_close(probabilities(torch.tensor([[5.0, 0.0]]), 0.0), double([0.5, 0.5]))


@pytest.mark.parametrize("samples", [1, 3])
def test_a_certain_model_has_no_gradient(samples: int) -> None:
    """No label but one can be drawn, and its residual is zero."""
    settings = FitSettings(label_samples=samples)
    found = fisher_cotangents(double([1e4, 0.0, 0.0]), settings, None, 0, 0)
    assert found.count == samples
    assert torch.equal(together(found, 2), torch.zeros(samples, 1, 3, dtype=torch.float64))


@pytest.mark.parametrize("samples", [1, 2])
def test_a_draw_is_a_residual_of_the_expected_length(samples: int) -> None:
    """``S = E_y |p - e_y|^2 = 1 - sum p^2``, shared by the draws."""
    logits = P.log()
    drawn = together(fisher_cotangents(logits, FitSettings(label_samples=samples, seed=1), None, 0, 0), 1)
    residuals = torch.stack([P - torch.eye(3, dtype=P.dtype)[label] for label in range(3)])
    lengths = ((1 - P.square().sum(1)) / samples).sqrt()
    for own in drawn:
        for row, length, options in zip(own, lengths, residuals.transpose(0, 1), strict=True):
            scaled = options * (length / options.norm(dim=1, keepdim=True))
            assert (scaled - row).abs().amax(1).min() < 1e-12


def test_weights_of_labels() -> None:
    exact = fisher_cotangents(P.log(), FitSettings(fisher="exact"), None, 0, 0)
    residuals = torch.stack([P - torch.eye(3, dtype=P.dtype)[label] for label in range(3)])
    assert_close(together(exact, 2), residuals * P.T.sqrt().unsqueeze(2))
    given = fisher_cotangents(P.log(), FitSettings(fisher="empirical"), torch.tensor([2, 0]), 0, 0)
    assert given.count == 1
    assert_close(together(given, 2), torch.stack([residuals[2, 0], residuals[0, 1]]).unsqueeze(0))


def splitmix(state: int) -> int:
    """One number of splitmix64, with whole numbers of any size."""
    z = (state + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def test_numbers_are_those_of_splitmix64() -> None:
    assert splitmix(1234567) == 6457827717110365317  # the published one
    states = [0, 1, 1234567, 2**63, 2**64 - 1]
    assert _mix(np.array(states, np.uint64)).tolist() == [splitmix(state) for state in states]


# Factors ------------------------------------------------------------------------------------------------------------

TURN = double([0.6, -0.8], [0.8, 0.6])


def factors(count: int = 3, **moments: Tensor) -> Factors:
    return Factors({name: BlockFactors(value) for name, value in moments.items()}, count, 2, FitSettings())


def test_the_inverse() -> None:
    moments = torch.tensor([4.0, 1.0, 0.0])
    assert_close(inverse_curvature(moments, 1.0), double(0.2, 0.5, 1.0))
    assert inverse_curvature(moments, 0.0).tolist() == [0.25, 1.0, 0.0]
    assert inverse_curvature(torch.zeros(2), 0.0).tolist() == [0.0, 0.0]
    assert inverse_curvature(torch.zeros(0), 0.0).tolist() == []
    for dtype in (torch.float32, torch.float64):  # up to 128 roundings of a gradient are no curvature
        least = (128 * torch.finfo(dtype).eps) ** 2
        found = inverse_curvature(torch.tensor([1.0, 0.5 * least, 2 * least], dtype=dtype), 0.0)
        assert_close(found, double(1.0, 0.0, 0.5 / least))


def test_damping_and_effective_parameters() -> None:
    own = factors(a=torch.tensor([4.0, 2.0]), b=torch.tensor([1.0]))
    assert (own.damping_of("a", 2), own.damping_of("a", Relative(0.5))) == (2.0, 1.5)
    assert own.effective_parameters(2.0) == pytest.approx(4 / 6 + 2 / 4 + 1 / 3)
    assert own.effective_parameters(Relative(1.0)) == pytest.approx(4 / 7 + 2 / 5 + 1 / 2)
    assert own.effective_parameters(0.0) == 3.0


def test_factors_are_moved_as_a_whole() -> None:
    blocks = {
        "a": BlockFactors(torch.ones(1, 2, 2), Basis(TURN.unsqueeze(0), TURN.unsqueeze(0))),
        "b": BlockFactors(torch.ones(1, 2, 5), Basis(None, TURN.unsqueeze(0))),
        "c": BlockFactors(torch.ones(3)),
    }
    own = Factors(blocks, 3, 2, FitSettings(seed=4))
    found = own.to(torch.device("meta"))
    assert (found.count, found.num_classes, found.settings, list(found.blocks)) == (3, 2, FitSettings(seed=4), [*"abc"])
    for name, block in found.blocks.items():
        assert block.shapes == own.blocks[name].shapes
        parts = [block.second_moments, *((block.basis.inputs, block.basis.outputs) if block.basis else ())]
        assert {part.device.type for part in parts if part is not None} == {"meta"}
    assert own.blocks["a"].shapes == ((1, 2, 2), (1, 2, 2), (1, 2, 2))
    assert own.blocks["b"].shapes == ((1, 2, 5), None, (1, 2, 2))
    assert own.blocks["c"].shapes == ((3,), None, None)
    assert own.blocks["a"].dtypes == own.blocks["b"].dtypes == {torch.float32, torch.float64}
    assert own.blocks["c"].dtypes == {torch.float32}


def test_second_moments_are_averaged_by_the_number_of_examples() -> None:
    one, other = factors(1, a=double(4.0, 0.0)), factors(3, a=double(0.0, 8.0))
    merged = one.merge(other)
    assert merged.count == 4
    assert merged.blocks["a"].second_moments.tolist() == [1.0, 6.0]
    with pytest.raises(MergeError, match=r"cover different blocks: a, b is in one of them only"):
        one.merge(factors(b=double(1.0)))
    with pytest.raises(MergeError, match=r"different settings: FitSettings\(.*seed=0\) and FitSettings\(.*seed=7\)"):
        one.merge(Factors(one.blocks, 1, 2, FitSettings(seed=7)))
    with pytest.raises(MergeError, match=r"eigenbases of block 'a' differ.*Merge the Covariances of both fits"):
        one.merge(Factors({"a": BlockFactors(double(1.0, 1.0), Basis(None, TURN))}, 1, 2, FitSettings()))


def test_covariances_are_added() -> None:
    def covariances(scale: float, count: int) -> Covariances:
        outputs = TURN.unsqueeze(0) * scale
        return Covariances({"a": Covariance(outputs + 1, outputs), "b": Covariance(None, outputs)}, count)

    merged = covariances(1.0, 2).merge(covariances(10.0, 3))
    assert merged.count == 5
    assert_close(merged.blocks["a"].inputs, TURN.unsqueeze(0) * 11 + 2)
    assert_close(merged.blocks["a"].outputs, TURN.unsqueeze(0) * 11)
    assert merged.blocks["b"].inputs is None
    sums = covariance_sums([covariances(1.0, 2), covariances(2.0, 2)])
    assert list(sums) == ["inputs/a", "outputs/0/a", "outputs/0/b", "outputs/1/a", "outputs/1/b"]
    assert_close(sums["inputs/a"], TURN.unsqueeze(0) + 1)
    assert_close(sums["outputs/1/b"], TURN.unsqueeze(0) * 2)
    wider = Covariances({"a": Covariance(torch.eye(3), TURN.unsqueeze(0)), "b": covariances(1.0, 1).blocks["b"]}, 1)
    with pytest.raises(MergeError, match="covariances of block 'a' have different shapes"):
        covariances(1.0, 2).merge(wider)


def test_overflow_names_the_layers() -> None:
    check_finite(factors(a=torch.ones(2)))
    broken = factors(a=torch.tensor([1.0, math.inf]), b=torch.ones(2), c=torch.tensor([math.nan]))
    with pytest.raises(NonFiniteError, match=r"squared gradients of a, c overflow.*model\.double\(\).*layers="):
        check_finite(broken)


@pytest.mark.parametrize("wrong", [-1, -1e-9, math.nan, math.inf, True, "1", None])
def test_settings_that_mean_nothing_are_refused(wrong: object) -> None:
    said = f"must be a finite number of at least 0 or Relative(number), but is {wrong!r}."
    for damping in (wrong, Relative(wrong)):
        with pytest.raises(SettingError) as caught:
            check_damping(damping)
        assert str(caught.value) == f"damping {said}"
    with pytest.raises(SettingError) as caught:
        FitSettings(beta=wrong)
    assert str(caught.value) == f"beta must be a finite number of at least 0, but is {wrong!r}."


def test_other_settings() -> None:
    assert check_damping(0) == 0
    assert check_damping(Relative(0.5)) == Relative(0.5)
    assert FitSettings() == FitSettings(1.0, "sampled", 1, 0)
    for wrong in ({"fisher": "true"}, {"label_samples": 0}, {"label_samples": 1.5}, {"seed": 0.5}):
        name, value = next(iter(wrong.items()))
        with pytest.raises(SettingError, match=rf"^{name} must be .*, but is {value!r}\.$"):
            FitSettings(**wrong)
    with pytest.raises(SettingError, match=r"beta='auto' needs held-out data.*ifcomp\.tuning\.fit_auto\(model"):
        FitSettings(beta="auto")


# Health -------------------------------------------------------------------------------------------------------------


def test_health_by_hand() -> None:
    """Alone at a damping of 1: b has 1e-9 of a's gradients, c a thousandth of a's and far less than the damping."""
    own = factors(a=double(100.0, 50.0), b=double(1.5e-7), c=double(0.15), d=double(0.0))
    found = with_health(Coverage(()), own, 1.0)
    assert [(layer.name, layer.verdict) for layer in found.health] == [
        *(("a", "fine"), ("b", "faint")),
        *(("c", "damping"), ("d", "dead")),
    ]
    a, b, c, d = found.health
    assert (a.share, d.share) == (1.0, 0.0)
    assert (b.share, c.share) == (pytest.approx(1e-9), pytest.approx(1e-3))
    assert a.effective == pytest.approx(100 / 101 + 50 / 51)
    assert a.factor == pytest.approx((100 / 101 + 50 / 51) / (100 / 110 + 50 / 60))
    assert c.factor == pytest.approx((0.15 / 1.15) / (0.15 / 10.15))
    assert (d.effective, d.factor) == (0.0, 1.0)
    assert found.unhealthy == (b, c, d)
    assert found.suggested == Relative(0.1)
    lines = found.health_lines()
    assert lines[0] == "healthy: 1 of 4 layers at 1.0"
    assert [line.partition(":")[0] for line in lines[1:4]] == ["  b (faint)", "  c (damping)", "  d (dead)"]
    assert lines[4] == "suggested damping: Relative(multiple=0.1)"
    assert a.words == "fine"
    assert "divides its expected influence by 8.8" in c.words


def test_nothing_is_healthy_where_nothing_is() -> None:
    found = with_health(Coverage(()), factors(a=double(0.0)), 1.0)
    assert found.health[0].verdict == "dead"
    assert found.suggested == 1.0
    assert with_health(Coverage(()), factors(), 2.0).suggested == 2.0


def test_the_least_damping_is_suggested_where_none_will_do() -> None:
    """One direction beside very many tiny ones that add up to more: of one layer the larger multiples of the mean are
    too much, of the other the smaller ones.
    """
    moments = [torch.full((200_001,), total / 200_000, dtype=torch.float64) for total in (1e-5, 1e-9)]
    for own in moments:
        own[0] = 1.0
    found = with_health(Coverage(()), factors(a=moments[0], b=moments[1]), Relative(0.1))
    assert found.suggested == Relative(1e-8)


# Rotation -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("groups", "positions"), [(1, 1), (1, 32), (1, 33), (2, 3)])
def test_a_basis_is_applied_at_every_position(groups: int, positions: int) -> None:
    basis = torch.stack([TURN, TURN.T][:groups])
    values = torch.arange(2.0 * groups * 2 * positions, dtype=torch.float64).view(2, groups, 2, positions)
    expected = torch.einsum("gca,bgct->bgat", basis, values)
    assert_close(apply_basis(basis, values), expected)
    strided = values.transpose(0, 3).contiguous().transpose(0, 3)
    assert_close(apply_basis(basis, strided), expected)


@pytest.mark.parametrize("large", [4 * 33, 4 * 33 + 1])
@pytest.mark.parametrize(("groups", "positions"), [(1, 32), (1, 33), (2, 3)])
def test_a_basis_is_applied_into_a_place(
    groups: int, positions: int, large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rotation, "_LARGE_PRODUCT", large)
    basis, values = torch.stack([TURN, TURN.T][:groups]), torch.randn(5, groups, 2, positions, dtype=torch.float64)
    place = torch.full((5, groups, 3, 2, positions), torch.nan, dtype=torch.float64)
    assert apply_basis(basis, values, place[:, :, 1]).data_ptr() == place[:, :, 1].data_ptr()
    assert_close(place[:, :, 1], torch.einsum("gca,bgct->bgat", basis, values))
    assert place[:, :, ::2].isnan().all()


def test_equal_indices_are_summed_at_the_first() -> None:
    indices = torch.tensor([[3, 5, 3, 3], [5, 5, 1, 0]])
    values = torch.arange(8.0).view(2, 4, 1)
    assert sum_equal_indices(indices, values)[..., 0].tolist() == [[0 + 2 + 3, 1, 0, 0], [4 + 5, 0, 6, 7]]


B, G, C, R, J, T = 5, 2, 3, 3, 2, 4
RANDOM = torch.Generator().manual_seed(0)
COLUMNS = torch.randn(B, G, J, T, generator=RANDOM, dtype=torch.float64)
ROWS = torch.randn(B, G, C, R, T, generator=RANDOM, dtype=torch.float64)
BASIS = Basis(
    torch.randn(G, J, J, generator=RANDOM, dtype=torch.float64),
    torch.randn(G, R, R, generator=RANDOM, dtype=torch.float64),
)


#: Inputs of three channels at two offsets, as rotated gradients have them.
ORDER = ("a0", "b0", "c0", "a1", "b1", "c1", "+")


@pytest.mark.parametrize(("examples", "unfolded"), [(1, 1), (2, 4), (2, 2), (3, 3), (9, 9)])
@pytest.mark.parametrize(("cotangents", "part"), [(1, 1), (2, 4), (3, 10)])
@pytest.mark.parametrize("outputs_first", [True, False])
@pytest.mark.parametrize("inputs_first", [True, False])
@pytest.mark.parametrize("groups", [1, G])
@pytest.mark.parametrize("width", [J, J + 3])
def test_slabs_are_all_rotated_gradients(
    width: int,
    groups: int,
    inputs_first: bool,
    outputs_first: bool,
    cotangents: int,
    part: int,
    examples: int,
    unfolded: int,
) -> None:
    basis = Basis(BASIS.inputs[:groups], BASIS.outputs[:groups])
    given_rows, columns = ROWS[:, :groups], COLUMNS[:, :groups]
    part = part if inputs_first else width
    plan = RotationPlan(inputs_first, outputs_first, examples, cotangents, part, unfolded, width, False)
    given = torch.einsum("gpo,bgcpt->bgcot", basis.outputs, given_rows) if outputs_first else given_rows
    expected = torch.einsum("gpo,bgcpt,bgkt,gkj->bgcoj", basis.outputs, given_rows, columns, basis.inputs)
    found = torch.full_like(expected, torch.nan)
    for slab in rotated_slabs(Recorded(columns), kronecker("x", groups, R, J), basis, given, plan):
        there = (slab.examples, slice(None), slab.cotangents, slice(None), slab.columns)
        own = found[there]  # without the zeros
        assert own.isnan().all(), "twice"
        own.copy_(slab.gradients[..., : own.shape[-1]])
        assert slab.gradients.shape[-1] == slab.columns.stop - slab.columns.start
        assert not slab.gradients[..., own.shape[-1] :].any()
        assert slab.gradients.numel() <= examples * cotangents * groups * R * part
    assert_close(found, expected)


def test_inputs_are_rotated_before_they_are_unfolded_where_offsets_share_a_basis() -> None:
    shared = Basis(BASIS.inputs[:, :1, :1], BASIS.outputs)
    found = rotated_columns(Recorded(COLUMNS), kronecker("x", G, R, 1, offsets=2, bias=False), shared, slice(1, 3))
    assert_close(found, torch.einsum("g,bgjt->bgtj", BASIS.inputs[:, 0, 0], COLUMNS[1:3]))
    found = rotated_columns(Recorded(COLUMNS), kronecker("x", G, R, J), BASIS, slice(1, 3))
    assert_close(found, torch.einsum("gkj,bgkt->bgtj", BASIS.inputs, COLUMNS[1:3]))
    assert rotated_columns(Recorded(COLUMNS), kronecker("x", G, R, J), BASIS).shape == (B, G, T, J)


@pytest.mark.parametrize("groups", [1, G])
@pytest.mark.parametrize("some", [slice(None), slice(0, 2)])
def test_output_gradients_at_one_position_are_rotated_together_where_they_are(groups: int, some: slice) -> None:
    rows, outputs = ROWS[:, :groups, ..., :1].clone(), BASIS.outputs[:groups]
    expected = rows.clone()
    expected[:, :, some] = torch.einsum("gpo,bgcpt->bgcot", outputs, rows[:, :, some])
    turn_rows(rows[:, :, some], outputs)
    assert_close(rows, expected)


@pytest.mark.parametrize("positions", [1, 32, 33])
def test_inputs_of_one_group_are_rotated(positions: int) -> None:
    columns = torch.randn(B, 1, J, positions, generator=RANDOM, dtype=torch.float64)
    basis = Basis(BASIS.inputs[:1], BASIS.outputs[:1])
    found = rotated_columns(Recorded(columns), kronecker("x", 1, R, J), basis, slice(1, 4))
    assert_close(found, torch.einsum("gkj,bgkt->bgtj", basis.inputs, columns[1:4]))


def test_offsets_become_slowest_and_channels_again() -> None:
    """Three channels a, b, c with two offsets, and a bias."""
    entries = torch.tensor([["a0", "a1", "b0", "b1", "c0", "c1", "+"].index(name) for name in ORDER])
    block, values = kronecker("x", 1, 1, 3, offsets=2), torch.arange(14.0).view(2, 7)
    assert_close(block.by_offset(values), values[:, entries])
    assert_close(block.by_channel(block.by_offset(values)), values)
    plain = kronecker("x", 1, 1, 7)
    assert plain.by_offset(values) is values
    assert plain.by_channel(values) is values


def test_a_total_that_rounding_reaches_does_not_draw_beyond_the_labels() -> None:
    """Of the smallest number there is, more than half rounds to the number itself."""
    p = double([0.0, 0.0, 5e-324]).expand(64, 3)
    assert sample_labels(p, 0, 0, 0, 0).tolist() == [2] * 64
