"""Checks of a model that do not depend on data."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from ifcomp.errors import ModelError, NonFiniteError

#: Package of dynamically quantised modules, which scale activations by the maximum over the batch.
_DYNAMIC = "torch.ao.nn.quantized.dynamic"

#: Largest number of names in a message.
_MAX_NAMES = 8


def check_model(model: nn.Module) -> None:
    """Raise ModelError or NonFiniteError for a model that cannot be used with any data."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    _check_transparent(model)
    lazy = [name for name, value in tensors if isinstance(value, UninitializedParameter | UninitializedBuffer)]
    if lazy:
        raise ModelError(f"The model is not initialised yet: {', '.join(lazy)}. Run one batch through the model first.")
    if any(value.is_inference() for _, value in tensors):
        raise ModelError(
            "The model was created in inference mode, where autograd does not record. Build and load it outside "
            "torch.inference_mode()."
        )
    mixing = [
        name for name, module in model.named_modules() if isinstance(module, _BatchNorm) and module.running_mean is None
    ]
    if mixing:
        raise ModelError(
            f"BatchNorm with track_running_stats=False ({', '.join(mixing)}) lets the logits of an example depend on "
            "the other examples of its batch, so per-example gradients do not exist. Use running statistics."
        )
    wrong = [
        name
        for name, value in tensors
        if (value.is_floating_point() or value.is_complex()) and not torch.isfinite(value.detach()).all()
    ]
    if wrong:
        raise NonFiniteError(
            f"The model has NaN or infinite values in {', '.join(wrong)}. Load a checkpoint with finite values."
        )


def untouched_norms(model: nn.Module) -> list[str]:
    """Names of normalisation layers with the running statistics of a new layer: mean 0 and variance 1."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, _NormBase)
        and module.running_mean is not None
        and module.running_var is not None
        and not module.running_mean.any()
        and bool((module.running_var == 1).all())
    ]


def _check_transparent(model: nn.Module) -> None:
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
            f"The parameters are sharded by FSDP ({listed(sharded)}), so no process has whole layers. Load the full "
            "state dict into the plain model; ifcomp.distributed.data_parallel() splits the work over the processes."
        )
    dynamic = [name for name, module in model.named_modules() if type(module).__module__.startswith(_DYNAMIC)]
    if dynamic:
        raise ModelError(
            f"Layers are dynamically quantised ({listed(dynamic)}): they round by the "
            "largest value of the whole batch, so per-example gradients do not exist. Give the model from before "
            "quantisation; its scores hold for the quantised one up to rounding."
        )


def listed(names: Sequence[str]) -> str:
    """The first names as text."""
    shown = ", ".join(name or "the model" for name in names[:_MAX_NAMES])
    return shown if len(names) <= _MAX_NAMES else f"{shown} and {len(names) - _MAX_NAMES} more"
