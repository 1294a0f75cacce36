"""Run a model in eval mode and return its logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ifcomp.data.batches import Batch
from ifcomp.errors import LogitsError, NonFiniteError, PrecisionError

#: Types of half precision.
HALF = (torch.float16, torch.bfloat16)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of the active ``torch.autocast``; None outside of it."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def run_in_autocast(model: nn.Module, batch: Batch) -> tuple[Tensor, torch.dtype]:
    """Return the logits and the dtype of their backward pass: that of the active autocast, else that of the logits.

    The autocast cache is disabled: weights that were cached under ``no_grad`` have no graph.
    """
    device = next(model.parameters()).device
    cast = autocast_dtype(device)
    with torch.autocast(device.type, cast, enabled=cast is not None, cache_enabled=False):
        logits = run_model(model, batch)
    return logits, cast or logits.dtype


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put all modules in eval mode. On exit, restore their modes and the weights of embeddings with ``max_norm``.

    Modules that cache tensors in eval mode clear the cache in ``train()``. A cached tensor without a graph would hide
    its parameters, so ``train()`` is called on entry and on exit.
    """
    modes = [(module, module.training) for module in model.modules()]
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    kept = [(module, module.weight.detach().clone()) for module in embeddings if module.max_norm is not None]
    is_training = model.training
    model.train()
    model.eval()
    try:
        yield
    finally:
        model.train()
        model.train(is_training)
        for module, mode in modes:
            module.training = mode
        for embedding, weight in kept:
            embedding.weight.detach().copy_(weight)


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Convert parameters and buffers of half precision to float32. On exit, restore them."""
    halves = [value for value in (*model.parameters(), *model.buffers()) if value.dtype in HALF]
    originals = [value.data for value in halves]
    for value in halves:
        value.data = value.data.float()
    try:
        yield
    finally:
        for value, original in zip(halves, originals, strict=True):
            value.data = original


def run_model(model: nn.Module, batch: Batch) -> Tensor:
    """Return the validated logits [B, K] of a model.

    Raises:
        LogitsError: If the output is not [B, K] with K > 1.
        PrecisionError: If the model fails and its floating-point type is not that of the inputs.
        NonFiniteError: If a logit is not finite.
    """
    where = batch.name
    try:
        output = model(*batch.args, **batch.kwargs)
    except RuntimeError as error:
        given = {value.dtype for value in batch.tensors() if value.is_floating_point()}
        needed = {value.dtype for value in model.parameters() if value.is_floating_point()}
        if given and needed and not given & needed:
            names = [" and ".join(sorted(map(str, dtypes))) for dtypes in (needed, given)]
            raise PrecisionError(
                f"{where}: the model's parameters are {names[0]} but its inputs are {names[1]}. "
                "Convert one of them, for instance x.to(next(model.parameters()).dtype) or model.float()."
            ) from error
        raise
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise LogitsError(
            f"{where}: the model must return a tensor of logits or an object with .logits, "
            f"but returned {type(output).__name__}. Wrap it in a module that picks the logits."
        )
    if logits.dim() != 2 or len(logits) != batch.size:
        raise LogitsError(f"{where}: logits must have shape [{batch.size}, K], but have {list(logits.shape)}.")
    if logits.shape[1] < 2:
        raise LogitsError(
            f"{where}: the model has one logit per example, but K must be at least 2. "
            "For a sigmoid output z wrap the model so that it returns torch.cat([zeros_like(z), z], 1)."
        )
    if not logits.isfinite().all():
        raise NonFiniteError(
            f"{where}: the logits of {batch.describe_example((~logits.isfinite()).any(1))} of the batch are NaN or "
            "infinite though its inputs are finite. The model overflows there: try float32 or float64."
        )
    return logits
