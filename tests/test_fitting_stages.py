"""The stages of a fit save their accumulators and continue from saved ones; no file is involved."""

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn

from cases import seeded
from comparison import assert_same
from ifcomp.blocks.block import Basis
from ifcomp.curvature.accumulation import CovarianceSums
from ifcomp.curvature.eigen import basis_tensors, eigenbases
from ifcomp.curvature.factors import FitSettings
from ifcomp.data.batches import as_batch
from ifcomp.errors import CheckpointError, LabelError
from ifcomp.fitting import FitPasses
from ifcomp.io.resumable import ResumableWork
from ifcomp.layers.inventory import take_inventory
from ifcomp.layers.recorder import Recorder
from ifcomp.layers.registry import Selection
from ifcomp.layers.verification import verified_recorder

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
HALVES = list(as_batch(X).split(3))
SETTINGS = [FitSettings(fisher="exact"), FitSettings(beta=0.5, fisher="exact")]


class MemoryWork(ResumableWork):
    """Work that resumes from given tensors and keeps what a stage would save.

    Attributes:
        saved: Tensors of an earlier run.
        stage: Name of the stage.
        local: Returns the accumulators.
        shared: Tensors that are constant during the stage.
        saves: Number of times that the state was consistent.
    """

    def __init__(self, saved: Mapping[str, Tensor] | None = None, *, complete: bool = False) -> None:
        self.saved, self._complete, self.saves = saved or {}, complete, 0

    def begin_stage(
        self, stage: str, local: Callable[[], Mapping[str, Tensor]], shared: Mapping[str, Tensor] | None = None
    ) -> Mapping[str, Tensor]:
        self.stage, self.local, self.shared = stage, local, shared or {}
        return self.saved

    def is_complete(self, stage: str) -> bool:
        assert stage == self.stage
        return self._complete

    def save_if_due(self) -> None:
        self.saves += 1

    def copy(self) -> dict[str, Tensor]:
        """The accumulators that a checkpoint would contain now."""
        return {name: value.clone() for name, value in self.local().items()}


@pytest.fixture
def recorder() -> Recorder:
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))().double()
    return verified_recorder(model, take_inventory(model, Selection()), as_batch(X))


@pytest.fixture
def bases(recorder: Recorder) -> list[dict[str, Basis]]:
    return eigenbases(FitPasses(recorder, SETTINGS).covariances(HALVES)[0])


# First pass


def test_the_first_pass_continues_from_its_sums(recorder: Recorder) -> None:
    first = MemoryWork()
    expected, _ = FitPasses(recorder, SETTINGS).covariances(HALVES)
    FitPasses(recorder, SETTINGS, work=first).covariances(HALVES[:1])
    assert first.stage == "covariances"
    assert first.local().keys() == {"examples/0", *expected.tensors}
    assert int(first.local()["examples/0"]) == 3
    rest = MemoryWork(first.copy())
    sums, count = FitPasses(recorder, SETTINGS, work=rest).covariances(HALVES[1:])
    assert count == 6
    for name, total in expected.tensors.items():
        assert_same(sums.tensors[name], total)
        assert torch.equal(rest.local()[name], sums.tensors[name])


def test_a_complete_first_pass_is_not_repeated(recorder: Recorder) -> None:
    first = MemoryWork()
    expected, _ = FitPasses(recorder, SETTINGS, work=first).covariances(HALVES)
    again = FitPasses(recorder, SETTINGS, work=MemoryWork(first.copy(), complete=True))
    sums, count = again.covariances([])
    assert count == 6
    for name, total in expected.tensors.items():
        assert torch.equal(sums.tensors[name], total)


# Eigenvectors

COVARIANCES = CovarianceSums(
    {"a": torch.diag(torch.tensor([2.0, 1.0])).unsqueeze(0)},
    [{name: torch.diag(torch.arange(3.0) + 1).unsqueeze(0) for name in "ab"} for _ in range(2)],
)


def test_eigenvectors_are_saved_one_by_one(recorder: Recorder) -> None:
    work = MemoryWork()
    bases = FitPasses(recorder, SETTINGS, work=work).eigenbases(COVARIANCES, 9)
    assert work.stage == "eigenvectors"
    assert work.shared.keys() == {"examples/0", *COVARIANCES.tensors}
    assert int(work.shared["examples/0"]) == 9
    assert work.shared["outputs/1/a"] is COVARIANCES.outputs[1]["a"]
    assert work.saves == 5  # one shared input covariance, and two output covariances of two fits
    assert work.local().keys() == {f"basis/{name}" for name in COVARIANCES.tensors}
    for name, vectors in basis_tensors(bases).items():
        assert work.local()[f"basis/{name}"] is vectors


def test_saved_eigenvectors_are_used(recorder: Recorder) -> None:
    saved = torch.full((1, 3, 3), 0.5)
    work = MemoryWork({"basis/outputs/0/a": saved})
    bases = FitPasses(recorder, SETTINGS, work=work).eigenbases(COVARIANCES, 9)
    assert torch.equal(bases[0]["a"].outputs, saved)
    assert torch.equal(work.local()["basis/outputs/0/a"], saved)
    assert work.saves == 4
    wrong = MemoryWork({"basis/outputs/0/a": torch.eye(2).unsqueeze(0)})
    with pytest.raises(CheckpointError, match="'basis/outputs/0/a' has another shape"):
        FitPasses(recorder, SETTINGS, work=wrong).eigenbases(COVARIANCES, 9)


# Second pass


def test_the_second_pass_continues_from_its_sums(recorder: Recorder, bases: list[dict[str, Basis]]) -> None:
    first = MemoryWork()
    expected = FitPasses(recorder, SETTINGS).second_moments(HALVES, bases, 6)
    FitPasses(recorder, SETTINGS, work=first).second_moments(HALVES[:1], bases, 6)
    assert first.stage == "second moments"
    assert first.shared.keys() == {"examples/0", *(f"basis/{name}" for name in basis_tensors(bases))}
    assert int(first.shared["examples/0"]) == 6
    moments = {f"moments/{number}/{block.name}" for number in range(2) for block in recorder.blocks}
    assert first.local().keys() == {"examples/1", "matches/1", "reference/features", *moments}
    assert int(first.local()["examples/1"]) == 3
    saved = first.copy()
    for name in moments:
        saved[name] *= 3  # at the end the sums are divided by the number of examples
    rest = FitPasses(recorder, SETTINGS, work=MemoryWork(saved)).second_moments(HALVES[1:], bases, 6)
    for fit, whole, basis in zip(rest, expected, bases, strict=True):
        assert (fit.count, fit.num_classes, fit.settings) == (6, 3, whole.settings)
        assert fit.reference is not None
        assert_same(fit.reference, whole.reference)
        for name, block in whole.blocks.items():
            assert_same(fit.blocks[name].second_moments, block.second_moments)
            assert fit.blocks[name].basis is basis[name]


def test_second_moments_of_no_examples_are_zero(recorder: Recorder, bases: list[dict[str, Basis]]) -> None:
    fit = FitPasses(recorder, SETTINGS).second_moments([], bases)[0]
    assert fit.count == 0
    assert all((block.second_moments == 0).all() for block in fit.blocks.values())


# Several processes, labels


def test_sums_are_added_over_processes(
    recorder: Recorder, bases: list[dict[str, Basis]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes with the same data have twice the sums and the same means."""
    passes = FitPasses(recorder, SETTINGS)
    (alone, _), expected = passes.covariances(HALVES), passes.second_moments(HALVES, bases)
    monkeypatch.setattr("ifcomp.fitting.all_reduce_sum", lambda tensors: [tensor.mul_(2) for tensor in tensors])
    sums, count = passes.covariances(HALVES)
    assert count == 12
    for name, total in alone.tensors.items():
        assert_same(sums.tensors[name], 2 * total)
    for fit, whole in zip(passes.second_moments(HALVES, bases), expected, strict=True):
        assert fit.count == 12
        for name, block in whole.blocks.items():
            assert_same(fit.blocks[name].second_moments, block.second_moments)


def test_labels_are_checked_if_a_fit_needs_them(recorder: Recorder) -> None:
    targets = as_batch((X, torch.rand(6)))
    assert FitPasses(recorder, SETTINGS).covariances([as_batch(X)])[1] == 6
    for wrong in (targets, as_batch(X)):
        with pytest.raises(LabelError):
            FitPasses(recorder, [SETTINGS[0], FitSettings(fisher="empirical")]).covariances([wrong])
