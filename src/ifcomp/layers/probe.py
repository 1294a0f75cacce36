"""Logits of a model on artificial inputs. They show whether its code has changed since a fit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ifcomp.data.batches import Batch
from ifcomp.errors import FingerprintError
from ifcomp.layers.forward import evaluating, run_model
from ifcomp.layers.logit_checks import are_close

#: Number of artificial examples, and of their logits that are kept.
EXAMPLES, LOGITS = 4, 64

#: Its multiples modulo 1 are spread evenly over 0 ... 1.
_GOLDEN_RATIO = 0.6180339887498949

#: The logits may differ by these powers of the eps of their dtype, relative to their norm: between processors, and if
#: one of them is computed on another kind of device, which may round inputs of products.
_POWER, _POWER_OF_DEVICES = 0.6, 1 / 3


def take_probe(model: nn.Module, batch: Batch) -> dict[str, Any] | None:
    """Return the form of artificial inputs and their logits, as plain JSON; None if the model cannot run on them.

    Args:
        model: The classifier.
        batch: Examples whose shapes, dtypes and ranges the inputs have. Their values are not kept.
    """
    try:
        few = batch.select(slice(0, EXAMPLES))
        device = next(model.parameters()).device.type
        probe = {"inputs": _form([few.args, few.kwargs]), "size": few.size, "device": device}
        return {**probe, "logits": _logits(model, probe).tolist()}
    except Exception:  # the model was made for other values
        return None


def check_probe(model: nn.Module, probe: Mapping[str, Any] | None, what: str) -> None:
    """Check that a model computes the logits that `take_probe` returned.

    Args:
        model: The classifier.
        probe: The result of `take_probe`. Nothing is checked if it is None, or if the model fails on the inputs.
        what: Subject of the message, in the plural.

    Raises:
        FingerprintError: If the logits differ by more than rounding.
    """
    if probe is None:
        return
    expected = torch.tensor(probe["logits"], dtype=torch.float64, device="cpu")
    try:
        logits = _logits(model, probe)
    except Exception:  # the data raises the error of the model, with the name of the batch
        return
    devices = {next(model.parameters()).device.type, probe.get("device")}
    power = _POWER if devices == {"cpu"} else _POWER_OF_DEVICES
    if logits.shape != expected.shape or not are_close(logits, expected, power):
        raise FingerprintError(
            f"{what} belong to a model with other code: its logits differ though its weights are the same. Restore the "
            "code, or fit again."
        )


def _logits(model: nn.Module, probe: Mapping[str, Any]) -> Tensor:
    device = next(model.parameters()).device
    args, kwargs = _artificial(probe["inputs"])
    batch = Batch(args, kwargs, None, probe["size"], "the artificial batch")
    with evaluating(model), torch.no_grad(), torch.autocast(device.type, enabled=False):
        return run_model(model, batch.to(device))[:, :LOGITS].cpu()


def _form(value: Any) -> Any:
    """Return the structure of inputs, and the shape, dtype and range of each tensor."""
    if isinstance(value, Tensor):
        low, high = (float(bound) for bound in torch.aminmax(value.detach().double().cpu()))
        return {"dtype": str(value.dtype)[6:], "shape": list(value.shape), "low": low, "high": high}
    if isinstance(value, Mapping):
        return {"mapping": {name: _form(part) for name, part in value.items()}}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_form(part) for part in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return {"constant": value}
    raise TypeError(f"a {type(value).__name__} is not plain JSON")


def _artificial(form: Any) -> Any:
    """Return inputs of a form. The values of each tensor are spread evenly over its range, in irregular order."""
    if "shape" in form:
        steps = torch.arange(1, math.prod(form["shape"]) + 1, dtype=torch.float64, device="cpu") * _GOLDEN_RATIO
        values, dtype = form["low"] + (form["high"] - form["low"]) * (steps % 1), getattr(torch, form["dtype"])
        return (values if dtype.is_floating_point else values.round()).to(dtype).view(form["shape"])
    if "mapping" in form:
        return {name: _artificial(part) for name, part in form["mapping"].items()}
    if "constant" in form:
        return form["constant"]
    parts = [_artificial(part) for part in form.get("list", form.get("tuple"))]
    return parts if "list" in form else tuple(parts)
