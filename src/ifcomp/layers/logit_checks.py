"""Checks of a model's logits: deterministic, differentiable, and independent across examples."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ifcomp.data.batches import Batch
from ifcomp.errors import ModelError
from ifcomp.layers.forward import evaluating, run_model
from ifcomp.precision import as_double


def plain_logits(model: nn.Module, batch: Batch) -> Tensor:
    """The logits of the model without hooks."""
    with evaluating(model), torch.enable_grad():
        return run_model(model, batch).detach()


def check_logits(model: nn.Module, batch: Batch, logits: Tensor, plain: Tensor) -> None:
    """Raise ModelError unless logits are deterministic, differentiable and independent across examples.

    Args:
        model: The classifier, attached.
        batch: A few examples.
        logits: Their recorded logits.
        plain: Their logits without hooks.
    """
    if not logits.requires_grad:
        raise ModelError(
            "The logits carry no gradient: the model detaches them or runs under no_grad. Return logits that autograd "
            "can follow back to the parameters."
        )
    recorded = logits.detach()
    with torch.no_grad():
        alone = torch.cat([run_model(model, example.to(logits.device)) for example in batch.split(1)]).detach()
        again = run_model(model, batch.to(logits.device)).detach()
    if not are_close(again, recorded):
        raise ModelError(
            "The logits of the same batch differ from run to run, so the model is random even in eval mode. "
            "Usual cause: functional.dropout without training=self.training."
        )
    if not all(map(are_close, alone, recorded)):
        raise ModelError(
            "The logits of an example depend on the other examples of its batch, so per-example gradients do "
            "not exist. Usual causes: BatchNorm with track_running_stats=False, an axis other than the first as the "
            "batch, a decision that is made once for the whole batch. "
            f"Difference in the first batch: {float((alone - recorded).abs().max()):.3g}."
        )
    if not are_close(plain, recorded, power=0.25):  # a replaced forward may round differently
        raise ModelError(
            "The logits change when the layers of the model are recorded, so a layer does not compute the function of "
            f"its type. Difference in the first batch: {float((plain - recorded).abs().max()):.3g}. Leave such "
            "layers out with requires_grad_(False)."
        )


def are_close(value: Tensor, truth: Tensor, power: float = 0.5) -> bool:
    """Whether values are equal up to a power of eps in the coarser precision, relative to their norm."""
    precision = max(torch.finfo(value.dtype).eps, torch.finfo(truth.dtype).eps)
    error, size = (float(part.norm()) for part in (as_double(value) - as_double(truth), as_double(truth)))
    return error <= float(precision**power) * size
