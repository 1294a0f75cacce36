"""A fit does not depend on batches, microbatches and the number of cotangents at once. Several fits share passes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import nn

from cases import BATCH_CASES, CASES, FEW_CASES, Case
from comparison import as_type, assert_same
from ifcomp import IFComp
from ifcomp.blocks.block import Basis
from ifcomp.curvature.accumulation import CovarianceSums, add_second_moments, second_moment_sums
from ifcomp.curvature.eigen import eigenbases
from ifcomp.curvature.factors import Factors, FitSettings
from ifcomp.curvature.labels import fisher_cotangents
from ifcomp.data.batches import Batch, as_batch
from ifcomp.errors import SettingError
from ifcomp.fitting import FitPasses
from ifcomp.layers.inventory import take_inventory
from ifcomp.layers.recorder import Recorder
from ifcomp.layers.registry import Selection
from ifcomp.layers.verification import verified_recorder
from ifcomp.state import fit_together

SIZE = 9
SETTINGS = [FitSettings(label_samples=2, seed=3), FitSettings(beta=0.3, fisher="exact")]


@dataclass(frozen=True)
class Fit:
    """Both passes over all examples of a case in one batch.

    Attributes:
        recorder: Records the model in double precision.
        batch: The examples.
        sums: Covariances.
        bases: Eigenbases for each of the settings.
        factors: Factors for each of the settings.
    """

    recorder: Recorder
    batch: Batch
    sums: CovarianceSums
    bases: list[dict[str, Basis]]
    factors: list[Factors]


@cache
def fit_of(name: str) -> Fit:
    """The fit of a case; computed once for all tests."""
    case = CASES[name]
    model, batch = case.make().double(), as_batch(as_type(case.sample(SIZE, seed=1), torch.float64))
    recorder = verified_recorder(model, take_inventory(model, Selection()), batch)
    passes = FitPasses(recorder, SETTINGS)
    sums, _ = passes.covariances([batch])
    bases = eigenbases(sums)
    return Fit(recorder, batch, sums, bases, passes.second_moments([batch], bases))


def check_covariances(sums: CovarianceSums, expected: CovarianceSums) -> None:
    assert sums.tensors.keys() == expected.tensors.keys()
    for name, total in expected.tensors.items():
        assert_same(sums.tensors[name], total, rtol=1e-10)


def check_moments(fits: list[Factors], expected: list[Factors]) -> None:
    for factors, reference in zip(fits, expected, strict=True):
        assert factors.count == reference.count == SIZE
        for name, block in reference.blocks.items():
            assert_same(factors.blocks[name].second_moments, block.second_moments, rtol=1e-10, floor=1e-20)


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("case", BATCH_CASES, ids=str)
def test_a_fit_does_not_depend_on_batches(case: Case, size: int) -> None:
    fit = fit_of(case.name)
    batches, passes = list(fit.batch.split(size)), FitPasses(fit.recorder, SETTINGS)
    sums, count = passes.covariances(batches)
    assert count == SIZE
    check_covariances(sums, fit.sums)
    check_moments(passes.second_moments(batches, fit.bases), fit.factors)


@pytest.mark.parametrize("case", BATCH_CASES, ids=str)
def test_a_fit_does_not_depend_on_microbatches(case: Case) -> None:
    """The limit leaves memory for one example and one cotangent at a time."""
    fit = fit_of(case.name)
    measured = FitPasses(fit.recorder, SETTINGS, 10**9)
    measured.covariances([fit.batch])
    measured.second_moments([fit.batch], fit.bases)
    limits = []
    for microbatches in measured.microbatches:
        (peaks,) = microbatches.peaks.values()
        limits.append(microbatches.fixed_bytes + peaks["1 x 1"] * 11 // 10)
    with recorded_sizes(fit.recorder.model) as sizes:
        sums, _ = FitPasses(fit.recorder, SETTINGS, limits[0]).covariances([fit.batch])
        moments = FitPasses(fit.recorder, SETTINGS, limits[1]).second_moments([fit.batch], fit.bases)
    assert set(sizes) == {1}
    check_covariances(sums, fit.sums)
    check_moments(moments, fit.factors)


@contextmanager
def recorded_sizes(model: nn.Module) -> Iterator[list[int]]:
    """The batch sizes of all forward passes inside the context."""
    sizes: list[int] = []
    hook = model.register_forward_hook(lambda *call: sizes.append(len(getattr(call[2], "logits", call[2]))))
    yield sizes
    hook.remove()


@pytest.mark.parametrize("chunk_size", [1, 2, 100])
@pytest.mark.parametrize("case", FEW_CASES, ids=str)
def test_sums_do_not_depend_on_cotangents_at_once(case: Case, chunk_size: int) -> None:
    fit = fit_of(case.name)
    recorder = fit.recorder
    covariances = CovarianceSums.zeros(recorder, len(SETTINGS))
    moments = [second_moment_sums(recorder) for _ in SETTINGS]
    with recorder.attached():
        recording = recorder.record(fit.batch)
        with recorder.computing():
            first, second = (
                [fisher_cotangents(recording.logits, settings, None, 0, pass_index) for settings in SETTINGS]
                for pass_index in (0, 1)
            )
            covariances.add(recording, first, chunk_size)
            for totals, bases, cotangents in zip(moments, fit.bases, second, strict=True):
                add_second_moments(totals, recording, bases, cotangents, chunk_size)
    check_covariances(covariances, fit.sums)
    for totals, factors in zip(moments, fit.factors, strict=True):
        for name, total in totals.items():
            assert_same(total / SIZE, factors.blocks[name].second_moments, rtol=1e-10, floor=1e-20)


# Several fits in the same passes


@pytest.mark.parametrize("number", range(len(SETTINGS)))
@pytest.mark.parametrize("case", FEW_CASES, ids=str)
def test_fits_in_the_same_passes_equal_separate_fits(case: Case, number: int) -> None:
    fit = fit_of(case.name)
    passes = FitPasses(fit.recorder, [SETTINGS[number]])
    sums, _ = passes.covariances([fit.batch])
    check_covariances(sums, CovarianceSums(fit.sums.inputs, [fit.sums.outputs[number]]))
    fits = passes.second_moments([fit.batch], [fit.bases[number]])
    check_moments(fits, [fit.factors[number]])


def test_every_predictor_gets_its_factors() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    together = [IFComp(model, beta, fisher="exact") for beta in (0.1, 1.0)]
    fit_together(together, [x])
    for ifc in together:
        alone = IFComp(model, ifc.beta, fisher="exact").fit([x])
        assert ifc.factors.settings == alone.factors.settings == ifc.settings
        assert torch.equal(ifc.influence(x), alone.influence(x))


def test_fits_in_the_same_passes_share_forward_passes() -> None:
    calls = []
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    handle = model.register_forward_hook(lambda *_: calls.append(1))
    IFComp(model).fit([x])
    alone = len(calls)
    fit_together([IFComp(model, beta) for beta in (0.1, 0.5, 1.0)], [x])
    handle.remove()
    assert len(calls) == 2 * alone


def test_fits_in_the_same_passes_have_the_same_model_and_layers() -> None:
    one, other = nn.Linear(4, 3), nn.Linear(4, 3)
    with pytest.raises(SettingError, match="same model"):
        fit_together([IFComp(one), IFComp(other)], [torch.randn(5, 4)])
    with pytest.raises(SettingError, match="layers="):
        fit_together([IFComp(one), IFComp(one, layers="last")], [torch.randn(5, 4)])
