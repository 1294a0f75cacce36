"""Things named as ``package.module:factory``: imported, and called without arguments.

This runs code. It is only ever done for names that the user gave.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

from ifcomp.data.batches import as_batches, check_data
from ifcomp.data.source import Source, SourceOptions, preview_of
from ifcomp.errors import DataError, IfcompError, SettingError

if TYPE_CHECKING:
    from ifcomp.report import Preview


def is_factory(spec: str) -> bool:
    """Whether a name has the form ``package.module:factory``."""
    module, _, attribute = spec.partition(":")
    return all(part.isidentifier() for part in [*module.split("."), attribute])


def make(spec: str, what: str, error: type[IfcompError], keep: type | tuple[type, ...] = ()) -> Any:
    """Import ``package.module`` (the current folder counts) and call ``factory`` without arguments.

    Args:
        spec: ``package.module:factory``.
        what: What it is to make, for messages.
        error: What to raise if that fails.
        keep: Types of things that are no factories but already what is wanted.
    """
    if not is_factory(spec):
        raise SettingError(f"The {what} must be named as package.module:factory, but is '{spec}'.")
    module_name, _, attribute = spec.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module_name), attribute)
        return found if isinstance(found, keep) else found()
    except (Exception, SystemExit) as problem:
        raise error(_explain(spec, what, problem)) from problem


def factory(spec: str, options: SourceOptions) -> Source:
    """Batches that a function of the user returns.

    A torch ``Dataset`` is put into batches; anything else must be re-iterable batches already. Class names are its
    attribute ``classes``, and what reports show of the examples its attribute ``texts``, if it (or the dataset of a
    ``DataLoader``) has them.
    """
    made = make(spec, "data", DataError)
    names, texts = _strings(made, "classes"), _strings(made, "texts")
    if isinstance(made, Dataset) and not isinstance(made, IterableDataset):
        made = DataLoader(made, options.examples_at_once)
    check_data(made)
    if isinstance(made, Iterator):
        raise DataError(
            f"'{spec}' returns an iterator, which is exhausted after one pass. Return a DataLoader, a Dataset, a list "
            "of batches, or an object whose __iter__ starts anew."
        )
    if isinstance(made, DataLoader) and isinstance(made.sampler, RandomSampler):
        raise DataError(f"'{spec}' shuffles, so rows could not be told apart. Make its DataLoader with shuffle=False.")

    def previews(indices: Sequence[int]) -> list[Preview]:
        return _previews(made, indices) if texts is None else _quoted(spec, texts, indices)

    return Source(spec, made, previews, None, names)


def _strings(made: Any, name: str) -> tuple[str, ...] | None:
    """A list that data, or the dataset in a loader, has under a name."""
    found = getattr(made, name, None) or getattr(getattr(made, "dataset", None), name, None)
    return tuple(map(str, found)) if isinstance(found, list | tuple) else None


def _quoted(spec: str, texts: Sequence[str], indices: Sequence[int]) -> list[Preview]:
    """The texts of some examples."""
    from ifcomp.report import Preview  # slow to import, and only needed to show something

    if max(indices, default=-1) >= len(texts):
        raise DataError(f"'{spec}' has {len(texts):,} texts, but more examples: texts needs one for each.")
    return [Preview("text", texts[index], f"row {index}") for index in indices]


def _previews(data: Any, indices: Sequence[int]) -> list[Preview]:
    """One pass over the batches, up to the last example that is wanted."""
    wanted, found, first = set(indices), {}, 0
    for batch in as_batches(data):
        inside = sorted(index for index in wanted if first <= index < first + batch.size)
        for index in inside:
            parts = [value[index - first] for value in batch.tensors() if value.dim() > 1 and len(value) == batch.size]
            x = parts[0] if parts else torch.empty(0)
            found[index] = preview_of(index, x.detach().cpu().numpy())
        first += batch.size
        if len(found) == len(wanted):
            break
    return [found[index] for index in indices]


def _explain(spec: str, what: str, problem: BaseException) -> str:
    module_name, _, attribute = spec.partition(":")
    if isinstance(problem, ModuleNotFoundError) and problem.name and f"{module_name}.".startswith(f"{problem.name}."):
        return (
            f"There is no module '{problem.name}' for the {what} '{spec}', neither in the current folder nor installed."
        )
    frames = [frame for frame in traceback.extract_tb(problem.__traceback__) if frame.filename != __file__]
    frames = [frame for frame in frames if "importlib" not in frame.filename]
    if not frames and isinstance(problem, AttributeError):
        return f"Module '{module_name}' has no '{attribute}', but the {what} was named '{spec}'."
    if not frames and isinstance(problem, TypeError):
        return f"'{spec}' cannot be called without arguments to make the {what} ({problem})."
    where = f" in {os.path.basename(frames[-1].filename)}, line {frames[-1].lineno}" if frames else ""
    return f"'{spec}' failed to make the {what}: {type(problem).__name__}: {problem}{where}."
