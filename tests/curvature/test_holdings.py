"""Bytes of a fit, and when to rotate, by hand: no model is made."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from blocks import Kronecker, footprint, kronecker, other, table
from ifcomp import compiled
from ifcomp.curvature import holdings, rotation
from ifcomp.curvature.factors import FitSettings
from ifcomp.curvature.rotation import RotationPlan, is_compiled, plan_rotation
from ifcomp.errors import MemoryLimitError
from ifcomp.layers.block import KroneckerBlock

GROUPED = kronecker("grouped", 2, 3, 5)  # moments [2, 3, 5], inputs [2, 5, 5], outputs [2, 3, 3]: 30, 50 and 18 numbers
SHARED = kronecker("shared", 1, 4, 3, offsets=9)  # [1, 4, 28], [1, 3, 3], [1, 4, 4]: 112, 9 and 16
TABLE = table("table", 7, 2)  # [1, 2, 7], none, [1, 2, 2]: 14 and 4
BARE = other("", 6)
DOUBLE = torch.zeros((), dtype=torch.float64)  # no library works on such numbers
ALL = (GROUPED, SHARED, TABLE, BARE)


def test_shapes() -> None:
    assert holdings.factor_shapes(GROUPED) == ((2, 3, 5), (2, 5, 5), (2, 3, 3))
    assert holdings.factor_shapes(SHARED) == ((1, 4, 28), (1, 3, 3), (1, 4, 4))
    assert holdings.factor_shapes(TABLE) == ((1, 2, 7), None, (1, 2, 2))
    assert holdings.factor_shapes(BARE) == ((6,), None, None)
    assert [holdings.block_bytes(block, 4) for block in ALL] == [(120, 200, 72), (448, 36, 64), (56, 0, 16), (24, 0, 0)]


def test_what_is_held_whatever_the_data_is() -> None:
    """Inputs are there once, all else once a fit: 236 + 152 f bytes of covariances, 648 f of second moments."""
    assert holdings.covariance_bytes(ALL, 4, 3) == 236 + 3 * 152 + 200
    assert holdings.covariance_bytes(ALL, 4) == 236 + 152 + 200
    assert holdings.covariance_bytes((SHARED,), 4) == 36 + 64 + 64  # the outputs are the largest
    assert holdings.covariance_bytes((), 4) == 0
    assert holdings.eigen_bytes(ALL, 4, 3) == 2 * (236 + 3 * 152) + 50 * 8 * 6  # six matrices in float64
    assert holdings.eigen_bytes(ALL, 8) == 2 * 2 * (236 + 152) + 50 * 8 * 6
    assert holdings.eigen_bytes((SHARED,), 4) == 2 * 100 + 16 * 8 * 6
    assert holdings.eigen_bytes((), 4) == 0
    assert holdings.factor_bytes(ALL, 4, 3) == 236 + 3 * (152 + 648)
    assert holdings.factor_bytes(ALL, 4) == 236 + 152 + 648
    assert holdings.checkpoint_bytes(ALL, 4, 3) == 236 + 3 * (152 + 648)
    assert holdings.checkpoint_bytes((GROUPED,), 4) == 2 * (200 + 72)
    assert holdings.checkpoint_bytes((GROUPED,), 4, 2) == 2 * (200 + 2 * 72)


def session(**known: Any) -> Any:
    given = {
        "label_bytes": lambda examples, cotangents: 1000 * examples + cotangents,
        "backward_bytes": lambda footprint, examples, cotangents: examples * footprint.gradients,
        "item_bytes": 4,
        "blocks": ALL,
        "device": torch.device("cpu"),
        "dtype": torch.float64,  # no library does it
    }
    return SimpleNamespace(**{"kronecker": ALL[:3], "num_classes": 10, **given, **known})


def test_what_a_piece_of_the_first_pass_holds() -> None:
    """An example's inputs [G, C, T] are there twice, or once where they need not be rearranged."""
    for shape, working in (((1, 7, 1), 56), ((1, 6, 1), 50), ((1, 2, 8), 64), ((1, 4, 4), 64), ((2, 2, 4), 128)):
        own = footprint(
            graph=100, gradients=50, passing=7, covered={"x": torch.Size(shape), "y": torch.Size((1, 1, 1))}
        )
        assert holdings.product_bytes(session(), own, 3, 2) == 3 * (100 + 7 + working) + 3002


@pytest.mark.parametrize(
    ("positions", "entries", "rooms"),
    [
        (1, 10 * 4, 10 * 4),  # no gradient is formed: rotated inputs, and inputs
        (2, 80 + 4 * 50, 80 + 4 * 3 * 30),  # rotated inputs, a basis each; inputs, and gradients of 3 cotangents
        # outputs are rotated in the gradient, which is there twice then
        (7, 280 + 4 * 50 + 4 * 3 * 18, 280 + 2 * (4 * 3 * 30)),
        (20, 3 * (4 * 3 * 30) + 4 * 3 * 18, 800 + 2 * (4 * 3 * 30)),  # and so are inputs, with groups first
    ],
)
def test_what_a_piece_of_the_second_pass_holds(positions: int, entries: int, rooms: int) -> None:
    """Four examples, three cotangents; other work is told the bytes but those of inputs and slabs, which stay."""
    asked: list[tuple[Any, ...]] = []
    own = session(recording_bytes=lambda *given: asked.append(given) or 5)
    there = footprint(positions={"grouped": positions})
    assert holdings.slab_bytes(own, there, 4, 3) == 5 + 4 * rooms
    assert asked == [(there, 4, 3, entries * 4)]


def test_gradients_five_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both rotations on the gradient, few inputs at once: one example's 10 x 10 inputs beside 3 x 3 x 10 gradients."""
    for room in (rotation, holdings):
        monkeypatch.setattr(room, "SLAB_ENTRIES", 90)
    monkeypatch.setattr(rotation, "COLUMN_ENTRIES", 1)
    asked: list[int] = []
    own = session(recording_bytes=lambda *given: asked.append(given[3]) or 5)
    assert holdings.slab_bytes(own, footprint(positions={"grouped": 10}), 4, 3) == 5 + (100 + 2 * 90) * 4
    assert asked == [(3 * 90 + 3 * 2 * 9) * 4]  # the others, and the basis for every gradient


@pytest.mark.parametrize(
    ("positions", "entries", "rooms"),
    [(1, 28 * 4, 28 * 4), (2, 4 * 32, 2 * 32 * 4 + 4 * 3 * 4 * 32), (30, 4 * 32, 30 * 32 * 4 + 2 * (4 * 3 * 4 * 32))],
)
def test_unfolded_inputs_with_shared_offsets_have_a_room_of_their_own(positions: int, entries: int, rooms: int) -> None:
    """28 columns are as wide as 32, and so is the inverse curvature of 4 rows then."""
    asked: list[int] = []
    own = session(kronecker=(SHARED,), recording_bytes=lambda *given: asked.append(given[3]) or 5)
    assert holdings.slab_bytes(own, footprint(positions={"shared": positions}), 4, 3) == 5 + 4 * rooms
    assert asked == [4 * entries]


@pytest.mark.parametrize(("groups", "entries"), [(1, 2 * 8), (2, 16 + 4 * 2 + 4 * 3 * 2 * 9 * 9)])
def test_bases_of_groups_are_repeated_for_every_gradient(groups: int, entries: int) -> None:
    """Two positions of one column: 9 outputs are rotated in the gradients of 4 examples and 3 cotangents."""
    asked: list[int] = []
    block = kronecker("tall", groups, 9, 1)
    own = session(kronecker=(block,), recording_bytes=lambda *given: asked.append(given[3]) or 5)
    assert holdings.slab_bytes(own, footprint(positions={"tall": 2}), 4, 3) == 5 + 4 * groups * (8 + 2 * (4 * 3 * 9))
    assert asked == [4 * entries]


def test_zeros_around_the_basis_and_after_the_inverse_curvature_are_counted() -> None:
    """Four examples of 31 inputs at two positions, as wide as 32, and gradients of 3 cotangents and 3 rows."""
    asked: list[int] = []
    own = session(kronecker=(kronecker("x", 1, 3, 31),), recording_bytes=lambda *given: asked.append(given[3]) or 5)
    inputs = 4 * 2 * 32
    assert holdings.slab_bytes(own, footprint(positions={"x": 2}), 4, 3) == 5 + 4 * (inputs + 4 * 3 * 3 * 32)
    assert asked == [4 * (2 * inputs + 32 * (3 + 2 * 32))]


def test_fewer_cotangents_at_the_end_may_fill_a_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten gradients of ten entries fit: sixteen are two slabs of eight, but ten that are left are one."""
    for room in (rotation, holdings):
        monkeypatch.setattr(room, "SLAB_ENTRIES", 100)
    block = kronecker("x", 1, 2, 5)
    assert [plan_rotation(block, 6, count, DOUBLE).cotangents for count in (16, 10)] == [8, 10]
    own = session(kronecker=(block,), recording_bytes=lambda *_: 0)
    assert holdings.slab_bytes(own, footprint(positions={"x": 6}), 1, 16) == 4 * (2 * 100 + 30)


@pytest.mark.parametrize(("columns", "part", "slab"), [(9, 1, 200), (16, 8, 1600)])
def test_a_slab_that_must_have_more_than_it_should_is_counted(
    columns: int, part: int, slab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One column of 200 rows, or a vector of them; and the inverse curvature once more, in parts."""
    asked: list[int] = []
    for room in (rotation, holdings):
        monkeypatch.setattr(room, "SLAB_ENTRIES", 100)
    block = kronecker("x", 1, 200, columns)
    assert plan_rotation(block, 2, 1, DOUBLE).columns == part
    own = session(kronecker=(block,), recording_bytes=lambda *given: asked.append(given[3]) or 5)
    assert holdings.slab_bytes(own, footprint(positions={"x": 2}), 1, 1) == 5 + 4 * (slab + 2 * columns)
    assert asked == [4 * (2 * 2 * columns + 200 * columns)]


def test_fewer_cotangents_may_let_more_examples_fill_a_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four cotangents two examples have 80 entries; of three that are left three would have 90, and two have 60."""
    for room in (rotation, holdings):
        monkeypatch.setattr(room, "SLAB_ENTRIES", 119)
    block = kronecker("x", 1, 2, 5)
    assert [plan_rotation(block, 6, count, DOUBLE).examples for count in (4, 3, 2, 1)] == [2, 2, 4, 8]
    own = session(kronecker=(block,), recording_bytes=lambda *_: 0)
    assert holdings.slab_bytes(own, footprint(positions={"x": 6}), 9, 4) == 4 * (2 * 119 + 9 * 30)


def test_layers_share_rooms() -> None:
    """The largest slab, the largest inputs: from two layers."""
    own = session(kronecker=(GROUPED, SHARED), recording_bytes=lambda *given: given[3])
    found = holdings.slab_bytes(own, footprint(positions={"grouped": 2, "shared": 2}), 4, 3)
    assert found == 4 * (max(80 + 4 * 50, 4 * 32) + max(4 * 3 * 30, 4 * 3 * 4 * 32) + max(80, 2 * 32 * 4))


def test_nothing_ran() -> None:
    own = session(recording_bytes=lambda *given: given[3])
    assert holdings.slab_bytes(own, footprint(), 4, 3) == 0


def test_cotangents_of_a_fit() -> None:
    exact, sampled = FitSettings(fisher="exact"), FitSettings(label_samples=3)
    assert holdings.most_cotangents(session(), [sampled, exact]) == 10
    assert holdings.most_cotangents(session(), [sampled, FitSettings(fisher="empirical")]) == 3


def test_both_passes_have_a_budget() -> None:
    (first, products), (second, slabs) = holdings.fit_steps(session(recording_bytes=lambda *given: 77), 3, 10**6)
    assert (first.limit, first.held) == (10**6, 236 + 3 * 152 + 200)
    assert (second.limit, second.held) == (10**6, 236 + 3 * (152 + 648))
    assert products(footprint(graph=100), 3, 2) == 300 + 3002
    assert slabs(footprint(), 3, 2) == 77


LEAST = 2 * (200 + 72) + 50 * 8 * 6  # eigenvectors of the grouped layer, 2,944 bytes


@pytest.mark.parametrize(
    ("limit", "there", "said"),
    [
        (LEAST - 1, None, "max_memory is 2.9 kB."),
        (LEAST - 1, 10**9, "max_memory is 2.9 kB."),
        (None, 12, "there are only 12 B."),
        (10**9, 12, "there are only 12 B."),
    ],
)
def test_too_little_room_for_the_factors(limit: int | None, there: int | None, said: str) -> None:
    with pytest.raises(MemoryLimitError) as caught:
        holdings.check_factors((GROUPED,), 4, 1, limit, there)
    first, *_ = str(caught.value).splitlines()
    assert first.startswith("The factors of this fit need 2.9 kB (2,944 bytes) at their largest, but " + said)


def test_enough_room_for_the_factors() -> None:
    for limit, there in ((LEAST, None), (None, LEAST), (LEAST, LEAST), (None, None)):
        holdings.check_factors((GROUPED,), 4, 1, limit, there)
    with pytest.raises(MemoryLimitError):
        holdings.check_factors((GROUPED,), 4, 2, LEAST, None)


def test_the_largest_layers_are_described_largest_first() -> None:
    few = [other(f"bare{size}", size) for size in (1, 2, 3)]
    with pytest.raises(MemoryLimitError) as caught:
        holdings.check_factors((*few, BARE, TABLE, SHARED, GROUPED), 4, 1, 1, None)
    assert str(caught.value).splitlines()[1:-1] == [
        "  shared: 36 B for the covariance of 3 inputs, 64 B for that of 4 outputs, 448 B for second moments",
        "  grouped: 200 B for the covariance of 5 inputs, 72 B for that of 3 outputs, 120 B for second moments",
        "  table: 72 B for 14 parameters",
        "  (model): 24 B for 6 parameters",
        "  bare3: 12 B for 3 parameters",
    ]


# When to rotate -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "positions", "cotangents", "expected"),
    [
        # gradients of one example: 3 x 10 for each of 3 cotangents, 90 of 100 entries
        ((2, 3, 5), 2, 3, RotationPlan(True, True, 1, 3, 5, 50, 5, False)),
        (
            (2, 3, 5),
            2,
            1,
            RotationPlan(True, True, 2, 1, 5, 50, 5, False),
        ),  # two of three examples of 30: 25 slabs of 2 x 20
        ((2, 3, 5), 9, 3, RotationPlan(True, False, 1, 3, 5, 11, 5, False)),  # 9 positions are no more than 3 x 3 rows
        ((2, 3, 5), 10, 3, RotationPlan(False, False, 1, 3, 5, 10, 5, False)),
        ((2, 3, 5), 5, 1, RotationPlan(False, True, 2, 1, 5, 20, 5, False)),  # 5 positions are no more than 5 columns
        ((1, 7, 10), 3, 2, RotationPlan(True, True, 1, 2, 5, 33, 10, False)),  # 7 of 10 columns fit, so two slabs of 5
        (
            (1, 7, 10),
            9,
            2,
            RotationPlan(True, True, 1, 1, 10, 11, 10, False),
        ),  # of outputs 7 x 9 two cotangents are too many
        ((1, 7, 10), 30, 2, RotationPlan(False, False, 1, 1, 10, 3, 10, False)),
        (
            (1, 7, 15),
            30,
            2,
            RotationPlan(False, False, 1, 1, 16, 2, 16, False),
        ),  # 7 x 16 are too many, but not rotated yet
        ((1, 7, 15), 14, 2, RotationPlan(True, True, 1, 1, 8, 4, 16, False)),
        (
            (1, 7, 10),
            3,
            30,
            RotationPlan(True, True, 1, 4, 3, 33, 10, False),
        ),  # outputs of 4 cotangents, 3 of their columns
        ((1, 7, 10), 3, 5, RotationPlan(True, True, 1, 3, 4, 33, 10, False)),  # 4 of 5 fit, so two slabs of 3
        ((1, 2, 300), 4, 2, RotationPlan(True, True, 1, 2, 24, 1, 304, False)),  # 25 columns fit: 3 of 38 vectors
        ((1, 2, 300), 5, 2, RotationPlan(False, True, 1, 2, 304, 1, 304, False)),
        ((1, 200, 9), 7, 2, RotationPlan(True, True, 1, 1, 1, 15, 9, False)),  # one at least of everything
        ((1, 200, 16), 7, 2, RotationPlan(True, True, 1, 1, 8, 8, 16, False)),  # ... or one vector
        ((1, 2, 2), 20, 1, RotationPlan(False, False, 24, 1, 2, 24, 2, False)),  # 24 of 25 examples of 4 gradients
        ((1, 2, 2), 50, 1, RotationPlan(False, False, 8, 1, 2, 8, 2, False)),  # 8 of ten, whose inputs are 1000
    ],
)
def test_plans_by_hand(
    shape: tuple[int, int, int], positions: int, cotangents: int, expected: RotationPlan, monkeypatch: Any
) -> None:
    monkeypatch.setattr(rotation, "SLAB_ENTRIES", 100)
    monkeypatch.setattr(rotation, "COLUMN_ENTRIES", 1000)
    assert plan_rotation(kronecker("x", *shape), positions, cotangents, DOUBLE) == expected


def test_gradients_that_are_needed_together_are_split_by_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotation, "SLAB_ENTRIES", 100)
    found = plan_rotation(kronecker("x", 1, 7, 10), 14, 2, DOUBLE, together=True)
    assert (found.columns, found.cotangents) == (5, 2)


def test_shared_offsets_are_rotated_first() -> None:
    assert plan_rotation(SHARED, 10**4, 1, DOUBLE).inputs_first
    assert not plan_rotation(kronecker("x", 1, 4, 28), 10**4, 1, DOUBLE).inputs_first


@pytest.mark.parametrize(
    ("block", "positions", "rotated"),
    [
        (SHARED, 9, 0),  # channels are rotated
        (kronecker("x", 1, 12, 28), 9, 2 * (4 * 9 * 32) + 2 * 32 * 32),  # few positions are put together
        (kronecker("x", 1, 40, 33), 33, 4 * 33 * 40 + 2 * 40 * 40),
    ],
)
def test_what_the_compiled_library_holds_is_counted(
    block: KroneckerBlock, positions: int, rotated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs of four examples, 28 columns as wide as 32 and 33 as wide as 40, and as they are rotated; the curvature
    twice, in panels; and what each of three threads works with. There are no slabs.
    """
    if not compiled.panel_width():
        pytest.skip("there is no library here")
    monkeypatch.setattr(compiled, "panel_width", lambda: 16)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    asked: list[int] = []
    own = session(kronecker=(block,), dtype=torch.float32, recording_bytes=lambda *given: asked.append(given[3]) or 5)
    there, width = footprint(positions={block.name: positions}), 32 if block.columns == 28 else 40
    panels = 2 * block.rows * 16 * -(-block.columns // 16)
    assert holdings.slab_bytes(own, there, 4, 3) == 5 + 4 * (4 * positions * width)
    work = positions * 17 + 4 * 3 * block.rows * positions  # for each thread: one panel, outputs of all examples
    assert asked == [4 * (panels + 3 * work + rotated)]
    monkeypatch.setattr(rotation, "COLUMN_ENTRIES", 2 * positions * width)
    assert holdings.slab_bytes(own, there, 4, 3) == 5 + 4 * (2 * positions * width)


class Convolution(Kronecker):
    """A block whose positions see windows of an image."""

    has_windows = True


@pytest.mark.parametrize(
    ("entries", "slab", "images"),
    [
        (1 << 19, 4 * 192, 4),
        (400, 400, 2),
        (192, 192, 2),  # one example, but two if there is one cotangent
        (100, 192, 1),
    ],
)
def test_what_gradients_from_windows_hold_is_counted(
    entries: int, slab: int, images: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two cotangents of 3 x 31, as wide as 32, at 100 positions: a slab and a rotated one of four examples, or of what
    fits, or of one; as it is rotated; zeros around the basis and after the curvature; padded images; and what each of
    three threads unfolds. No other inputs are.
    """
    if not compiled.panel_width():
        pytest.skip("there is no library here")
    monkeypatch.setattr(compiled, "panel_width", lambda: 16)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for room in (rotation, holdings):
        monkeypatch.setattr(room, "FORMED_ENTRIES", entries)
    asked: list[int] = []
    block = Convolution("x", "", ("x",), 93, 1, 3, 31, 1, True, True, 0)
    own = session(kronecker=(block,), dtype=torch.float32, recording_bytes=lambda *given: asked.append(given[3]) or 5)
    there = footprint(positions={"x": 100}, images={"x": 7})
    assert holdings.slab_bytes(own, there, 4, 2, 2) == 5 + 4 * 2 * slab
    assert asked == [4 * (slab + 2 * 32 * 32 + 3 * 32 + 3 * (100 * 32 + 8) + 7 * images)]
    plan = plan_rotation(block, 100, 2, own)
    assert plan == RotationPlan(False, False, max(1, entries // 192), 2, 32, max(1, entries // 192), 32, True)
    assert not plan_rotation(block, 100, 2, DOUBLE).windows
    assert not plan_rotation(block, 6, 2, own).windows


def test_a_slab_from_windows_that_one_example_fills_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five cotangents of 3 x 32 are 480 numbers, more than are to be formed at once, and outputs at 100 positions more
    than a slab: they are together still.
    """
    if not compiled.panel_width():
        pytest.skip("there is no library here")
    for room in (rotation, holdings):
        monkeypatch.setattr(room, "FORMED_ENTRIES", 100)
        monkeypatch.setattr(room, "SLAB_ENTRIES", 500)
    block = Convolution("x", "", ("x",), 93, 1, 3, 31, 1, True, True, 0)
    own = session(kronecker=(block,), dtype=torch.float32, recording_bytes=lambda *_: 0)
    plan = plan_rotation(block, 100, 5, own)
    assert (plan.windows, plan.examples, plan.cotangents) == (True, 1, 5)
    assert holdings.slab_bytes(own, footprint(positions={"x": 100}), 4, 5, 5) == 4 * 2 * 480


@pytest.mark.parametrize(("left", "slab"), [(7, 1), (6, 6), (1, 1)])
def test_slabs_of_fewer_cotangents_are_counted_where_only_more_are_compiled(left: int, slab: int) -> None:
    """Seven cotangents of 16 rows have more outputs than the 100 positions, six (96) have not: theirs are rotated late,
    in a slab of 2 x 6 x 16 x 256. One is always looked at.
    """
    if not compiled.panel_width():
        pytest.skip("there is no library here")
    block, there = kronecker("x", 1, 16, 256), footprint(positions={"x": 100})
    own = session(kronecker=(block,), dtype=torch.float32, recording_bytes=lambda *_: 0)
    assert is_compiled(block, 100, 7, own)
    assert not is_compiled(block, 100, 6, own)
    assert holdings.slab_bytes(own, there, 2, 7, left) == 4 * (2 * 100 * 256 + 2 * slab * 16 * 256)


@pytest.mark.parametrize(("fit", "shared"), [(1, 1), (2, 2), (3, 2), (4, 4), (7, 4), (8, 8), (15, 8), (51, 48)])
def test_slabs_have_examples_that_threads_share(fit: int, shared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotation, "SLAB_ENTRIES", fit * 6)
    assert plan_rotation(kronecker("x", 1, 3, 2), 2, 1, DOUBLE).examples == shared
