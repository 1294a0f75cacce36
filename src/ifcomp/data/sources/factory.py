"""``package.module:factory``: data that a function of the user returns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ifcomp.data.batches import as_batches
from ifcomp.data.checks import check_data
from ifcomp.data.factories import call_factory
from ifcomp.data.loaders import is_shuffled
from ifcomp.data.sources.base import Source, SourceRequest
from ifcomp.data.sources.previews import preview_input
from ifcomp.errors import DataError

if TYPE_CHECKING:
    from ifcomp.report import Preview


def open_factory(request: SourceRequest) -> Source:
    """Call a function of the user and open the data that it returns.

    The function returns a torch ``Dataset``, which is put into batches, or re-iterable batches. Class names are taken
    from the attribute ``classes``, previews from the attribute ``texts``, of the data or of the dataset of a
    ``DataLoader``, if present.

    Raises:
        DataError: If the function fails, or returns an iterator, shuffled data or no batches.
    """
    spec = request.spec
    data = call_factory(spec, "data", DataError, folder=request.folder)
    class_names, texts = _string_attribute(data, "classes"), _string_attribute(data, "texts")
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        data = DataLoader(data, request.options.batch_size_or_default)
    check_data(data)
    if isinstance(data, Iterator):
        raise DataError(
            f"'{spec}' returns an iterator, which is exhausted after one pass. Return a DataLoader, a Dataset, a list "
            "of batches, or an object whose __iter__ starts again."
        )
    if is_shuffled(data):
        raise DataError(
            f"'{spec}' shuffles, so rows cannot be assigned to examples. Create its DataLoader with shuffle=False."
        )

    def previews(indices: Sequence[int]) -> list[Preview]:
        return _input_previews(data, indices) if texts is None else _text_previews(spec, texts, indices)

    return Source(spec, data, previews, None, class_names, texts=texts)


def _string_attribute(data: Any, name: str) -> tuple[str, ...] | None:
    """Return a list of strings that is an attribute of the data, or of the dataset of a DataLoader."""
    value = getattr(data, name, None) or getattr(getattr(data, "dataset", None), name, None)
    return tuple(map(str, value)) if isinstance(value, list | tuple) else None


def _text_previews(spec: str, texts: Sequence[str], indices: Sequence[int]) -> list[Preview]:
    from ifcomp.report import Preview  # slow to import, and needed for reports only

    if max(indices, default=-1) >= len(texts):
        raise DataError(f"'{spec}' has {len(texts):,} texts, but more examples. texts needs one entry per example.")
    return [Preview("text", texts[index], f"row {index}") for index in indices]


def _input_previews(data: Any, indices: Sequence[int]) -> list[Preview]:
    """Make one pass over the batches, up to the last requested example."""
    wanted, previews = set(indices), {}
    for batch in as_batches(data):
        inputs = [value for value in batch.tensors() if value.dim() > 1 and len(value) == batch.size]
        for index in wanted.intersection(range(batch.position, batch.position + batch.size)):
            x = inputs[0][index - batch.position] if inputs else torch.empty(0)
            previews[index] = preview_input(index, x.detach().cpu().numpy())
        if len(previews) == len(wanted):
            break
    return [previews[index] for index in indices]
