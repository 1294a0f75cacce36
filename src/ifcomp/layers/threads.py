"""Threads: one lock per module, and process-wide settings that threads share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import nn

_LOCKS: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_LOCKS_LOCK = threading.Lock()


@contextmanager
def exclusive(model: nn.Module) -> Iterator[None]:
    """Hold the locks of all modules of a model, so that models that share modules exclude each other too.

    The locks are re-entrant. Do not yield to a caller or load data inside: the caller or the loader could wait for a
    thread that needs the same model.
    """
    modules = sorted(set(model.modules()), key=id)  # the same order in all threads prevents deadlocks
    with _LOCKS_LOCK:
        locks = [_LOCKS.setdefault(module, threading.RLock()) for module in modules]
    with ExitStack() as stack:
        for lock in locks:
            stack.enter_context(lock)
        yield


def is_foreign(thread: int | None) -> bool:
    """Whether the calling thread is not ``thread``, the identifier of the recording one.

    Backward passes on a GPU run in threads of autograd. Checkpointed modules run again there, so calls inside a
    backward pass are not foreign.
    """
    return threading.get_ident() != thread and torch._C._current_graph_task_id() == -1


class SharedContext:
    """A context that changes process-wide settings. The first thread enters it, and the last one leaves it."""

    def __init__(self, make: Callable[[], AbstractContextManager[object]]) -> None:
        """Store the function that creates the context."""
        self._make, self._lock, self._users, self._stack = make, threading.Lock(), 0, ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if not self._users:
                self._stack.enter_context(self._make())
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._stack.close()
