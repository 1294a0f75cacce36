"""Modes of a forward pass. They act on the calling thread only and do not touch the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ifcomp.data.batches import map_tensors


class Substitution(TorchFunctionMode):
    """Replaces parameters by other tensors in every torch function.

    ``torch.func.functional_call`` would replace the parameters of the modules for all threads.

    Attributes:
        unused: Parameters that no torch function has used so far, by id. Scripted code may have used them.
    """

    def __init__(self, parameters: Iterable[Tensor], values: Iterable[Tensor]) -> None:
        """Store distinct parameters and, in the same order, the tensors to use."""
        super().__init__()
        self.unused = {id(parameter): parameter for parameter in parameters}
        self._values = dict(zip(self.unused, values, strict=True))

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        args, kwargs = map_tensors(self._substitute, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _substitute(self, value: Tensor) -> Tensor:
        self.unused.pop(id(value), None)
        return self._values.get(id(value), value)


class PlainAttention(TorchFunctionMode):
    """Disables the fast path of PyTorch's transformers, which bypasses hooks and creates nested tensors.

    PyTorch does not use the fast path if a mode is active. The switch in ``torch.backends.mha`` would change the
    outputs of other threads at padded positions.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch._nested_tensor_from_mask_left_aligned:  # nn.TransformerEncoder calls this first
            return False
        return func(*args, **(kwargs or {}))


def has_fast_path(model: nn.Module) -> bool:
    """Whether a module of the model has a fast path for attention."""
    types = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
    return any(isinstance(module, types) for module in model.modules())
