"""The C library against sums in float64: both variants, drawn shapes, threads, zeros, and numbers that are none."""

import ctypes
import mmap
import platform
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from ifcomp import compiled

HAS_COMPILER = platform.machine() == "x86_64" and shutil.which("cc") is not None
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="needs a C compiler on an x86_64 machine")


@pytest.fixture(scope="module")
def anywhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library whose wide variant runs on processors with AVX2, in two halves of every vector."""
    made = tmp_path_factory.mktemp("compiled") / "anywhere.so"
    source = Path(compiled.__file__).with_name("squares.c")
    flags = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", '-DWIDE_TARGET="avx2,fma"']
    subprocess.run(["cc", *flags, str(source), "-o", str(made)], check=True)
    return made


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Nothing is remembered from one test to another."""
    yield
    compiled._library.cache_clear()
    compiled.panel_width.cache_clear()


def use(width: int, file: Path, patch: pytest.MonkeyPatch) -> None:
    """Take the variant for panels of a width."""
    patch.setattr(compiled, "FILE", file)
    compiled._library.cache_clear()
    if not ctypes.CDLL(str(file)).ifcomp_width():
        pytest.skip("this processor has no AVX2")
    patch.setattr(compiled, "panel_width", _Width(width))


class _Width:
    """A width that is always the same, in the place of one that is remembered."""

    def __init__(self, width: int) -> None:
        self._width = width

    def __call__(self) -> int:
        return self._width

    def cache_clear(self) -> None:
        """There is nothing to forget."""


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def check(rows: Tensor, inputs: Tensor, weights: Tensor) -> None:
    squares = torch.einsum("bcot,btj->bcoj", rows.double(), inputs.double()).square()
    found = compiled.weighted_squares(rows, inputs, compiled.in_panels(weights))
    assert found.dtype == torch.float64
    assert_close(found, torch.einsum("bcoj,oj->bc", squares, weights.double()), rtol=1e-5, atol=0)
    totals = compiled.in_panels(weights)  # something is there already
    compiled.add_squares(totals, rows, inputs)
    expected = squares.sum((0, 1))
    found_totals = compiled.from_panels(totals, weights.shape[1]) - weights
    assert_close(found_totals.double(), expected, rtol=1e-5, atol=1e-6 * float(1 + expected.max()))


@needs_compiler
@pytest.mark.parametrize("width", [16, 32])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_drawn_shapes(width: int, threads: int, anywhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs that fill tiles or not, columns that fill panels or not, more threads than examples."""
    use(width, anywhere, monkeypatch)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    sizes = st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 30), st.integers(1, 40), st.integers(1, 70))

    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(sizes)
    def shapes(size: tuple[int, int, int, int, int]) -> None:
        examples, cotangents, outputs, positions, columns = size
        rows, inputs = normal(examples, cotangents, outputs, positions), normal(examples, positions, columns, seed=1)
        check(rows, inputs, normal(outputs, columns, seed=2).square())

    shapes()


@needs_compiler
@pytest.mark.parametrize("width", [16, 32])
def test_more_than_is_worked_on_at_once(width: int, anywhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output gradients of one example are 30,000 numbers, so that two examples fit; then 90,000."""
    use(width, anywhere, monkeypatch)
    for cotangents in (1, 3):
        rows, inputs = normal(5, cotangents, 100, 300), normal(5, 300, 40, seed=1)
        check(rows, inputs, normal(100, 40, seed=2).square())


@needs_compiler
@pytest.mark.parametrize("width", [16, 32])
def test_positions_that_see_zeros_are_left_out_where_they_do(
    width: int, anywhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In some panels of columns, in all, and everywhere; a single number that is not zero counts."""
    use(width, anywhere, monkeypatch)
    rows, inputs, weights = normal(4, 2, 7, 9), normal(4, 9, 80, seed=1), normal(7, 80, seed=2).square()
    inputs[0, ::2, :40] = 0
    inputs[1, 3:] = 0
    inputs[2] = 0
    inputs[3, :, :79] = 0
    assert compiled.weighted_squares(rows, inputs, compiled.in_panels(weights))[2].eq(0).all()
    check(rows, inputs, weights)


@needs_compiler
def test_numbers_that_are_none_are_not_hidden(anywhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(16, anywhere, monkeypatch)
    rows, inputs, weights = normal(3, 1, 2, 4), normal(3, 4, 5, seed=1), compiled.in_panels(torch.ones(2, 5))
    inputs[0, 1, :] = 0
    inputs[0, 1, 2] = torch.nan
    rows[1, 0, 1, 3] = torch.inf
    found = compiled.weighted_squares(rows, inputs, weights)
    assert found.isfinite().tolist() == [[False], [False], [True]]


@needs_compiler
def test_what_is_given_may_have_gaps(anywhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(16, anywhere, monkeypatch)
    check(normal(6, 4, 3, 5)[::2, 1:3], normal(3, 9, 5, seed=1).transpose(1, 2), normal(3, 9, seed=2).square())


def windows(examples: int, size: int, positions: int, runs: int, length: int) -> compiled.Windows:
    """Positions and runs that begin anywhere, as long as they end in the image."""
    random, room = torch.Generator().manual_seed(3), size - length
    places = torch.randint(room // 2 + 1, (positions,), generator=random, dtype=torch.int32)
    begins = torch.randint(room - room // 2 + 1, (runs,), generator=random, dtype=torch.int32)
    return compiled.Windows(normal(examples, size, seed=1), places, begins, length)


def seen(own: compiled.Windows, bias: bool, columns: int) -> Tensor:
    """Inputs [B, T, columns] in float64, with the bias and zeros after them."""
    where = own.places[:, None, None] + own.runs[:, None] + torch.arange(own.length)
    inputs = own.images.double()[:, where.long()].flatten(2)
    found = torch.zeros(*inputs.shape[:2], columns, dtype=torch.float64)
    found[..., : inputs.shape[2]] = inputs
    found[..., inputs.shape[2] : inputs.shape[2] + bias] = 1
    return found


def check_gradients(rows: Tensor, own: compiled.Windows, bias: bool, columns: int) -> None:
    before = normal(*rows.shape[:2], columns, seed=2)
    found = before.clone()
    compiled.add_gradients(found, rows, own, bias)
    expected = before.double() + rows.double() @ seen(own, bias, columns)
    assert_close(found.double(), expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))
    given = len(own.runs) * own.length + bias
    assert torch.equal(found[..., given:], before[..., given:])


@needs_compiler
@pytest.mark.parametrize("width", [16, 32])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_gradients_of_drawn_windows(width: int, threads: int, anywhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs that fill tiles or not, columns that fill panels or not, runs of up to twelve, and columns of zeros."""
    use(width, anywhere, monkeypatch)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    sizes = st.tuples(st.integers(1, 14), st.integers(1, 30), st.integers(1, 40), st.integers(1, 8), st.integers(1, 12))

    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(sizes, st.integers(0, 20), st.booleans(), st.integers(0, 9))
    def shapes(size: tuple[int, int, int, int, int], room: int, bias: bool, more: int) -> None:
        examples, outputs, positions, runs, length = size
        own = windows(examples, length + room, positions, runs, length)
        check_gradients(normal(examples, outputs, positions), own, bias, runs * length + bias + more)

    shapes()


@needs_compiler
@pytest.mark.parametrize("width", [16, 32])
def test_gradients_from_more_positions_than_are_unfolded_at_once(
    width: int, anywhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 45 columns, which are as wide as 48 or 64, 1,365 or 1,024 positions."""
    use(width, anywhere, monkeypatch)
    for positions in (1023, 1024, 1025, 1365, 1366, 2731):
        check_gradients(normal(5, 7, positions), windows(5, 99, positions, 5, 9), False, 45)


@needs_compiler
def test_output_gradients_may_have_gaps(anywhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(16, anywhere, monkeypatch)
    own = windows(3, 20, 9, 2, 3)
    check_gradients(normal(6, 8, 15)[::2, 1::3, 4:13], own, True, 7)
    check_gradients(normal(3, 9, 4).transpose(1, 2), own, True, 7)
    check_gradients(normal(3, 1, 1).expand(3, 4, 9), own, True, 7)


@needs_compiler
@pytest.mark.parametrize("width", [16, 32])
def test_nothing_is_read_beyond_the_images(width: int, anywhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are at the end of a page, and the next one cannot be read: the process would end."""
    use(width, anywhere, monkeypatch)
    pages = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    floats = (ctypes.c_float * (2 * mmap.PAGESIZE // 4)).from_buffer(pages)
    beyond = ctypes.c_void_p(ctypes.addressof(floats) + mmap.PAGESIZE)
    protect = ctypes.CDLL(None).mprotect
    assert protect(beyond, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    try:
        for length in (1, 5, 8, 11):
            own = windows(3, 17, 6, 2, length)
            at_end = torch.frombuffer(pages, dtype=torch.float32, count=51, offset=mmap.PAGESIZE - 51 * 4).view(3, 17)
            at_end.copy_(own.images)
            places = torch.arange(6, dtype=torch.int32)
            runs = torch.tensor([0, 17 - length - 5], dtype=torch.int32)
            check_gradients(normal(3, 4, 6), compiled.Windows(at_end, places, runs, length), True, 2 * length + 1)
    finally:
        protect(beyond, ctypes.c_size_t(mmap.PAGESIZE), mmap.PROT_READ | mmap.PROT_WRITE)


def test_panels_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "panel_width", _Width(4))
    matrix = torch.arange(1.0, 19.0).view(3, 6)
    panels = compiled.in_panels(matrix)
    assert panels.shape == (2, 3, 4)
    assert panels[1].tolist() == [[5, 6, 0, 0], [11, 12, 0, 0], [17, 18, 0, 0]]
    assert torch.equal(compiled.from_panels(panels, 6), matrix)


@needs_compiler
def test_the_library_is_there_where_it_can_be() -> None:
    """`make setup` made it, so that all other tests of single precision go through it."""
    processor = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    flags = set(processor.split())
    assert compiled.panel_width() == (32 if "avx512f" in flags else 16 if {"avx2", "fma"} <= flags else 0)


@pytest.mark.parametrize("content", [None, b"", b"not a library"])
def test_without_a_library(content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "squares.so"
    if content is not None:
        file.write_bytes(content)
    monkeypatch.setattr(compiled, "FILE", file)
    compiled._library.cache_clear()
    compiled.panel_width.cache_clear()
    assert compiled.panel_width() == 0
    assert not compiled.serves(torch.zeros(1))


@needs_compiler
def test_a_library_of_another_version_is_not_used(anywhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "FILE", anywhere)
    for version, width in ((compiled._VERSION, True), (compiled._VERSION + 1, False)):
        compiled._library.cache_clear()
        compiled.panel_width.cache_clear()
        monkeypatch.setattr(compiled, "_VERSION", version)
        assert bool(compiled.panel_width()) is width


def test_what_the_library_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "panel_width", _Width(16))
    assert compiled.serves(torch.zeros(1))
    assert not compiled.serves(torch.zeros(1, dtype=torch.float64))
    assert not compiled.serves(torch.zeros(1, device="meta"))
