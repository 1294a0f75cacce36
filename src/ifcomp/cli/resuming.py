"""Commands that can be killed: the checkpoint beside what they write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from ifcomp.distributed import process_info
from ifcomp.io.checkpoints import Checkpoint
from ifcomp.io.files import remove_scratch_files


@contextmanager
def resumable(every: float, *outputs: str) -> Iterator[Checkpoint]:
    """A checkpoint beside the first of the files that a command writes; one command at a time.

    What a killed command left of its files is removed first.
    """
    with Checkpoint(f"{outputs[0]}.partial", every, on_interrupt=_notice) as checkpoint:
        if process_info().rank == 0:
            for path in outputs:
                remove_scratch_files(path)
        yield checkpoint


def _notice() -> None:
    typer.echo("Stopping after this batch. Press Ctrl-C again to stop at once.", err=True)
