"""DataLoader and Dataset of PyTorch, with the names that a data set knows (``classes``, ``samples``, ``texts``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, Subset

from ifcomp.data.forms.base import Data, DataRequest, kept_random_state
from ifcomp.data.forms.rows import SelectedRows, batch_rows, select_entries
from ifcomp.errors import DataError


def from_loader(data: Any, request: DataRequest) -> Data | None:
    """Take a DataLoader as it is. Examples have names if they are read in order."""
    if not isinstance(data, DataLoader):
        return None
    in_order = isinstance(data.sampler, SequentialSampler) and type(data.batch_sampler) in (BatchSampler, type(None))
    return Data(data, class_names(data.dataset), example_names(data.dataset) if in_order else None)


def from_dataset(data: Any, request: DataRequest) -> Data | None:
    """Put the examples of a map-style Dataset into batches: ``(x, y)``, ``x`` or dicts.

    Raises:
        DataError: If the Dataset is iterable-style or has no length.
    """
    if not isinstance(data, Dataset):
        return None
    kind = type(data).__name__
    if isinstance(data, IterableDataset):
        raise DataError(
            f"{kind} is an IterableDataset, which gives examples or batches. Give DataLoader(data, batch_size=256), or "
            "batch_size=None if it gives batches."
        )
    if not hasattr(data, "__len__"):
        raise DataError(f"{kind} has no __len__. Add the number of examples, or give a DataLoader.")
    names, classes = example_names(data), class_names(data)
    with kept_random_state():
        first = data[0] if len(data) else None
    if isinstance(first, Mapping):
        data = SelectedRows(data, select_entries(first, request))
    return Data(batch_rows(data, request), classes, names)


def class_names(dataset: Any) -> tuple[str, ...] | None:
    """Return the ``classes`` of a data set, or of the data set of a Subset, if they are a list of names."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return _texts(getattr(dataset, "classes", None))


def example_names(dataset: Any) -> Callable[[], Sequence[str]] | None:
    """Return a function for the names of the examples, or None.

    Names are the files of ``samples`` or ``imgs`` (lists of file and class, as in torchvision's ImageFolder) or the
    ``texts`` of a data set.
    """
    if isinstance(dataset, Subset):
        names, indices = example_names(dataset.dataset), dataset.indices
        return None if names is None else lambda: _at(names(), indices)
    samples = next((found for name in ("samples", "imgs") if _is_samples(found := getattr(dataset, name, None))), None)
    if samples is not None:
        return lambda: [str(sample[0]) for sample in samples]
    texts = getattr(dataset, "texts", None)
    return None if not isinstance(texts, list | tuple) else lambda: [str(text) for text in texts]


def _at(names: Sequence[str], indices: Sequence[int]) -> list[str]:
    return [names[index] for index in indices]


def _is_samples(samples: Any) -> bool:
    is_list = isinstance(samples, list | tuple) and len(samples) > 0
    return is_list and isinstance(samples[0], list | tuple) and len(samples[0]) > 0 and isinstance(samples[0][0], str)


def _texts(values: Any) -> tuple[str, ...] | None:
    return tuple(map(str, values)) if isinstance(values, list | tuple) and values else None
