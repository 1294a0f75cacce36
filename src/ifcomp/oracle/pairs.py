"""Pairs of an example and a label: trained one after another, and kept in a file that a stopped run goes on from."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ifcomp.data.batches import Batch
from ifcomp.errors import StorageError
from ifcomp.io.files import atomic_write
from ifcomp.io.untrusted import parse_json, read_text
from ifcomp.oracle.network import digest, inputs_of
from ifcomp.progress import track


@dataclass(frozen=True)
class Pair:
    """One example with one label; the fields are those of `Hindsight`."""

    log_probability: float
    log_base: float
    iterations: int
    converged: bool
    criterion: float
    gradient: float


class PairFile:
    """Pairs on disk, one JSON object a line, each with the key of what it was trained from.

    The file is written anew after each pair and is whole at any time. Pairs with other keys stay in it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Read the file if it is there, and make sure that it can be written.

        Raises:
            StorageError: If the file is not of this kind, or its folder cannot be written.
        """
        self._path = Path(path)
        self._pairs: dict[tuple[str, int], Pair] = {}
        for number, line in enumerate(_lines(self._path), 1):
            try:
                key, label, pair = _parsed(line)
                self._pairs[key, label] = pair
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise StorageError(
                    f"Line {number} of '{path}' is not a result of hindsight training ({error!r}). Give another file, "
                    "or remove the line."
                ) from error
        self._write()

    def get(self, key: str, label: int) -> Pair | None:
        """The stored pair, if there is one."""
        return self._pairs.get((key, label))

    def add(self, key: str, label: int, pair: Pair) -> None:
        """Store a pair on disk."""
        self._pairs[key, label] = pair
        self._write()

    def _write(self) -> None:
        lines = [json.dumps({"key": key, "label": label, **asdict(pair)}) for (key, label), pair in self._pairs.items()]
        with atomic_write(self._path) as scratch:
            scratch.write_text("".join(f"{line}\n" for line in lines))


def _lines(path: Path) -> list[str]:
    try:
        return read_text(path).splitlines()
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise StorageError(f"Cannot read results of hindsight training from '{path}' ({error}).") from error


def _parsed(line: str) -> tuple[str, int, Pair]:
    """The key, label and pair of a line; numbers that are null are NaN."""
    content: Any = parse_json(line)
    content |= {name: math.nan for name, value in content.items() if value is None}
    key, label, pair = content.pop("key"), content.pop("label"), Pair(**content)
    kinds: list[tuple[Any, Any]] = [(key, str), (label, int), (pair.iterations, int), (pair.converged, bool)]
    kinds += [(getattr(pair, name), int | float) for name in ("log_probability", "log_base", "criterion", "gradient")]
    wrong = [value for value, kind in kinds if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool)]
    if wrong or max(map(abs, (label, pair.iterations))) >= 2**63:
        raise TypeError("an entry has the wrong type")
    return key, label, pair


def train_pairs(
    examples: Iterable[Batch],
    labels: list[int],
    train: Callable[[Batch, int], Pair],
    *,
    run: str,
    most: int,
    store: PairFile | None,
    progress: bool | None,
) -> list[dict[int, Pair]]:
    """Train every example with every label; for each example its pairs by label.

    Args:
        examples: Batches of one.
        labels: Of all examples.
        train: From an example and a label to what training finds.
        run: Digest of everything else that the result depends on.
        most: Steps that are allowed. A stored pair that neither converged nor used as many is trained again.
        store: Where pairs are kept; None keeps nothing.
        progress: Show a progress bar; None shows it on terminals.
    """
    examples = list(examples)
    rows: list[dict[int, Pair]] = [{} for _ in examples]
    pairs = [(number, label) for number in range(len(examples)) for label in labels]
    for number, label in track(pairs, "hindsight models", progress):
        key = digest(run, *inputs_of(examples[number]))
        pair = store.get(key, label) if store else None
        if pair is None or not (pair.converged or pair.iterations >= most):
            pair = train(examples[number], label)
            if store:
                store.add(key, label, pair)
        rows[number][label] = pair
    return rows
