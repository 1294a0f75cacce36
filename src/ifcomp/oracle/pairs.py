"""Training of all pairs of an example and a label, and the file from which an interrupted run resumes."""

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
    """Result for one example and one label; the fields are those of `Hindsight`."""

    log_probability: float
    log_base: float
    iterations: int
    converged: bool
    criterion: float
    gradient: float


class PairFile:
    """JSON Lines file of pairs. The key of a pair is a digest of the model, data, settings and example.

    The file is rewritten atomically after each pair. Pairs with other keys are preserved.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Read the file if it exists, and check that it can be written.

        Raises:
            StorageError: If the file has another format, or its folder is not writable.
        """
        self._path = Path(path)
        self._pairs: dict[tuple[str, int], Pair] = {}
        for index, line in enumerate(_lines(self._path), 1):
            try:
                key, label, pair = _parse(line)
                self._pairs[key, label] = pair
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise StorageError(
                    f"Line {index} of '{path}' is not a result of hindsight training ({error!r}). Give another file, "
                    "or remove the line."
                ) from error
        self._write()

    def get(self, key: str, label: int) -> Pair | None:
        """Return the stored pair, or None."""
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


def _parse(line: str) -> tuple[str, int, Pair]:
    """Return key, label and pair of a line; null stands for NaN."""
    content: Any = parse_json(line)
    content |= {name: math.nan for name, value in content.items() if value is None}
    key, label, pair = content.pop("key"), content.pop("label"), Pair(**content)
    types: list[tuple[Any, Any]] = [(key, str), (label, int), (pair.iterations, int), (pair.converged, bool)]
    types += [(getattr(pair, name), int | float) for name in ("log_probability", "log_base", "criterion", "gradient")]
    wrong = [
        value for value, type_ in types if not isinstance(value, type_) or isinstance(value, bool) != (type_ is bool)
    ]
    if wrong or max(map(abs, (label, pair.iterations))) >= 2**63:
        raise TypeError("an entry has the wrong type")
    return key, label, pair


def train_pairs(
    examples: Iterable[Batch],
    labels: list[int],
    train: Callable[[Batch, int], Pair],
    *,
    run: str,
    max_iterations: int,
    store: PairFile | None,
    progress: bool | None,
) -> list[dict[int, Pair]]:
    """Train every example with every label.

    Args:
        examples: Batches of one example.
        labels: Labels to train with, the same for all examples.
        train: Function that trains one example with one label.
        run: Digest of everything else that the result depends on.
        max_iterations: Limit of steps. A stored pair that has not converged within fewer steps is trained again.
        store: File of finished pairs; None stores nothing.
        progress: Show a progress bar; None shows it on terminals.

    Returns:
        For each example its pairs by label.
    """
    examples = list(examples)
    rows: list[dict[int, Pair]] = [{} for _ in examples]
    pairs = [(index, label) for index in range(len(examples)) for label in labels]
    for index, label in track(pairs, "hindsight models", progress):
        key = digest(run, *inputs_of(examples[index]))
        pair = store.get(key, label) if store else None
        if pair is None or not (pair.converged or pair.iterations >= max_iterations):
            pair = train(examples[index], label)
            if store:
                store.add(key, label, pair)
        rows[index][label] = pair
    return rows
