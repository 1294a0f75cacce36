"""SIGINT (Ctrl-C) that waits until the state is saved."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class PendingInterrupt:
    """Whether a SIGINT is waiting."""

    requested: bool = False


@contextmanager
def defer_interrupts(on_interrupt: Callable[[], None] | None = None) -> Iterator[PendingInterrupt]:
    """Defer the first SIGINT; a second one raises KeyboardInterrupt at once.

    The code inside the context checks `PendingInterrupt.requested` and raises KeyboardInterrupt when its state is
    saved. Otherwise the end of the context raises it. Nothing is deferred in threads other than the main one, or if the
    program has its own handler.

    Args:
        on_interrupt: Called when the first SIGINT arrives.
    """
    pending = PendingInterrupt()
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield pending
        return
    process = os.getpid()

    def handle(*_: object) -> None:
        if pending.requested:
            raise KeyboardInterrupt
        pending.requested = True
        if on_interrupt is not None and os.getpid() == process:  # workers of a DataLoader inherit the handler
            on_interrupt()

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield pending
    finally:
        signal.signal(signal.SIGINT, previous)
    if pending.requested:
        raise KeyboardInterrupt
