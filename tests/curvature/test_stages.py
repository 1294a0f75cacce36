"""What the stages of a fit save and go on from, without a file: half of the data is saved, the rest is added."""

from collections.abc import Callable, Mapping
from functools import partial

import pytest
import torch
from ifcomp.curvature.passes import fit_covariances, fit_second_moments
from ifcomp.layers.session import Footprint
from torch import Tensor, nn

from cases import seeded
from comparison import assert_same
from ifcomp import IFComp
from ifcomp.blocks.block import Basis
from ifcomp.curvature.eigen import basis_tensors, eigenbases
from ifcomp.curvature.factors import Covariance, Covariances, FitSettings, covariance_sums
from ifcomp.data.batches import as_batch
from ifcomp.errors import CheckpointError, LabelError
from ifcomp.io.resumable import ResumableWork
from ifcomp.memory import Budget

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
HALVES = [as_batch(X[:2]), as_batch(X[2:])]
SETTINGS = [FitSettings(fisher="exact"), FitSettings(beta=0.5, fisher="exact")]


class Noted(ResumableWork):
    """Work that goes on from what it is given, and keeps what it is told."""

    def __init__(self, saved: Mapping[str, Tensor] | None = None, done: bool = False) -> None:
        self.saved, self.done, self.ticks = saved or {}, done, 0

    def begin_stage(
        self, stage: str, local: Callable[[], Mapping[str, Tensor]], shared: Mapping[str, Tensor] | None = None
    ) -> Mapping[str, Tensor]:
        self.stage, self.local, self.shared = stage, local, shared or {}
        return self.saved

    def is_complete(self, stage: str) -> bool:
        assert stage == self.stage
        return self.done

    def save_if_due(self) -> None:
        self.ticks += 1

    def state(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.local().items()}


def predictor() -> IFComp:
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))().double()
    return IFComp(model, fisher="exact").fit([X])


def test_the_first_pass_goes_on_from_its_sums() -> None:
    session, first, rest = predictor()._session, Noted(), Noted()
    whole = fit_covariances(session, HALVES, SETTINGS)
    fit_covariances(session, HALVES[:1], SETTINGS, None, first)
    assert first.stage == "covariances"
    assert first.local().keys() == {"examples/0", *covariance_sums(whole)}
    assert int(first.local()["examples/0"]) == 2
    rest.saved = first.state()
    found = fit_covariances(session, HALVES[1:], SETTINGS, None, rest)
    assert [own.count for own in found] == [own.count for own in whole] == [6, 6]
    for name, expected in covariance_sums(whole).items():
        assert_same(covariance_sums(found)[name], expected)
        assert torch.equal(rest.local()[name], covariance_sums(found)[name])


def test_a_first_pass_that_is_done_is_not_done_again() -> None:
    session, first = predictor()._session, Noted()
    whole = fit_covariances(session, HALVES, SETTINGS, None, first)
    found = fit_covariances(session, [], SETTINGS, None, Noted(first.state(), done=True))
    assert [own.count for own in found] == [6, 6]
    for name, expected in covariance_sums(whole).items():
        assert torch.equal(covariance_sums(found)[name], expected)


def test_the_second_pass_goes_on_from_its_sums() -> None:
    ifc, first, rest = predictor(), Noted(), Noted()
    basis = {name: block.basis for name, block in ifc.factors.blocks.items() if block.basis is not None}
    bases = [basis, basis]
    make = partial(fit_second_moments, ifc._session, settings=SETTINGS, bases=bases)
    whole = make(batches=HALVES)
    make(batches=HALVES[:1], work=first, seen=6)
    assert first.stage == "second moments"
    assert first.shared.keys() == {"examples/0", *basis_tensors(bases)}
    assert int(first.shared["examples/0"]) == 6
    blocks = list(ifc.factors.blocks)
    assert first.local().keys() == {"examples/1", *(f"moments/{number}/{name}" for number in (0, 1) for name in blocks)}
    assert int(first.local()["examples/1"]) == 2
    state = first.state()
    for name in state.keys() - {"examples/1"}:
        state[name] *= 2  # a mean by now; the sum is saved
    rest.saved = state
    for found, expected in zip(make(batches=HALVES[1:], work=rest), whole, strict=True):
        assert (found.count, found.num_classes, found.settings) == (6, 3, expected.settings)
        for name, block in expected.blocks.items():
            assert_same(found.blocks[name].second_moments, block.second_moments)
            assert found.blocks[name].basis is basis[name]


def test_sums_are_those_of_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes with the same data: twice the sums and examples, the same means."""
    ifc = predictor()
    alone = fit_covariances(ifc._session, HALVES, SETTINGS)[0]
    monkeypatch.setattr(
        "ifcomp.curvature.passes.all_reduce_sum", lambda tensors: [tensor.mul_(2) for tensor in tensors]
    )
    found = fit_covariances(ifc._session, HALVES, SETTINGS)[0]
    assert found.count == 2 * alone.count
    for name, expected in covariance_sums([alone]).items():
        assert_same(covariance_sums([found])[name], 2 * expected)
    basis = {name: block.basis for name, block in ifc.factors.blocks.items() if block.basis is not None}
    both = fit_second_moments(ifc._session, HALVES, SETTINGS[:1], [basis])[0]
    assert both.count == 12
    for name, block in ifc.factors.blocks.items():
        assert_same(both.blocks[name].second_moments, block.second_moments)


def test_pieces_are_as_large_as_what_is_held_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 of 100 bytes are left, and an example takes 15 for up to 3 cotangents, one for each label."""
    session, asked, seen = predictor()._session, [], []
    record = session.record

    def holds(footprint: Footprint, examples: int, cotangents: int) -> int:
        asked.append(cotangents)
        return 15 * examples

    monkeypatch.setattr(session, "record", lambda piece: seen.append(piece.size) or record(piece))
    steps = [(Budget(100, 60), holds), (Budget(100, 85), holds)]
    monkeypatch.setattr("ifcomp.curvature.passes.fit_steps", lambda *given: steps if given[1:] == (2, 77) else None)
    found = fit_covariances(session, [as_batch(X)], SETTINGS, 77)
    assert seen == [2, 2, 2]
    assert set(asked) == {3}
    seen.clear()
    fit_second_moments(session, [as_batch(X[:3])], SETTINGS, eigenbases(found), 77)
    assert seen == [1, 1, 1]


def test_labels_are_looked_at_where_they_are_needed() -> None:
    session, targets = predictor()._session, as_batch((X, torch.rand(6)))
    assert fit_covariances(session, [targets], SETTINGS)[0].count == 6
    for wrong in (targets, as_batch(X)):
        with pytest.raises(LabelError):
            fit_covariances(session, [wrong], [SETTINGS[0], FitSettings(fisher="empirical")])


def test_a_pass_over_nothing_is_zero() -> None:
    ifc = predictor()
    basis = {name: block.basis for name, block in ifc.factors.blocks.items() if block.basis is not None}
    found = fit_second_moments(ifc._session, [], SETTINGS[:1], [basis])[0]
    assert found.count == 0
    assert all((block.second_moments == 0).all() for block in found.blocks.values())


def covariances(count: int = 9) -> list[Covariances]:
    """Of two fits that share their inputs; the second block has none."""
    inputs = torch.diag(torch.tensor([2.0, 1.0])).unsqueeze(0)
    outputs = [torch.diag(torch.tensor(own)).unsqueeze(0) for own in ([1.0, 2.0, 3.0], [3.0, 2.0, 1.0])]
    return [Covariances({"a": Covariance(inputs, own), "b": Covariance(None, own + 1)}, count) for own in outputs]


def test_eigenvectors_are_saved_one_by_one() -> None:
    work, several = Noted(), covariances()
    found = eigenbases(several, work)
    assert work.stage == "eigenvectors"
    assert work.shared.keys() == {"examples/0", "inputs/a", *(f"outputs/{i}/{name}" for i in (0, 1) for name in "ab")}
    assert int(work.shared["examples/0"]) == 9
    assert torch.equal(work.shared["outputs/1/a"], several[1].blocks["a"].outputs)
    assert work.ticks == 5  # shared inputs once, two outputs of two fits
    assert work.local().keys() == basis_tensors(found).keys() == {f"basis/{number}" for number in range(5)}
    for name, vectors in basis_tensors(found).items():
        assert work.local()[name] is vectors
    assert found[0]["b"].inputs is None
    assert found[0]["a"].inputs is found[1]["a"].inputs
    assert torch.equal(found[0]["a"].inputs.abs(), torch.tensor([[[0.0, 1.0], [1.0, 0.0]]]))  # smallest first
    assert torch.equal(found[1]["a"].outputs.abs(), torch.eye(3).flip(0).unsqueeze(0))


def test_eigenvectors_that_are_there_are_taken() -> None:
    there = torch.full((1, 3, 3), 0.5)
    work = Noted({"basis/1": there})
    found = eigenbases(covariances(), work)
    assert torch.equal(found[0]["a"].outputs, there)
    assert work.ticks == 4
    assert torch.equal(work.local()["basis/1"], there)
    with pytest.raises(CheckpointError, match="'basis/1' has another shape"):
        eigenbases(covariances(), Noted({"basis/1": torch.eye(2).unsqueeze(0)}))


def test_tensors_of_bases_are_named_once() -> None:
    one, two, three = torch.eye(2), torch.eye(3), torch.eye(4)
    bases = [{"a": Basis(one, two), "b": Basis(None, three)}, {"a": Basis(one, three)}]
    found = basis_tensors(bases)
    assert list(found) == ["basis/0", "basis/1", "basis/2"]
    assert [value is own for value, own in zip(found.values(), (one, two, three), strict=True)] == [True] * 3
