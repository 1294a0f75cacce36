"""Models that are wrapped by ``torch.compile``, ``DataParallel`` or ``DistributedDataParallel``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ifcomp.layers.threads import SharedContext

_EAGER = SharedContext(lambda: torch.compiler.set_stance("force_eager"))


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model without the wrappers of ``torch.compile``, ``DataParallel`` and ``DistributedDataParallel``.

    The parameters are the same objects, and their names have no prefix: factors fitted with a wrapper fit the model
    without it.
    """
    while True:
        if isinstance(model, DataParallel | DistributedDataParallel):
            model = model.module
        elif (inner := _compiled(model)) is not None:
            model = inner
        else:
            return model


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Run compiled parts of the model eagerly, so that hooks need no compilation for every shape."""
    compiled = any(
        _compiled(module) is not None or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )
    if not compiled:
        yield
        return
    with _EAGER:
        yield


def _compiled(module: nn.Module) -> nn.Module | None:
    """The original module if this one was returned by ``torch.compile``."""
    inner = getattr(module, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else None
