"""Corrections of ``folder:DIR``: moves of images between class folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from ifcomp.data.corrections.base import Corrections, LabelledFile
from ifcomp.data.corrections.moves import Destinations, Move, check_inside, check_plain_name
from ifcomp.data.sources.base import SourceRequest
from ifcomp.data.sources.folder import check_folder, class_labels, find_images
from ifcomp.data.sources.previews import printable
from ifcomp.errors import DataError, StorageError
from ifcomp.tables import write_csv


def open_folder_labels(request: SourceRequest) -> LabelledFile:
    """Open the labels of a folder of images.

    Its corrections are written as a list of moves, a CSV file with the columns ``from`` and ``to``.
    """
    root = check_folder(request.path)
    files = find_images(root)
    names = [printable(file) for file in files]
    labels, class_names = class_labels(request.path, names, request.class_names)

    def write(corrections: Corrections, out: str) -> list[Move]:
        moves = plan_moves(request.path, files, class_names or (), corrections)
        paths = [(printable(str(move.source)), printable(str(move.target))) for move in moves]
        write_csv(out, pd.DataFrame(paths, columns=["from", "to"], dtype=object))
        return moves

    return LabelledFile(
        request.path, len(files), None if labels is None else labels.numpy(), class_names, tuple(names), write
    )


def dropped_folder(path: str) -> Path:
    """Return the folder of dropped images. It is outside of the folder of the data, so it is not one of its classes."""
    root = Path(path)
    root = root if root.name not in ("", "..") else root.resolve()
    if not root.name:
        raise DataError(f"'{path}' is the root of a file system, so there is no folder beside it for dropped images.")
    return root.with_name(f"{root.name}_dropped")


def plan_moves(path: str, files: Sequence[str], class_names: Sequence[str], corrections: Corrections) -> list[Move]:
    """Return the moves that carry out the corrections. Nothing is moved.

    An image keeps its path below its class folder. Dropped images move to the folder ``DIR_dropped``.

    Raises:
        DataError: If an image is a link, or the name of a class cannot be that of a folder.
        StorageError: If the folder of dropped images is on another disk.
    """
    root, dropped = Path(path), dropped_folder(path)
    folders = {printable(file.split("/")[0]): file.split("/")[0] for file in files if "/" in file}
    for label in sorted(set(corrections.labels.values())):
        if class_names[label] not in folders:
            check_plain_name(class_names[label])
    if corrections.dropped and dropped.is_symlink():
        raise DataError(f"'{dropped}', the folder of dropped images, is a link. Remove it.")
    if corrections.dropped and dropped.parent.stat().st_dev != root.stat().st_dev:
        raise StorageError(f"'{dropped}' and '{path}' are on different disks, so files cannot be moved there.")
    destinations, moves = Destinations(), []
    for index in sorted({*corrections.labels, *corrections.dropped}):
        folder, _, below = files[index].partition("/")
        parent, target = dropped, dropped / files[index]
        if index in corrections.labels:
            name = class_names[corrections.labels[index]]
            parent, target = root, root / folders.get(name, name) / below
        move = Move(root / files[index], destinations.choose(target, folder if below else "data"))
        check_inside(move, parent)
        moves.append(move)
    return moves
