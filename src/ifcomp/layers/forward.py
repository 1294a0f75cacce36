"""Run a model in eval mode and return its logits."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import Parameter, signature
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from ifcomp.data.batches import Batch
from ifcomp.errors import LogitsError, NonFiniteError, PrecisionError
from ifcomp.layers.modes import PlainAttention, has_fast_path
from ifcomp.layers.threads import exclusive

#: Annotations of an input that is a list or tuple itself.
_SEQUENCE = re.compile(r"(typing\.|collections\.abc\.)?(list|tuple|sequence|iterable)\b", re.IGNORECASE)

#: Start of the note on an exception of the model's code, which ends with the name of the batch.
MODEL_FAILED = "The model failed on"

#: Types of half precision.
HALF = (torch.float16, torch.bfloat16)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of the active ``torch.autocast``; None outside of it."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def run_in_autocast(model: nn.Module, batch: Batch, mode: AbstractContextManager[object]) -> tuple[Tensor, torch.dtype]:
    """Return the logits and the dtype of their backward pass: that of the active autocast, else that of the logits.

    The autocast cache is disabled: weights that were cached under ``no_grad`` have no graph.

    Args:
        model: The classifier.
        batch: Its inputs.
        mode: See `run_model`.
    """
    device = next(model.parameters()).device
    cast = autocast_dtype(device)
    with torch.autocast(device.type, cast, enabled=cast is not None, cache_enabled=False):
        logits = run_model(model, batch, mode)
    return logits, cast or logits.dtype


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put all modules in eval mode, exclusively for this thread.

    On exit, restore their modes, their buffers and the weights of embeddings with ``max_norm``.

    Modules can cache tensors in eval mode and clear the cache in ``train()``. Autograd does not reach the parameters
    behind a tensor that was cached without a graph. So ``train()`` of these modules is called on entry and on exit.
    """
    with exclusive(model), _modes_kept(model), _buffers_kept(model):
        model.eval()
        for module in _with_train_method(model):
            module.train()
            module.eval()
        yield


@contextmanager
def _modes_kept(model: nn.Module) -> Iterator[None]:
    """Restore the modes of all modules, and the weights of embeddings that renormalise them in the forward pass."""
    modes = [(module, module.training) for module in model.modules()]
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    kept = [(module, module.weight.detach().clone()) for module in embeddings if module.max_norm is not None]
    try:
        yield
    finally:
        special = _with_train_method(model)
        for module, mode in modes:
            if module in special:
                module.train()
                module.train(mode)
        for module, mode in modes:
            module.training = mode
        for embedding, weight in kept:
            embedding.weight.detach().copy_(weight)


def _with_train_method(model: nn.Module) -> list[nn.Module]:
    """Modules that do more than set flags when their mode changes."""
    return [module for module in model.modules() if type(module).train is not nn.Module.train]


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


@contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """Restore buffers that a forward pass changes, such as counters of calls.

    A buffer that grew is kept: it is a cache, and attributes of the module may describe its new size.
    """
    with torch.inference_mode(False), torch.no_grad():
        kept = [
            (module, name, value, value._version, value.clone())
            for module in set(model.modules())
            for name, value in module.named_buffers(recurse=False)
            if not value.is_inference()
        ]
    try:
        yield
    finally:
        with torch.inference_mode(False), torch.no_grad():
            for module, name, value, version, content in kept:
                current = getattr(module, name, None)
                if isinstance(current, Tensor) and current is not value and current.shape == value.shape:
                    setattr(module, name, value)
                if value._version != version:
                    value.copy_(content)


def call_model(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a model on its inputs, without the fast path of PyTorch's transformers.

    A single list or tuple is unpacked if ``forward`` takes several inputs; see `ifcomp.data.batches.as_batch`.
    """
    if len(args) == 1 and type(args[0]) in (list, tuple) and _takes(model, len(args[0])):
        args = args[0]
    with PlainAttention() if has_fast_path(model) else nullcontext():
        return model(*args, **kwargs)


def _takes(model: nn.Module, count: int) -> bool:
    """Whether ``forward`` takes several inputs, and ``count`` of them."""
    try:
        parameters = list(signature(model.forward).parameters.values())
    except (TypeError, ValueError):  # no Python function
        return False
    if any(parameter.kind is Parameter.VAR_POSITIONAL for parameter in parameters):
        return True
    positional = [
        parameter
        for parameter in parameters
        if parameter.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    ]
    if positional and _SEQUENCE.match(str(positional[0].annotation)):
        return False
    required = sum(parameter.default is Parameter.empty for parameter in positional)
    inputs = list(takewhile(_is_input, positional))
    return len(inputs) > 1 and required <= count <= len(inputs)


def _is_input(parameter: Parameter) -> bool:
    """Whether a parameter of ``forward`` is an input: it has no default, or the default None of an optional tensor."""
    if parameter.default is not None:
        return parameter.default is Parameter.empty
    return parameter.annotation is Parameter.empty or "Tensor" in str(parameter.annotation)


def run_model(model: nn.Module, batch: Batch, mode: AbstractContextManager[object] | None = None) -> Tensor:
    """Return the validated logits [B, K] of a model.

    Args:
        model: The classifier.
        batch: Its inputs.
        mode: A context in which the model runs, without the checks of its logits.

    Raises:
        LogitsError: If the output is not [B, K] with K > 1.
        PrecisionError: If the model fails and its floating-point type is not that of the inputs.
        NonFiniteError: If a logit is not finite.
    """
    where = batch.name
    try:
        with mode or nullcontext():
            output = call_model(model, batch.args, batch.kwargs)
    except RuntimeError as error:
        given = {value.dtype for value in batch.tensors() if value.is_floating_point()}
        needed = {value.dtype for value in model.parameters() if value.is_floating_point()}
        if given and needed and not given & needed:
            names = [" and ".join(sorted(map(str, dtypes))) for dtypes in (needed, given)]
            raise PrecisionError(
                f"{where}: the model's parameters are {names[0]} but its inputs are {names[1]}. "
                "Convert one of them, for instance x.to(next(model.parameters()).dtype) or model.float()."
            ) from error
        error.add_note(f"{MODEL_FAILED} {where}.")
        raise
    except Exception as error:
        error.add_note(f"{MODEL_FAILED} {where}.")
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
