"""Moves of files between folders. Nothing is deleted or overwritten."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath

from ifcomp.errors import DataError, StorageError

#: Longest name of a folder in bytes.
_MAX_NAME_BYTES = 255


@dataclass(frozen=True)
class Move:
    """A file and its new path."""

    source: Path
    target: Path


class Destinations:
    """New paths of files. Every path is used once, and no file exists there."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def choose(self, target: Path, origin: str) -> Path:
        """Return ``target``, or another name in its folder that names the origin if ``target`` is taken."""
        number = 1
        path = target
        while os.path.lexists(path) or str(path).casefold() in self._taken:
            suffix = "" if number == 1 else f"_{number}"
            path = target.with_name(f"{target.stem}_from_{origin}{suffix}{target.suffix}")
            number += 1
        self._taken.add(str(path).casefold())
        return path


def check_plain_name(name: str) -> None:
    """Raise DataError if a name is not that of a folder inside another: a path, hidden, or with control characters."""
    is_plain = bool(name) and name == PureWindowsPath(name).name == Path(name).name
    if not is_plain or name.startswith(".") or not name.isprintable() or len(os.fsencode(name)) > _MAX_NAME_BYTES:
        raise DataError(f"The class '{name[:200]}' has no folder yet, and its name cannot be that of a folder.")


def check_inside(move: Move, folder: Path) -> None:
    """Raise DataError if a file is a link, or a link leads its new path out of the folder."""
    if move.source.is_symlink():
        raise DataError(f"'{move.source}' is a link, which may not work in another folder. Replace it by its file.")
    if not Path(os.path.realpath(move.target.parent)).is_relative_to(os.path.realpath(folder)):
        raise DataError(f"A link leads '{move.target}' out of '{folder}'. Remove the link.")


def carry_out(moves: Sequence[Move]) -> None:
    """Move all files. If one cannot be moved, those before it are moved back.

    Raises:
        StorageError: If a file cannot be moved.
    """
    done: list[Move] = []
    try:
        for move in moves:
            move.target.parent.mkdir(parents=True, exist_ok=True)
            _rename(move.source, move.target)
            done.append(move)
    except BaseException as error:
        lost = [str(earlier.target) for earlier in reversed(done) if not _is_undone(earlier)]
        if not isinstance(error, OSError):
            raise
        state = f"These files were moved: {', '.join(lost)}." if lost else "All files are where they were."
        failed = moves[len(done)]
        raise StorageError(
            f"Cannot move '{failed.source}' to '{failed.target}': {error.strerror or error}. {state}"
        ) from error


def _is_undone(move: Move) -> bool:
    """Move a file back, and return whether this succeeded."""
    try:
        _rename(move.target, move.source)
    except OSError:
        return False
    return True


def _rename(source: Path, target: Path) -> None:
    """Rename a file. Unlike ``os.rename``, this never overwrites a file."""
    try:
        os.link(source, target, follow_symlinks=False)
    except FileExistsError:
        raise
    except (OSError, NotImplementedError):  # the file system has no hard links
        if os.path.lexists(target):
            raise FileExistsError(f"'{target}' exists") from None
        os.rename(source, target)
    else:
        os.unlink(source)
