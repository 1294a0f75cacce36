"""Per-example gradients of parameters without a layer: tied parameters, and those whose rule does not hold."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from ifcomp.data.batches import Batch, map_tensors
from ifcomp.layers.batch_norm import AffineBatchNorm
from ifcomp.layers.forward import call_model, run_model
from ifcomp.layers.modes import Substitution
from ifcomp.layers.recording import check_half, scale_for_half
from ifcomp.layers.threads import SharedContext
from ifcomp.precision import as_type_of


def other_gradients(
    model: nn.Module, names: Sequence[str], batch: Batch, cotangents: Tensor, dtype: torch.dtype, uses_vmap: bool
) -> dict[str, Tensor]:
    """Gradients of ``sum_k cotangents[c, b, k] * logits[b, k]`` for every example b and cotangent c.

    ``vmap`` runs one forward pass with a copy of the parameters per example, then one backward per cotangent. Models
    that ``vmap`` cannot run (control flow that depends on data, recurrent layers) are run one example at a time.

    Args:
        model: The classifier, in eval mode.
        names: Full parameter names.
        batch: B examples.
        cotangents: [C, B, K].
        dtype: Precision of the result.
        uses_vmap: Whether to try ``vmap`` first.

    Returns:
        Flattened gradients [C, B, P] by name.
    """
    if not names:
        return {}
    first = next(model.parameters())
    scaled, scales = scale_for_half(cotangents, first.dtype)
    with torch.inference_mode(False), torch.enable_grad():
        owned = dict(model.named_parameters(remove_duplicate=False))  # scripted models lack get_parameter
        parameters: dict[str, Tensor] = {name: owned[name] for name in names}
        with AffineBatchNorm():
            gradients = _by_vmap_or_one_by_one(model, parameters, batch, scaled, uses_vmap)
    if scales is not None:
        check_half(gradients.values())
    flat = {name: value.detach().reshape(*cotangents.shape[:2], -1).to(dtype) for name, value in gradients.items()}
    if scales is None:
        return flat
    divisors = scales.to(dtype).to(first.device).unsqueeze(-1)
    return {name: value / divisors for name, value in flat.items()}


@contextmanager
def _batched_operations() -> Iterator[None]:
    with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():  # fused attention has no batching rule
        warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
        yield


_BATCHED = SharedContext(_batched_operations)


def _by_vmap_or_one_by_one(
    model: nn.Module, parameters: dict[str, Tensor], batch: Batch, cotangents: Tensor, uses_vmap: bool
) -> dict[str, Tensor]:
    if not uses_vmap:
        return _one_by_one(model, parameters, batch, cotangents)
    try:
        with _BATCHED:
            return _by_vmap(model, parameters, batch, cotangents)
    except (RuntimeError, NotImplementedError):
        return _one_by_one(model, parameters, batch, cotangents)


def _by_vmap(model: nn.Module, parameters: dict[str, Tensor], batch: Batch, cotangents: Tensor) -> dict[str, Tensor]:
    given = list(batch.tensors())
    axes = [0 if has_axis else None for has_axis in batch.batched().values()]
    unused: list[Tensor] = []

    def logits_of(own: dict[str, Tensor], tensors: list[Tensor]) -> Tensor:
        alone = iter([_alone(value, axis) for value, axis in zip(tensors, axes, strict=True)])
        args, kwargs = map_tensors(lambda _: next(alone), (batch.args, batch.kwargs))
        with Substitution(parameters.values(), [own[name] for name in parameters]) as substitution:
            output = call_model(model, args, kwargs)
        unused.extend(substitution.unused.values())
        return (output if isinstance(output, Tensor) else output.logits)[0]

    copies = {name: value.detach().expand(batch.size, *value.shape) for name, value in parameters.items()}
    pull_back = vjp(
        lambda own: vmap(logits_of, (0, axes))(own, given),
        copies,
    )[1]
    if unused and _depends(model, batch.select(slice(0, 1)), unused):
        raise RuntimeError("Scripted code uses a parameter, which cannot be substituted there.")
    pulled = [pull_back(as_type_of(cotangent, next(iter(copies.values()))))[0] for cotangent in cotangents]
    return {name: torch.stack([gradients[name] for gradients in pulled]) for name in parameters}


def _depends(model: nn.Module, batch: Batch, parameters: Sequence[Tensor]) -> bool:
    """Whether the logits depend on any of the parameters."""
    logits = run_model(model, batch)
    gradients = (
        torch.autograd.grad(logits.sum(), parameters, allow_unused=True, retain_graph=True)
        if logits.requires_grad
        else ()
    )
    return any(gradient is not None for gradient in gradients)


def _one_by_one(model: nn.Module, parameters: dict[str, Tensor], batch: Batch, cotangents: Tensor) -> dict[str, Tensor]:
    own = list(parameters.values())
    rows: list[list[tuple[Tensor | None, ...]]] = []
    for index, example in enumerate(batch.split(1)):
        logits = run_model(model, example)
        rows.append(
            [
                torch.autograd.grad(
                    logits[0], own, as_type_of(cotangent[index], logits), retain_graph=True, allow_unused=True
                )
                for cotangent in cotangents
            ]
        )
    found = {}
    for position, (name, value) in enumerate(parameters.items()):
        gradients = [
            [row[c][position] if row[c][position] is not None else torch.zeros_like(value) for row in rows]
            for c in range(len(cotangents))
        ]
        found[name] = torch.stack([torch.stack(column) for column in gradients])  # type: ignore[arg-type]
    return found


def _alone(value: Tensor, axis: int | None) -> Tensor:
    return value if axis is None else value.unsqueeze(0)
