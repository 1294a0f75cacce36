"""Memory limits hold, change no result, and are checked before the work."""

import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from cases import LAYER_CASES, MODEL_CASES, Case
from comparison import as_type, assert_close
from ifcomp import IFComp, Relative
from ifcomp.curvature.eigen import basis_tensors
from ifcomp.curvature.sizes import factor_bytes
from ifcomp.data.batches import as_batch
from ifcomp.errors import MemoryLimitError, SettingError
from ifcomp.fitting import FitPasses
from ifcomp.layers.recorder import Recorder
from ifcomp.memory import as_bytes, as_text, even_size
from ifcomp.microbatches import Microbatches
from ifcomp.scoring import ScoreOptions, build_evaluation, score_columns
from oracles import Inputs
from tracking import Alive


def conv_net(classes: int = 10) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(8),
        nn.Flatten(),
        nn.Linear(16 * 4, classes),
    ).eval()


class Tokens(nn.Module):
    """Mean over a sequence of any length, with a parameter that has no layer rule."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 32), nn.Linear(32, 4)
        self.shift = nn.Parameter(torch.zeros(32))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.outer((torch.tanh(self.inner(x)) + self.shift).mean(1))
        return found


def images(count: int, size: int = 8) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(size, 3, 16, 16) for _ in range(count)]


def least(run: Callable[[int], object]) -> int:
    """The bytes that the error asks for."""
    with pytest.raises(MemoryLimitError) as caught:
        run(1)
    found = re.search(r"([\d,]+) bytes\D*(\(.*?\) )?are needed|need .*?\(([\d,]+) bytes\)", str(caught.value))
    assert found, str(caught.value)
    return int((found[1] or found[3]).replace(",", ""))


def needed(run: Callable[[int], object]) -> int:
    """The smallest sufficient limit. Factors are checked first, then examples."""
    size = least(run)
    with pytest.raises(MemoryLimitError) as caught:
        run(size - 1)
    assert f"{size:,}" in str(caught.value)
    try:
        run(size)
    except MemoryLimitError as error:
        found = re.search(r"at least ([\d,]+) bytes", str(error))
        assert found
        size = int(found[1].replace(",", ""))
    return size


@pytest.mark.parametrize(
    ("given", "size"),
    [(512, 512), ("512", 512), ("8GB", 8 * 10**9), ("1.5 MB", 1_500_000), ("2GiB", 2 * 2**30), ("3kb", 3000)],
)
def test_sizes_are_read(given: int | str, size: int) -> None:
    assert as_bytes(given) == size


@pytest.mark.parametrize("given", [0, -1, True, 1.5, "", "GB", "8 XB", "-3GB", "0MB", [1]])
def test_other_sizes_are_refused(given: Any) -> None:
    with pytest.raises(SettingError, match="max_memory must be"):
        as_bytes(given)
    with pytest.raises(SettingError, match="max_memory must be"):
        IFComp(conv_net()).fit(images(1), max_memory=given)


def test_sizes_are_written() -> None:
    assert [as_text(size) for size in (12, 1500, 2e6, 3.25e9, 4e12)] == ["12 B", "1.5 kB", "2.0 MB", "3.2 GB", "4.0 TB"]


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "images": (conv_net, (3, 16, 16)),
    "tokens": (Tokens, (5, 8)),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_smallest_limit_suffices_and_changes_nothing(name: str) -> None:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model, data = make().double(), [torch.randn(12, *shape, dtype=torch.float64)]
    free = IFComp(model, fisher="exact").fit(data)
    tight = IFComp(model, fisher="exact")
    tight.fit(data, max_memory=needed(lambda size: tight.fit(data, max_memory=size)))
    assert free.factors is not None
    assert tight.factors is not None
    for block, other in zip(free.factors.blocks.values(), tight.factors.blocks.values(), strict=True):
        assert_close(other.second_moments, block.second_moments, rtol=1e-9, atol=1e-12)
    whole = free.score(data).frame
    limited = free.score(data, max_memory=needed(lambda size: free.score(data, max_memory=size))).frame
    pd.testing.assert_frame_equal(limited, whole, rtol=1e-9)


def peaks(case_or_data: list[Inputs], model: nn.Module, limit: int, **options: Any) -> tuple[int, int]:
    """Peak bytes of a fit and of scoring under a limit; factors of the fit count in scoring."""
    ifc = IFComp(model, **options)
    with Alive() as fitting:
        ifc.fit(case_or_data, max_memory=limit)
    recorder = ifc._recorder
    assert recorder is not None
    factors = factor_bytes(recorder.blocks, recorder.dtype.itemsize)
    with Alive() as scoring:
        ifc.score(case_or_data, max_memory=limit)
    return fitting.peak, scoring.peak + factors


@pytest.mark.parametrize("case", [*LAYER_CASES, *MODEL_CASES], ids=str)
def test_peaks_stay_below_the_limit(case: Case) -> None:
    """Twice the peak of one example, on a batch that does not fit at once."""
    model, batch = case.make().float(), as_batch(as_type(case.sample(40, seed=1), torch.float32))
    ifc = IFComp(model, fisher="exact").fit([batch.args[0] if batch.args else batch.kwargs])
    assert ifc._recorder is not None
    assert ifc.factors is not None
    recorder, basis = ifc._recorder, {name: block.basis for name, block in ifc.factors.blocks.items() if block.basis}
    free = FitPasses(recorder, [ifc.settings])
    runs = {0: lambda passes: passes.covariances([batch]), 1: lambda passes: passes.second_moments([batch], [basis])}
    for number, run in runs.items():
        run(free)
        limit = limit_of(free.microbatches[number])
        with Alive() as tracker:
            run(FitPasses(recorder, [ifc.settings], limit))
        extra = sum(tensor.nbytes for tensor in basis_tensors([basis]).values()) if number else 0
        assert tracker.peak + extra <= limit
    evaluation = build_evaluation(recorder, ifc.factors, 1e-3)
    score_columns(evaluation, [batch], ScoreOptions())
    limit = limit_of(evaluation.microbatches)
    limited = evaluation.with_limit(limit)
    with Alive() as tracker:
        columns = score_columns(limited, [batch], ScoreOptions())
    table = 2 * sum(column.nbytes for column in columns.values())  # rows of the result, while they are joined
    assert tracker.peak + limited.microbatches.fixed_bytes <= limit + table


def limit_of(microbatches: Microbatches) -> int:
    (measured,) = microbatches.peaks.values()
    return microbatches.fixed_bytes + 2 * min(measured.values())


@pytest.mark.parametrize("limit", [3_000_000, 10_000_000])
@pytest.mark.parametrize("fisher", ["sampled", "exact"])
def test_peaks_of_convolutions_stay_below_the_limit(limit: int, fisher: Any) -> None:
    fitting, scoring = peaks(images(2, 64), conv_net(), limit, fisher=fisher)
    assert limit / 10 < fitting <= limit
    assert limit / 10 < scoring <= limit


def test_memory_does_not_grow_with_the_data() -> None:
    found = []
    for count in (2, 20):
        ifc, data = IFComp(conv_net()), images(count)
        with Alive() as fitting:
            ifc.fit(data)
        with Alive() as scoring:
            ifc.score(data)
        assert ifc.factors is not None
        assert ifc.factors.reference is not None
        reference = ifc.factors.reference.nbytes + 8 * len(ifc.factors.reference)  # features and positions: bounded
        found.append((fitting.peak - reference, scoring.peak))
    assert found[1][0] == found[0][0]
    table = 18 * 8 * 8 * 20  # rows of the table itself
    assert found[1][1] <= found[0][1] + table


def test_longer_inputs_are_measured_again() -> None:
    torch.manual_seed(0)
    model, data = Tokens(), [torch.randn(64, 4, 8), torch.randn(64, 400, 8)]
    assert max(peaks(data, model, 3_000_000)) <= 3_000_000


def test_one_recording_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    record, alive, most = Recorder.record, [0], [0]

    def counted(self: Recorder, *args: Any, **kwargs: Any) -> Any:
        made = record(self, *args, **kwargs)
        alive[0] += 1
        weakref.finalize(made, lambda: alive.__setitem__(0, alive[0] - 1))
        most[0] = max(most[0], alive[0])
        return made

    ifc, data = IFComp(conv_net()), images(4)
    ifc.fit(data)
    monkeypatch.setattr(Recorder, "record", counted)
    ifc.fit(data)
    ifc.score(data)
    ifc.parametric_complexity(data[0], probes=2)
    assert most == [1]
    assert alive == [0]


def test_a_thousand_classes_are_scored_without_their_gradients() -> None:
    classes, size = 1000, 16
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, classes))
    data = [torch.randn(size, 8)]
    ifc = IFComp(model).fit(data)
    stacked = size * classes**2 * 4  # output gradients of the last layer for all labels
    with Alive() as exact:
        table = ifc.score(data)
    with Alive() as probed:
        estimate = ifc.score(data, probes=4)
    assert exact.peak < stacked / 4
    assert exact.largest < stacked / 25
    assert probed.peak < stacked / 10
    with Alive() as fitting:
        IFComp(model, fisher="exact").fit(data)
    assert fitting.largest < stacked / 4  # a covariance of the outputs in float64
    ratio = estimate.column("expected_influence") / table.column("expected_influence")
    assert 0.5 < ratio.mean() < 2


def test_a_layer_that_is_too_wide_is_named_before_the_fit() -> None:
    class Never:
        def __iter__(self) -> Iterator[Tensor]:
            raise AssertionError("the data was touched")

    with torch.device("meta"):
        wide = nn.Linear(1_000_000, 2)
    wide = wide.to_empty(device="cpu")
    nn.init.zeros_(wide.weight)
    nn.init.zeros_(wide.bias)
    model = nn.Sequential(wide, nn.Linear(2, 2))
    with pytest.raises(MemoryLimitError) as caught:
        IFComp(model).fit(Never())
    for part in ("0: 4.0 TB", "1,000,001 inputs", "layers=", "sua=True", "more memory"):
        assert part in str(caught.value)
    IFComp(model, layers=["1"]).fit([torch.randn(3, 1_000_000)])


def test_the_last_layer_keeps_no_graph_below_it() -> None:
    model = conv_net()
    data = images(1, size=4)
    model[0].weight.requires_grad_(False)
    before = [parameter.requires_grad for parameter in model.parameters()]
    whole = IFComp(model, layers=None).fit(data)
    ifc = IFComp(model, layers="last").fit(data)
    with Alive() as last:
        ifc.parametric_complexity(data[0], probes=2)
    with Alive() as everything:
        whole.parametric_complexity(data[0], probes=2)
    assert last.peak < everything.peak / 2
    assert [parameter.requires_grad for parameter in model.parameters()] == before
    some = IFComp(model, layers=["7"], damping=Relative(0.1)).fit(data)
    assert_close(ifc.influence(data[0]), some.influence(data[0]), rtol=1e-6, atol=0)


def test_flags_come_back_after_an_error() -> None:
    model, data = conv_net(), images(1)
    ifc = IFComp(model, layers="last").fit(data)
    flags = []

    def failing() -> None:
        assert ifc._recorder is not None
        with ifc._recorder.attached():
            flags.extend(parameter.requires_grad for parameter in model.parameters())
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    assert flags == [False] * (len(flags) - 2) + [True] * 2
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    ("total", "largest", "expected"), [(10, 4, 4), (9, 4, 3), (8, 8, 8), (64, 53, 32), (7, 0, 1), (5, 99, 5), (0, 3, 0)]
)
def test_parts_are_few_and_even(total: int, largest: int, expected: int) -> None:
    assert even_size(total, largest) == expected
