"""Bytes of the tensors that are alive at once while a piece of code runs: an account that knows nothing of ours."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Alive(TorchDispatchMode):
    """Counts storages that operations make inside the context, until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.largest = 0
        self.known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {
            value.untyped_storage()._cdata for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)
        }
        made = function(*args, **(kwargs or {}))
        for value in tree_leaves(made):
            if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata not in given:  # no view
                self.note(value.untyped_storage())
        return made

    def note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.known and self.known[key]() is not None:
            return
        self.known[key] = weakref.ref(storage, lambda _: self.forget(key, size))
        self.now += size
        self.peak, self.largest = max(self.peak, self.now), max(self.largest, size)

    def forget(self, key: int, size: int) -> None:
        self.now -= size
        self.known.pop(key, None)
