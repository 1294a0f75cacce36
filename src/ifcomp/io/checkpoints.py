"""Work that may be killed at any moment, and then goes on from its last checkpoint to the same bits."""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ifcomp.data.batches import Batch
from ifcomp.distributed import broadcast, gather, ranks
from ifcomp.errors import CheckpointError, SettingError, StorageError
from ifcomp.io.files import check_room, locked, remove_leftovers, written_atomically
from ifcomp.io.untrusted import parse_json, read_tensors

SCHEMA = 2
_KEY = "ifcomp-checkpoint"

#: What is saved: tensors by name, as they are at that moment.
State = Callable[[], Mapping[str, Tensor]]


class Work:
    """Work in stages that is not saved; what is, does the same and more."""

    def enter(self, stage: str, own: State, common: Mapping[str, Tensor] | None = None) -> Mapping[str, Tensor]:
        """Begin a stage.

        Args:
            stage: Its name.
            own: Gives what this process has to keep, whenever it is asked.
            common: What all processes have alike, and does not change in this stage.

        Returns:
            What was saved in this stage or a later one; empty if nothing was.
        """
        return {}

    def is_done(self, stage: str) -> bool:
        """Whether a later stage was reached before."""
        return False

    def over(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The batches that the stage has not seen yet; asking for the next one says that the last is worked in."""
        yield from batches

    def tick(self) -> None:
        """Say that the state is whole at this moment, so that it can be saved."""


UNSAVED = Work()


class Checkpoint:
    """A file for unfinished work: written now and then, removed when all is well, kept when something went wrong.

    The same calls with the same data, in a new process, go on from it, and end with the same bits. The file is
    replaced as a whole, so that a kill at any moment costs the work since the last checkpoint and no more. Within the
    context the first SIGINT (Ctrl-C) waits for the batch at hand, saves, and then raises `KeyboardInterrupt`; a second
    one does not wait. Other processes cannot enter with the same path.

    One checkpoint is for one call of ``fit`` or ``score``, with data in the same order each time. Several processes
    have a file each; they enter it inside `ifcomp.distributed.sharing`.

    Example:
        >>> with Checkpoint("run.partial") as checkpoint:
        ...     ifc = IFComp(model).fit(loader, checkpoint=checkpoint)
        ...     ifc.save("run.ifcomp")
    """

    def __init__(
        self, path: str | os.PathLike[str], every: float = 60.0, *, notice: Callable[[], None] | None = None
    ) -> None:
        """Choose a file; nothing is read or written yet.

        Args:
            path: The file, best beside that of the result.
            every: Seconds between two checkpoints; 0 saves after every batch.
            notice: Called when a first SIGINT waits for the batch at hand.

        Raises:
            SettingError: If ``every`` is not a finite number of at least 0.
        """
        if isinstance(every, bool) or not isinstance(every, int | float) or not (math.isfinite(every) and every >= 0):
            raise SettingError(f"every must be a finite number of seconds of at least 0, but is {every!r}.")
        self.path, self.every, self._notice = Path(path), float(every), notice
        self._inside: ExitStack | None = None
        self._used = False

    def __enter__(self) -> Self:
        if self._inside is not None:
            raise SettingError("A checkpoint cannot be entered twice at the same time.")
        with ExitStack() as stack:
            stack.enter_context(locked(self._own_path))
            remove_leftovers(self._own_path)
            self._inside, self._used = stack.pop_all(), False
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        assert self._inside is not None
        with self._inside:
            self._inside = None
            if error is None:
                self._own_path.unlink(missing_ok=True)
            elif self._own_path.exists() and not isinstance(error, CheckpointError):
                error.add_note(f"What is done so far is in '{self.path}'. Do the same again to go on from there.")

    @contextmanager
    def work(self, key: Mapping[str, Any], stages: Sequence[str], size: int) -> Iterator[Work]:
        """Work that is saved in the file, and goes on from it if it is there.

        Args:
            key: What the result depends on, besides the data, by names for people; plain JSON.
            stages: Names of the stages in order.
            size: Bytes of the largest state, about.

        Raises:
            SettingError: Outside the context, or for a second time within it.
            CheckpointError: If the file is damaged, or that of other work or data.
            StorageError: If there is no room for the file.
        """
        if self._inside is None:
            raise SettingError("Use the checkpoint in a with statement: with Checkpoint(path) as checkpoint: ...")
        if self._used:
            raise SettingError("One checkpoint is for one fit or score. Make another, with another file, for the next.")
        self._used = True
        path = self._own_path
        complete = json.loads(json.dumps({**key, "stages": stages, "processes": ranks().world}))
        found = _read(path, complete)
        check_room(path, 2 * size - (path.stat().st_size if found else 0))  # a new one is written beside the old
        work = _SavedWork(path, self.every, complete, stages, found)
        with _interrupts(work, self._notice):
            yield work

    @property
    def _own_path(self) -> Path:
        rank = ranks().rank
        return self.path.with_name(f"{self.path.name}-{rank}") if rank else self.path


def restore(tensors: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Give tensors the values that were saved under their names; those without one stay as they are."""
    for name in tensors.keys() & saved.keys():
        tensors[name].copy_(same_shape(name, saved[name], tensors[name]))


def same_shape(name: str, saved: Tensor, needed: Tensor) -> Tensor:
    """What was saved, or CheckpointError if its shape or type is not what is needed."""
    if (saved.shape, saved.dtype) != (needed.shape, needed.dtype):
        raise CheckpointError(f"The checkpoint is damaged: '{name}' has another shape. Delete it to start anew.")
    return saved


def digest(tensors: Iterable[Tensor], start: str = "") -> str:
    """A digest of the types, shapes and bytes of tensors, and of what came before."""
    found = hashlib.sha256(start.encode())
    for value in tensors:
        value = value.detach().cpu().contiguous()
        found.update(f"{value.dtype} {list(value.shape)} ".encode())
        found.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


@dataclass(frozen=True, eq=False)
class _Found:
    """What is in a file: the stage, how many examples it has seen, their digest, and tensors."""

    stage: str
    position: int = 0
    digest: str = ""
    common: Mapping[str, Tensor] = field(default_factory=dict)
    own: Mapping[str, Tensor] = field(default_factory=dict)


class _SavedWork(Work):
    """Work that is saved in a file; ``found`` is what it goes on from."""

    def __init__(
        self, path: Path, every: float, key: Mapping[str, Any], stages: Sequence[str], found: _Found | None
    ) -> None:
        self._path, self._every, self._key, self._stages = path, every, key, list(stages)
        self._found = _agreed(found, self._stages)
        self._now = _Found("")  # without tensors: those are asked for
        self._own: State = dict
        self._common: Mapping[str, Tensor] = {}
        self._last = time.monotonic()
        self.interrupted = False

    def enter(self, stage: str, own: State, common: Mapping[str, Tensor] | None = None) -> Mapping[str, Tensor]:
        self._own, self._common, self._now = own, common or {}, _Found(stage)
        found = self._found
        if found is None or self._stages.index(found.stage) < self._stages.index(stage):
            return {}
        if found.stage == stage:
            self._now, self._found = _Found(stage, found.position, found.digest), None
        return {**found.common, **found.own}

    def is_done(self, stage: str) -> bool:
        found = self._found
        return found is not None and self._stages.index(found.stage) > self._stages.index(stage)

    def over(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        skipped, seen, found = self._now, 0, ""
        for batch in batches:
            found = digest(_contents(batch), found)
            before, seen = seen, batch.start + batch.size
            if seen == skipped.position:
                self._check(found == skipped.digest)
            if seen <= skipped.position:
                continue
            self._check(before >= skipped.position)
            yield batch
            self._now = _Found(skipped.stage, seen, found)
            self.tick()
        self._check(seen >= skipped.position)

    def tick(self) -> None:
        if self.interrupted or time.monotonic() - self._last >= self._every:
            self._save()
        if self.interrupted:
            raise KeyboardInterrupt

    def _check(self, same: bool) -> None:
        if not same:
            raise CheckpointError(
                f"The data is not what it was when '{self._path}' was written: other examples, another order or other "
                "batches. Give the same data, without shuffling or random augmentation and with the same batch size, "
                "or delete the file to start anew."
            )

    def _save(self) -> None:
        parts = {"common": self._common, "own": self._own()}
        tensors = {
            f"{part}/{name}": value.detach().cpu().contiguous()
            for part, values in parts.items()
            for name, value in values.items()
        }
        now = {"stage": self._now.stage, "position": self._now.position, "digest": self._now.digest}
        metadata = json.dumps({"schema": SCHEMA, "key": self._key, **now})
        try:
            with written_atomically(self._path, by_all=True) as scratch:
                try:
                    save_file(tensors, scratch, metadata={_KEY: metadata})
                except SafetensorError as error:
                    raise OSError(str(error)) from error
        except StorageError as error:
            raise CheckpointError(f"{error} Make room, then do the same again to go on.") from error
        self._last = time.monotonic()


def _contents(batch: Batch) -> Iterator[Tensor]:
    yield from batch.tensors()
    if batch.labels is not None:
        yield batch.labels


def _agreed(found: _Found | None, stages: Sequence[str]) -> _Found | None:
    """All processes go on in the same stage.

    That one of them has reached a stage shows that all have ended the one before. So those whose file is of an earlier
    one, or missing, take from it what all have in common, and begin the stage anew.
    """
    reached = gather(-1 if found is None else stages.index(found.stage))
    latest = max(reached)
    if min(reached) == latest:
        return found
    source = reached.index(latest)
    common = broadcast(found.common if found is not None and ranks().rank == source else None, source)
    return found if reached[ranks().rank] == latest else _Found(stages[latest], common=common or {})


def _read(path: Path, key: Mapping[str, Any]) -> _Found | None:
    """The content of a file if there is one.

    Raises:
        CheckpointError: If it is damaged or that of other work; says what differs.
    """
    if not os.path.lexists(path):
        return None
    try:
        mapped, metadata = read_tensors(path)
        tensors = {name: value.clone() for name, value in mapped.items()}
        content = parse_json(metadata[_KEY])
        if content["schema"] != SCHEMA or content["stage"] not in content["key"]["stages"]:
            raise ValueError("another version of ifcomp wrote it")
        stored, now = content["key"], (content["stage"], content["position"], content["digest"])
        if not (isinstance(now[1], int) and 0 <= now[1] < 2**63 and isinstance(now[2], str)):
            raise TypeError("an entry has the wrong type")
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"Cannot go on from '{path}': it is damaged, or not a checkpoint ({error!r}). Delete it to start anew."
        ) from error
    different = [name for name in {**stored, **key} if stored.get(name) != key.get(name)]
    if different:
        lines = [f"  {name}: {stored.get(name)} there, {key.get(name)} here" for name in different]
        raise CheckpointError(
            f"'{path}' is what is left of other work that did not end:\n" + "\n".join(lines) + "\nDo what you did then "
            "to go on from it, delete it to start anew, or write to another file."
        )
    return _Found(*now, _part(tensors, "common/"), _part(tensors, "own/"))


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


@contextmanager
def _interrupts(work: _SavedWork, notice: Callable[[], None] | None) -> Iterator[None]:
    """Within, a first SIGINT waits until the state is whole and saved; a second one does not wait."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # somebody else decides what SIGINT means
        return
    process = os.getpid()

    def wait(*_: object) -> None:
        if work.interrupted:
            raise KeyboardInterrupt
        work.interrupted = True
        if notice is not None and os.getpid() == process:  # workers of loaders inherit the handler
            notice()

    before = signal.signal(signal.SIGINT, wait)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if work.interrupted:
        raise KeyboardInterrupt
