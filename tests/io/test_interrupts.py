"""SIGINT (Ctrl-C) during a fit with a checkpoint."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from resumable_jobs import NUM_BATCHES, data, fit, network, result_bytes
from torch import Tensor

from ifcomp import Checkpoint, IFComp


class Interrupting(list[Any]):
    """Batches that raise SIGINT before the batches with the given numbers, counted over all passes."""

    def __init__(self, *numbers: int) -> None:
        super().__init__(data())
        self.count, self.numbers = 0, numbers

    def __iter__(self) -> Iterator[Any]:
        for batch in data():
            for _ in range(self.numbers.count(self.count)):
                signal.raise_signal(signal.SIGINT)
            self.count += 1
            yield batch


@pytest.fixture(autouse=True)
def default_handler() -> Iterator[None]:
    """The handler of Python. Background processes of a shell ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", range(2 * NUM_BATCHES))
def test_an_interrupt_waits_for_the_batch_and_saves(number: int, tmp_path: Path) -> None:
    batches = Interrupting(number)
    with pytest.raises(KeyboardInterrupt) as caught:
        fit(tmp_path / "work.partial", every=3600, batches=batches)
    if number:  # the first batch is requested before there is a state to save
        assert batches.count == number + 1
        assert "Repeat the same command or call to resume it" in caught.value.__notes__[0]
        assert (tmp_path / "work.partial").exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert result_bytes(fit(tmp_path / "work.partial")) == result_bytes(fit(tmp_path / "other"))


def test_a_second_interrupt_does_not_wait(tmp_path: Path) -> None:
    calls: list[None] = []
    batches, checkpoint = Interrupting(1, 1), Checkpoint(tmp_path / "p", 3600, on_interrupt=lambda: calls.append(None))
    with pytest.raises(KeyboardInterrupt), checkpoint:
        IFComp(network()).fit(batches, checkpoint=checkpoint)
    assert (batches.count, len(calls)) == (1, 1)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_at_the_end_is_raised(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Tensor, "div_", lambda self, *_: signal.raise_signal(signal.SIGINT) or self)
    with pytest.raises(KeyboardInterrupt), Checkpoint(tmp_path / "work.partial") as checkpoint:
        IFComp(network()).fit(data(), checkpoint=checkpoint)


def test_another_signal_handler_is_kept(tmp_path: Path) -> None:
    calls: list[int] = []
    before = signal.signal(signal.SIGINT, lambda *_: calls.append(1))
    try:
        fit(tmp_path / "work.partial", batches=Interrupting(1))
    finally:
        signal.signal(signal.SIGINT, before)
    assert calls == [1]
