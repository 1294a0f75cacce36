"""Progress bars on terminals."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

T = TypeVar("T")

#: Seconds over which the speed is averaged. A batch of a large model may take minutes.
SPEED_PERIOD = 3600.0


_hidden: ContextVar[bool] = ContextVar("hidden", default=False)


@contextmanager
def hide_progress() -> Iterator[None]:
    """Show no progress bars inside the context, except where they are asked for."""
    token = _hidden.set(True)
    try:
        yield
    finally:
        _hidden.reset(token)


def known_length(items: Iterable[object]) -> int | None:
    """Return the number of items, or None. A DataLoader of an iterable-style data set may have no length."""
    try:
        return len(items) if isinstance(items, Sized) else None
    except TypeError:
        return None


def track(items: Iterable[T], description: str, show: bool | None = None) -> Iterator[T]:
    """Iterate over the items and show a progress bar on standard error.

    Args:
        items: The items. The remaining time is shown if they have a length.
        description: Text beside the bar.
        show: Whether to show the bar. None shows it if standard error is a terminal and progress is not hidden.
    """
    if not (sys.stderr.isatty() and not _hidden.get() if show is None else show):
        yield from items
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), speed_estimate_period=SPEED_PERIOD) as progress:
        task = progress.add_task(description, total=known_length(items))
        for item in items:
            yield item
            progress.advance(task)
