"""`Checkpoint`: resume a fit or a scoring run that was stopped or killed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ifcomp.distributed import process_info
from ifcomp.errors import CheckpointError, SettingError
from ifcomp.io.checkpoint_files import read_checkpoint
from ifcomp.io.files import check_free_space, file_lock, remove_folder, remove_scratch_files
from ifcomp.io.interrupts import defer_interrupts
from ifcomp.io.resumable import CheckpointedWork, ResumableWork, files_folder


class Checkpoint:
    """A file with the state of unfinished work. It is removed when the context ends without an error.

    The same call with the same data resumes from the file, in a new process too, and its result has the same bits. The
    file is replaced atomically, so a kill at any moment loses only the work since the last checkpoint. Inside the
    context the first SIGINT (Ctrl-C) waits for the current batch, saves the state and raises `KeyboardInterrupt`; a
    second one does not wait. Only one process at a time can enter a path.

    One checkpoint serves one call of ``fit``, ``score`` or ``audit``, with data in the same order on every pass. Each
    of several processes has its own file; they enter the checkpoint inside `ifcomp.distributed.data_parallel`.

    Example:
        >>> with Checkpoint("run.partial") as checkpoint:
        ...     ifc = IFComp(model).fit(loader, checkpoint=checkpoint)
        ...     ifc.save("run.ifcomp")
    """

    def __init__(
        self, path: str | os.PathLike[str], every: float = 60.0, *, on_interrupt: Callable[[], None] | None = None
    ) -> None:
        """Choose the file. Nothing is read or written before the context is entered.

        Args:
            path: The file, preferably beside the file of the result.
            every: Seconds between two checkpoints. 0 saves after every batch.
            on_interrupt: Called when a first SIGINT waits for the current batch.

        Raises:
            SettingError: If ``every`` is not a finite number of at least 0.
        """
        if isinstance(every, bool) or not isinstance(every, int | float) or not (math.isfinite(every) and every >= 0):
            raise SettingError(f"every must be a finite number of seconds of at least 0, but is {every!r}.")
        self.path, self.every = Path(path), float(every)
        self._on_interrupt = on_interrupt
        self._context: ExitStack | None = None
        self._is_used = False

    def __enter__(self) -> Self:
        if self._context is not None:
            raise SettingError("A checkpoint cannot be entered twice at the same time.")
        with ExitStack() as stack:
            stack.enter_context(file_lock(self._rank_path))
            remove_scratch_files(self._rank_path)
            self._context, self._is_used = stack.pop_all(), False
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        assert self._context is not None
        with self._context:
            self._context = None
            if error is None:
                self._rank_path.unlink(missing_ok=True)
            if not self._rank_path.exists():
                remove_folder(files_folder(self._rank_path))
            elif error is not None and not isinstance(error, CheckpointError):
                error.add_note(
                    f"The work so far is saved in '{self.path}'. Repeat the same command or call to resume it."
                )

    @contextmanager
    def resume(self, key: Mapping[str, Any], stages: Sequence[str], size: int) -> Iterator[ResumableWork]:
        """Begin work that is saved in the file, or resume it if the file exists.

        Args:
            key: Everything that the result depends on besides the data, as plain JSON. Messages show its names.
            stages: Names of the stages in order.
            size: Approximate bytes of the largest state.

        Raises:
            SettingError: Outside the context, or for a second time inside it.
            CheckpointError: If the file is damaged, or belongs to other work or data.
            StorageError: If the disk has too little free space for the file.
        """
        if self._context is None:
            raise SettingError("Use the checkpoint in a with statement: with Checkpoint(path) as checkpoint: ...")
        if self._is_used:
            raise SettingError("A checkpoint serves one fit, score or audit. Create another one, with another file.")
        self._is_used = True
        path = self._rank_path
        complete_key = json.loads(json.dumps({**key, "stages": stages, "processes": process_info().world_size}))
        saved = read_checkpoint(path, complete_key)
        check_free_space(path, 2 * size - (path.stat().st_size if saved else 0))  # new and old file exist at once
        with defer_interrupts(self._on_interrupt) as interrupt:
            yield CheckpointedWork(path, self.every, complete_key, stages, saved, interrupt)

    def beside(self, name: str) -> Checkpoint:
        """Return a checkpoint of further work in a file beside this one."""
        return Checkpoint(self.path.with_name(f"{self.path.name}-{name}"), self.every, on_interrupt=self._on_interrupt)

    @property
    def _rank_path(self) -> Path:
        rank = process_info().rank
        return self.path.with_name(f"{self.path.name}-{rank}") if rank else self.path
