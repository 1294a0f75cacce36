"""``ifcomp apply``: carry out decisions about labels."""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from ifcomp.cli import options
from ifcomp.cli.output import Outcome, check_target, paragraph
from ifcomp.errors import SettingError

if TYPE_CHECKING:
    from ifcomp.data.corrections import CorrectionKind, Corrections

EPILOG = "[bold]Example:[/bold] ifcomp apply decisions.csv --data npz:train.npz --out clean.npz"


def apply(
    decisions: Annotated[
        str,
        typer.Argument(
            metavar="DECISIONS",
            help="CSV file with the columns index, decision (keep, relabel or drop) and label. A column given is "
            "compared with the present labels.",
        ),
    ],
    data: Annotated[
        str,
        typer.Option(metavar="DATA", help="Data to correct: npz:FILE, parquet:FILE, csv:FILE or folder:DIR."),
    ],
    out: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Corrected data, in the format of the data; for a folder the list of moves, .csv."
        ),
    ] = None,
    in_place: Annotated[
        bool, typer.Option("--in-place", help="Replace the data file instead of writing FILE.")
    ] = False,
    move: Annotated[
        bool,
        typer.Option(
            "--move",
            help="Move the images of a folder after the list is written. Dropped images move to DIR_dropped. "
            "Nothing is deleted.",
        ),
    ] = False,
    label_column: options.LabelColumn = None,
    class_names: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,C",
            help="Names of the classes 0, 1, 2, ..., if the data does not contain all of them.",
        ),
    ] = None,
    by_name: Annotated[
        bool | None,
        typer.Option(
            "--by-name/--by-index",
            help="Whether a label that is both the name of a class and the index of another is the name.",
            show_default="such labels are refused",
        ),
    ] = None,
) -> Outcome:
    """Carry out decisions about labels: change labels and drop examples.

    A label is a class index or a class name, and is needed for relabel only. Examples without a decision are kept.
    Everything is checked before a file is written. The data itself is changed with --in-place or --move only.
    """
    from ifcomp.data.corrections import carry_out, correction_kind, open_labels, read_decisions, resolve_decisions
    from ifcomp.data.sources import complete_name
    from ifcomp.distributed import process_info

    if process_info().world_size > 1:
        raise SettingError("ifcomp apply changes files, so it runs in one process. Call it without torchrun.")
    data = complete_name(data)
    kind = correction_kind(data)
    target = _choose_target(kind, data, decisions, out, in_place, move)
    rows = read_decisions(decisions)
    opened = open_labels(data, label_column=label_column, class_names=options.parse_names(class_names))
    corrections = resolve_decisions(rows, opened, decisions, by_name=by_name)
    mode = os.stat(target).st_mode if in_place else None
    moves = opened.write(corrections, target)
    if mode is not None:
        os.chmod(target, mode)  # the permissions of the replaced file
    if move:
        carry_out(moves)
    is_done = move or not kind.is_folder
    corrected = data if kind.is_folder or in_place else f"{data.partition(':')[0]}:{target}"
    facts = {
        "decisions": decisions,
        "data": data,
        "examples": opened.count,
        "changed": len(corrections.labels),
        "dropped": len(corrections.dropped),
        "kept": corrections.kept,
        "unchanged": corrections.unchanged,
        "remaining": opened.count - len(corrections.dropped),
        "in_place": in_place or move,
        "moved": len(moves) if move else 0,
    }
    return Outcome(
        facts,
        [paragraph(_summary(corrections, opened.count, data, is_done))],
        {target: _description(kind, opened.count - len(corrections.dropped), len(moves), move)},
        _next_steps(corrected, decisions, target, is_done, label_column),
    )


def _choose_target(kind: CorrectionKind, data: str, decisions: str, out: str | None, in_place: bool, move: bool) -> str:
    """Return the file to write, after a check that no input is overwritten by accident."""
    path = os.path.expanduser(data.partition(":")[2])
    if kind.is_folder and in_place:
        raise SettingError("--in-place applies to files. Move the images of a folder with --move.")
    if move and not kind.is_folder:
        raise SettingError(f"--move applies to folder:DIR. Replace the file of '{data}' with --in-place.")
    if in_place and out is not None:
        raise SettingError("Give --out FILE or --in-place, not both.")
    if not in_place and out is None:
        raise SettingError(f"Name the file to write with --out FILE{'' if kind.is_folder else ', or add --in-place'}.")
    target = out or (os.path.realpath(path) if os.path.islink(path) else path)
    check_target(target, (kind.suffix,) if out is not None else ())
    if _is_same_file(target, decisions):
        raise SettingError(f"'{target}' is the file of the decisions, which would be lost. Choose another file.")
    if out is not None and _is_same_file(target, path):
        raise SettingError(f"'{out}' is the data itself. Choose another file, or replace the data with --in-place.")
    return target


def _is_same_file(first: str, second: str) -> bool:
    try:
        return os.path.samefile(first, second)
    except (OSError, ValueError):
        return False


def _summary(corrections: Corrections, count: int, data: str, is_done: bool) -> str:
    changed, dropped = len(corrections.labels), len(corrections.dropped)
    parts = [
        f"{changed:,} label{'' if changed == 1 else 's'} changed",
        f"{dropped:,} example{'' if dropped == 1 else 's'} dropped",
        f"{corrections.kept:,} kept",
    ]
    if corrections.unchanged:
        parts.append(f"{corrections.unchanged:,} already with the new label")
    text = f"{', '.join(parts)}. {count - dropped:,} of {count:,} examples of {data} are left."
    return text if is_done else f"{text} Nothing has been moved yet."


def _description(kind: CorrectionKind, remaining: int, moves: int, is_moved: bool) -> str:
    if not kind.is_folder:
        return f"the corrected data, {remaining:,} examples"
    return f"the list of {moves:,} moves, {'carried out' if is_moved else 'not carried out'}"


def _next_steps(corrected: str, decisions: str, target: str, is_done: bool, label_column: str | None) -> dict[str, str]:
    if is_done:
        command = options.command_line("audit", model="MODEL", data=corrected, label_column=label_column)
        return {command: "audit it again, after training on it"}
    command = shlex.join(["ifcomp", "apply", decisions, "--data", corrected, "--out", target, "--move"])
    return {command: "move the images"}
