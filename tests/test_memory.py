"""Memory: what is allowed is kept to, changes no result, and is asked for before work begins."""

import platform
import re
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from comparison import assert_close
from ifcomp import IFComp, Relative
from ifcomp.data.batches import as_batch
from ifcomp.errors import MemoryLimitError, SettingError
from ifcomp.layers import room, session
from ifcomp.layers.registry import Selection
from ifcomp.layers.session import Session
from ifcomp.layers.tape import Tape
from ifcomp.memory import NO_LIMIT, as_bytes, as_text, even_size
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
    """Mean over a sequence of any length, with a parameter that no rule covers."""

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
    """What the error says is needed."""
    with pytest.raises(MemoryLimitError) as caught:
        run(1)
    found = re.search(r"([\d,]+) bytes\D*(\(.*?\) )?are needed|need .*?\(([\d,]+) bytes\)", str(caught.value))
    assert found, str(caught.value)
    return int((found[1] or found[3]).replace(",", ""))


def needed(run: Callable[[int], object]) -> int:
    """The least that is enough: factors are asked for first, then examples."""
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
def test_the_least_is_enough_and_changes_nothing(name: str) -> None:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model, data = make().double(), [torch.randn(12, *shape, dtype=torch.float64)]
    free = IFComp(model, fisher="exact").fit(data)
    tight = IFComp(model, fisher="exact")
    tight.fit(data, max_memory=needed(lambda size: tight.fit(data, max_memory=size)))
    assert free.factors is not None
    assert tight.factors is not None
    for block, other in zip(free.factors.blocks.values(), tight.factors.blocks.values(), strict=True):
        assert_close(block.second_moments, other.second_moments, rtol=1e-6, atol=1e-14)
    size = needed(lambda size: tight.score(data, max_memory=size))
    pd.testing.assert_frame_equal(tight.score(data, max_memory=size).frame, free.score(data).frame, rtol=1e-6)


@pytest.mark.parametrize("limit", ["3MB", "10MB"])
@pytest.mark.parametrize("fisher", ["sampled", "exact"])
def test_no_more_is_held_than_allowed(limit: str, fisher: Any) -> None:
    data = images(1, size=40)
    ifc = IFComp(conv_net(), fisher=fisher)
    with Alive() as fitting:
        ifc.fit(data, max_memory=limit)
    with Alive() as scoring:
        ifc.score(data, max_memory=limit)
    allowed = as_bytes(limit)
    assert allowed is not None
    assert 0.3 * allowed < scoring.peak <= allowed
    assert fitting.peak <= allowed


def test_memory_does_not_grow_with_the_data() -> None:
    ifc = IFComp(conv_net(), fisher="exact")
    peaks = []
    for count in (2, 20):
        data = images(count)
        with Alive() as fitting:
            ifc.fit(data)
        with Alive() as scoring:
            ifc.score(data)
        peaks.append((fitting.peak, scoring.peak))
    assert peaks[1][0] == peaks[0][0]
    table = 18 * 8 * 8 * 10  # rows of the table itself
    assert peaks[1][1] <= peaks[0][1] + table


def test_longer_batches_are_worked_on_in_smaller_pieces() -> None:
    """The first batch says nothing about the second."""
    torch.manual_seed(0)
    model, data = Tokens(), [torch.randn(64, 4, 8), torch.randn(64, 400, 8)]
    ifc = IFComp(model).fit(data, max_memory="3MB")
    with Alive() as scoring:
        ifc.score(data, max_memory="3MB")
    assert scoring.peak <= 3_000_000


def test_one_recording_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    record, alive, most = Tape.record, [0], [0]

    def counted(self: Tape, batch: Any, quick: bool = False) -> Any:
        made = record(self, batch, quick)
        alive[0] += 1
        weakref.finalize(made, lambda: alive.__setitem__(0, alive[0] - 1))
        most[0] = max(most[0], alive[0])
        return made

    ifc, data = IFComp(conv_net()), images(4)
    ifc.fit(data)
    monkeypatch.setattr(Tape, "record", counted)
    ifc.fit(data)
    ifc.score(data)
    ifc.parametric_complexity(data[0], probes=2)
    assert most == [1]
    assert alive == [0]


def test_pieces_are_of_equal_size(monkeypatch: pytest.MonkeyPatch) -> None:
    record, sizes = Tape.record, []

    def noted(self: Tape, batch: Any, quick: bool) -> Any:
        sizes.append(batch.size)
        return record(self, batch, quick)

    ifc, data = IFComp(conv_net()), images(1, 10)
    ifc.fit(data)
    monkeypatch.setattr(session, "_MOST_EXAMPLES", 7)
    monkeypatch.setattr(session, "_SMALL_GRAPH", 0)
    monkeypatch.setattr(Tape, "record", noted)
    ifc.influence(data[0])
    assert sizes == [5, 5]


@pytest.mark.parametrize(
    ("labels", "each", "planned"),
    [
        (100, 1, (8, 16)),  # all examples fit
        (100, 2, (8, 8)),
        (100, 5, (3, 8)),
        (16, 2, (4, 16)),  # all labels at once save one backward
    ],
)
def test_few_examples_in_a_piece_are_worse_than_few_cotangents(
    labels: int, each: int, planned: tuple[int, int]
) -> None:
    batch = as_batch(images(1)[0])
    own = Session(conv_net(), Selection(), batch)
    unit = session.PIECE_BYTES // (8 * 16)
    with own.attached():
        found = own.plan(batch, labels, NO_LIMIT, lambda _, examples, cotangents: examples * cotangents * each * unit)
    assert found == planned


def test_pieces_that_have_many_examples_have_many_cotangents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_FEW_EXAMPLES", 4)
    batch = as_batch(images(1)[0])
    own = Session(conv_net(), Selection(), batch)
    with own.attached():
        most = session.PIECE_BYTES // (5 * 16)
        assert own.plan(batch, 100, NO_LIMIT, lambda _, examples, cotangents: examples * cotangents * most) == (5, 16)
        most = session.PIECE_BYTES // (3 * 16)
        assert own.plan(batch, 100, NO_LIMIT, lambda _, examples, cotangents: examples * cotangents * most) == (6, 8)


def test_memory_is_kept_for_the_next_call_but_not_much(monkeypatch: pytest.MonkeyPatch) -> None:
    def kept() -> int:
        assert ifc._session is not None
        return sum(place.nbytes for place in ifc._session._tape.room._places.values())

    ifc, data = IFComp(conv_net()), images(1)
    ifc.fit(data)
    assert kept() == 0
    ifc.influence(data[0])
    much = kept()
    assert much > 8 * 10 * (16 * 256) * 4  # output gradients of the second convolution
    ifc.score(data, max_memory="3MB")
    assert 0 < kept() < min(much, 3_000_000)
    ifc.influence(data[0])
    assert kept() == much
    monkeypatch.setattr(session, "_KEPT_BYTES", much - 1)
    ifc.influence(data[0])
    assert much / 2 < kept() < much  # all but the largest
    monkeypatch.setattr(session, "_KEPT_BYTES", 0)
    ifc.influence(data[0])
    assert kept() == 0
    monkeypatch.undo()
    ifc.influence(data[0])
    old = ifc._session
    assert old is not None
    ifc.fit(data)
    assert not old._tape.room._places


_TOUCHED_AGAIN = """
import resource
import torch
from ifcomp.layers.room import keep_freed_memory

def work():
    blocks = [torch.ones(2**18) for _ in range(100)]

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

keep_freed_memory()
for _ in range(5):
    work()
before = faults()
work()
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="what other C libraries keep is not known")
def test_freed_memory_is_used_again() -> None:
    """A hundred blocks of 256 pages, which by itself are new pages again where these are small.

    Blocks are aligned, so that a few more may be needed until their places are settled.
    """
    code = [sys.executable, "-c", _TOUCHED_AGAIN]
    assert int(subprocess.run(code, capture_output=True, text=True, check=True).stdout) < 1000


@pytest.mark.parametrize("error", [OSError, AttributeError])
def test_other_systems_are_left_alone(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: object) -> None:
        raise error

    monkeypatch.setattr(room.ctypes, "CDLL", missing)
    room.keep_freed_memory.__wrapped__()


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
    assert ifc._session is not None
    assert whole._session is not None
    with ifc._session.attached():
        found = ifc._session.footprint(as_batch(data[0]))
    with whole._session.attached():
        everything = whole._session.footprint(as_batch(data[0]))
    assert found.graph < everything.graph / 20
    assert [parameter.requires_grad for parameter in model.parameters()] == before
    some = IFComp(model, layers=["7"], damping=Relative(0.1)).fit(data)
    assert_close(ifc.influence(data[0]), some.influence(data[0]), rtol=1e-6, atol=0)


def test_flags_come_back_after_an_error() -> None:
    model, data = conv_net(), images(1)
    ifc = IFComp(model, layers="last").fit(data)
    flags = []

    def failing() -> None:
        assert ifc._session is not None
        with ifc._session.attached():
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
