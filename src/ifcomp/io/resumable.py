"""Work in stages that can be saved and resumed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ifcomp.data.batches import Batch
from ifcomp.data.digests import DataDigest
from ifcomp.distributed import all_gather_objects, broadcast_object, process_info
from ifcomp.errors import CheckpointError
from ifcomp.io.checkpoint_files import SavedState, write_checkpoint
from ifcomp.io.interrupts import PendingInterrupt

#: Names of digests: of the first batch, of the examples that the stage has processed, and of all data.
FIRST, PROCESSED, ALL = "first batch", "processed", "all"

#: Returns the current tensors of a stage by name.
StateFunction = Callable[[], Mapping[str, Tensor]]


class ResumableWork:
    """Work in stages, without a checkpoint: nothing is saved or restored. `CheckpointedWork` overrides all methods."""

    @property
    def settings(self) -> dict[str, Any]:
        """Choices that a resumed run must repeat, such as microbatch sizes, as plain JSON.

        Every checkpoint contains the dictionary. It is empty at the start of new work and restored on resume. Without a
        checkpoint, each access returns a new, empty dictionary.
        """
        return {}

    @property
    def folder(self) -> Path | None:
        """Folder of large files that are kept with the checkpoint; None without a checkpoint."""
        return None

    def begin_stage(
        self, stage: str, local: StateFunction, shared: Mapping[str, Tensor] | None = None
    ) -> Mapping[str, Tensor]:
        """Begin a stage.

        Args:
            stage: Name of the stage.
            local: Returns the tensors of this process. Called for every checkpoint.
            shared: Tensors that are equal on all processes and constant during the stage.

        Returns:
            Shared and local tensors of the checkpoint if it is of this stage or a later one, else an empty mapping.
        """
        return {}

    def is_complete(self, stage: str) -> bool:
        """Whether the checkpoint is of a later stage."""
        return False

    def remaining_batches(
        self, batches: Iterable[Batch], digest: DataDigest | None = None, data_set: str = ""
    ) -> Iterator[Batch]:
        """Iterate over the batches that the stage has not processed yet.

        A batch counts as processed when the next one is requested.

        Args:
            batches: All batches of the stage.
            digest: Receives all of them, also those that were processed before.
            data_set: Name of the data. Stages that read data of the same name must read the same data.
        """
        for batch in batches:
            if digest is not None:
                digest.add(batch)
            yield batch

    def check_batches(self, batches: Iterable[Batch], data_set: str = "") -> None:
        """Raise CheckpointError if an earlier run read other data of this name. Without a checkpoint nothing is read.

        Args:
            batches: All batches.
            data_set: Name of the data.
        """

    def save_if_due(self) -> None:
        """Save a checkpoint if it is due. The state of the stage must be consistent."""


NO_CHECKPOINT = ResumableWork()


def files_folder(path: Path) -> Path:
    """The folder of large files that are kept with a checkpoint."""
    return path.with_name(f"{path.name}.files")


class CheckpointedWork(ResumableWork):
    """Work that is saved to a file.

    Args:
        path: The file.
        every: Seconds between two checkpoints.
        key: Everything that the result depends on besides the data, as plain JSON.
        stages: Names of the stages in order.
        saved: The state to resume from, or None for new work.
        interrupt: Checked at every opportunity to save.
    """

    def __init__(
        self,
        path: Path,
        every: float,
        key: Mapping[str, Any],
        stages: Sequence[str],
        saved: SavedState | None,
        interrupt: PendingInterrupt,
    ) -> None:
        self._path, self._every, self._key, self._stages = path, every, key, list(stages)
        self._saved = _synchronize(saved, self._stages)
        self._settings = dict(self._saved.settings) if self._saved else {}
        self._digests = dict(self._saved.digests) if self._saved else {}
        self._progress = SavedState("")  # stage, position and digests only
        self._local: StateFunction = dict
        self._shared: Mapping[str, Tensor] = {}
        self._interrupt = interrupt
        self._last_save = time.monotonic()

    @property
    def settings(self) -> dict[str, Any]:
        return self._settings

    @property
    def folder(self) -> Path:
        return files_folder(self._path)

    def begin_stage(
        self, stage: str, local: StateFunction, shared: Mapping[str, Tensor] | None = None
    ) -> Mapping[str, Tensor]:
        self._local, self._shared = local, shared or {}
        self._progress = SavedState(stage, digests=self._digests)
        saved = self._saved
        if saved is None or self._stages.index(saved.stage) < self._stages.index(stage):
            return {}
        if saved.stage == stage:
            self._progress, self._saved = SavedState(stage, saved.position, saved.digests), None
        return {**saved.shared, **saved.local}

    def is_complete(self, stage: str) -> bool:
        saved = self._saved
        return saved is not None and self._stages.index(saved.stage) > self._stages.index(stage)

    def remaining_batches(
        self, batches: Iterable[Batch], digest: DataDigest | None = None, data_set: str = ""
    ) -> Iterator[Batch]:
        resumed, end, data = self._progress, 0, digest or DataDigest()
        for batch in batches:
            data.add(batch)
            start, end = end, batch.start + batch.size
            if not start:
                self._check_digest(f"{data_set}{FIRST}", data)
            if end == resumed.position:
                self._check_data(data.in_batches == resumed.digests.get(PROCESSED))
            if end <= resumed.position:
                continue
            self._check_data(start >= resumed.position)
            yield batch
            self._progress = SavedState(resumed.stage, end, {**self._digests, PROCESSED: data.in_batches})
            self.save_if_due()
        self._check_data(end >= resumed.position)
        self._check_digest(f"{data_set}{ALL}", data)

    def check_batches(self, batches: Iterable[Batch], data_set: str = "") -> None:
        self._check_digest(f"{data_set}{ALL}", DataDigest.of(batches))

    def save_if_due(self) -> None:
        if self._interrupt.requested or time.monotonic() - self._last_save >= self._every:
            self._save()
        if self._interrupt.requested:
            raise KeyboardInterrupt

    def _check_digest(self, name: str, data: DataDigest) -> None:
        """Check that data has the digest of earlier stages. The first stage sets it."""
        self._check_data(self._digests.setdefault(name, data.in_batches) == data.in_batches)

    def _check_data(self, is_same: bool) -> None:
        if not is_same:
            raise CheckpointError(
                f"The data differs from the data of the checkpoint '{self._path}': other examples, another order or "
                "other batches. Give the same data, without shuffling or random augmentation and with the same batch "
                "size, or delete the file to start again."
            )

    def _save(self) -> None:
        state = replace(self._progress, settings=self._settings, shared=self._shared, local=self._local())
        write_checkpoint(self._path, self._key, state)
        self._last_save = time.monotonic()


def restore_tensors(tensors: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Copy saved values into the tensors of the same names, in place. Other tensors are unchanged."""
    for name in tensors.keys() & saved.keys():
        tensors[name].copy_(check_saved_tensor(name, saved[name], tensors[name]))


def check_saved_tensor(name: str, saved: Tensor, expected: Tensor) -> Tensor:
    """Return a saved tensor, or raise CheckpointError if its shape or dtype differs from the expected one."""
    if (saved.shape, saved.dtype) != (expected.shape, expected.dtype):
        raise CheckpointError(
            f"The checkpoint is damaged: '{name}' has another shape or dtype. Delete it to start again."
        )
    return saved


def _synchronize(saved: SavedState | None, stages: Sequence[str]) -> SavedState | None:
    """Make all processes resume in the same stage.

    If one process has reached a stage, all have completed the stage before. A process whose checkpoint is older or
    missing receives the shared tensors and begins the latest stage from its first batch. It keeps its own settings:
    they are those with which it began the stage before.
    """
    reached = all_gather_objects(-1 if saved is None else stages.index(saved.stage))
    latest = max(reached)
    if min(reached) == latest:
        return saved
    source, rank = reached.index(latest), process_info().rank
    shared, digests = broadcast_object((saved.shared, saved.digests) if saved and rank == source else None, source)
    if reached[rank] == latest:
        return saved
    kept = {} if saved is None else saved.settings
    return SavedState(stages[latest], digests=digests, settings=kept, shared=shared)
