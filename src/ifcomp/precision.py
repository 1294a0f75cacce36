"""Device of float64 arithmetic: the device of a float64 model, otherwise the CPU.

Devices such as Apple's MPS have no float64. Logits, inverse curvature and eigenvectors need it, and are small or
computed once. No float64 tensor is created on the device of a model in lower precision.
"""

from __future__ import annotations

import torch
from torch import Tensor


def double_device(device: torch.device, working: torch.dtype) -> torch.device:
    """The device of float64 results.

    Args:
        device: The model's device.
        working: Precision of factors, `ifcomp.layers.recorder.working_dtype`.
    """
    return device if working == torch.float64 else torch.device("cpu")


def as_double(value: Tensor, working: torch.dtype | None = None) -> Tensor:
    """Convert to float64. Unless the working precision is float64, the tensor is moved to the CPU first.

    Args:
        value: Any tensor.
        working: Precision of factors; None is the dtype of the tensor.
    """
    return value.to(double_device(value.device, working or value.dtype)).double()


def as_type_of(value: Tensor, like: Tensor) -> Tensor:
    """Convert to the dtype and then move to the device of another tensor."""
    return value.to(like.dtype).to(like.device)
