"""Models inside models: what ``torch.compile``, ``DataParallel`` and its relatives put around a model, and what nobody
can look into.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ifcomp.errors import ModelError

#: Modules that scale activations by the largest of the whole batch live here.
_DYNAMIC = "torch.ao.nn.quantized.dynamic"

#: So many names are in a message.
_SHOWN = 8


def unwrapped(model: nn.Module) -> nn.Module:
    """The model itself: without ``torch.compile``, ``DataParallel`` and ``DistributedDataParallel`` around it.

    The parameters are the same objects. Names have no prefix of a wrapper, so that factors that were fitted with a
    wrapper serve the model without it, and the other way round.
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
    """Compiled parts of the model run as they were written: hooks need no compilation for every shape.

    Without `torch.compiler.set_stance` (before torch 2.6) they run compiled, with the same results.
    """
    compiled = any(
        _compiled(module) is not None or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )
    if not compiled or not hasattr(torch.compiler, "set_stance"):
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def check_transparent(model: nn.Module) -> None:
    """Raise ModelError if parameters are on the meta device or in shards, or layers are dynamically quantised."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    meta = [name for name, value in tensors if value.is_meta]
    if meta:
        raise ModelError(
            f"The model has tensors without values, on the meta device: {listed(meta)}. Load its weights first, for "
            "instance with model.to_empty(device='cpu') and model.load_state_dict(...)."
        )
    sharded = [name for name, module in model.named_modules() if type(module).__name__ == "FullyShardedDataParallel"]
    sharded += [name for name, value in tensors if hasattr(value, "full_tensor")]
    if sharded:
        raise ModelError(
            f"The parameters are sharded by FSDP ({listed(sharded)}), so no process "
            "has whole layers. Load the full state dict into the plain model; ifcomp.distributed.data_parallel() "
            "splits the work over the processes."
        )
    dynamic = [name for name, module in model.named_modules() if type(module).__module__.startswith(_DYNAMIC)]
    if dynamic:
        raise ModelError(
            f"Layers are dynamically quantised ({listed(dynamic)}): they round by the "
            "largest value of the whole batch, so examples have no gradients of their own. Give the model from before "
            "quantisation; its scores hold for the quantised one up to rounding."
        )


def _compiled(module: nn.Module) -> nn.Module | None:
    """What was compiled, if the module is what ``torch.compile`` returned."""
    inner = getattr(module, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else None


def listed(names: Sequence[str]) -> str:
    """The first few names in words."""
    shown = ", ".join(name or "the model" for name in names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
