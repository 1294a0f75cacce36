"""Calls of torch functions during a recorded forward pass.

Parameters can be used outside of a known ``forward``: a subclass overrides ``forward``, a weight is normalised before
use, a parent module calls ``F.linear(x, child.weight)``, or a parameter is multiplied or added directly.
`FunctionCalls` intercepts every torch function and reports the calls that use such parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ifcomp.layers.batch_norm import affine_batch_norm
from ifcomp.layers.content import reads_content, rearranges
from ifcomp.layers.function_calls import READERS, FunctionCall

#: Functions that broadcast their arguments against each other.
_BROADCASTING = frozenset(
    f"{prefix}{name}{suffix}"
    for name in ("add", "sub", "mul", "div", "truediv")
    for prefix, suffix in (("", ""), ("", "_"), ("__", "__"), ("__r", "__"), ("__i", "__"))
)

#: Functions of one tensor that keep the order of its elements and have slope 1.
_KEEPING = frozenset(
    [
        "view",
        "reshape",
        "unsqueeze",
        "squeeze",
        "flatten",
        "contiguous",
        "to",
        "float",
        "double",
        "type",
        "add",
        "__add__",
        "__radd__",
        "sub",
        "__sub__",
    ]
)

#: Functions that repeat a tensor along new or singleton axes.
_EXPANDING = frozenset({"expand", "repeat"})


@dataclass(frozen=True)
class Target:
    """A module whose calls are recorded by function.

    Attributes:
        name: Name of the layer.
        module: The module.
        shape: Shape of its weight.
        function: The function whose calls are recorded.
    """

    name: str
    module: torch.nn.Module
    shape: torch.Size
    function: Callable[..., Any]


#: Reports one call: name of the layer, input, output, and the weight and bias as used.
Report = Callable[[str, Tensor, Tensor, Sequence[Tensor | None]], Tensor]


class FunctionCalls(TorchFunctionMode):
    """Reports calls of functions that use recorded parameters.

    Attributes:
        changed: Names of layers that were called with other settings than those of the module.
        rearranges: Whether the content of a tensor may have determined the order of rows.
        uses: Number of functions that used each parameter, by id.
        reads_content: Whether the content of a tensor may have determined the shape of another.
    """

    def __init__(
        self,
        report: Report,
        targets: Mapping[int, Target],
        bare: Mapping[int, str],
        parameters: Collection[int],
        buffers: Collection[int],
    ) -> None:
        """Prepare.

        Args:
            report: Records a call and returns the output with which the forward pass continues.
            targets: Modules by the id of their weight.
            bare: Names of parameters without a module rule, by id.
            parameters: The ids of all parameters.
            buffers: The ids of all buffers.
        """
        super().__init__()
        self.changed: set[str] = set()
        self.rearranges = self.reads_content = False
        self.uses: Counter[int] = Counter()
        self._report, self._targets, self._bare, self._parameters = report, targets, bare, frozenset(parameters)
        self._buffers = frozenset(buffers)
        self._entered: list[Target] = []
        self._derived: dict[int, tuple[str, Tensor]] = {}

    @contextmanager
    def inside(self, target: Target) -> Iterator[None]:
        """Attribute functions with an effective weight to a module while its ``forward`` runs."""
        self._entered.append(target)
        try:
            yield
        finally:
            self._entered.pop()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        is_data = bool(args) and id(args[0]) not in self._parameters | self._buffers
        self.rearranges = self.rearranges or (is_data and rearranges(name, args, kwargs))
        self.reads_content = self.reads_content or reads_content(name, args)
        if not torch.is_grad_enabled():
            return func(*args, **kwargs)
        self.uses.update(id(value) for value in (*args, *kwargs.values()) if id(value) in self._parameters)
        if func in READERS:
            return self._layer(func, READERS[func](*args, **kwargs), args, kwargs)
        if self._bare and any(self._root(value) for value in args if isinstance(value, Tensor)):
            return self._bare_use(func, name, args, kwargs)
        return func(*args, **kwargs)

    def _layer(
        self, func: Callable[..., Any], call: FunctionCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        if func is F.batch_norm:
            output = affine_batch_norm(*args, **kwargs)
        elif func is F.linear and call.bias is not None and self._root(call.bias):
            output = F.linear(call.value(), args[1] if len(args) > 1 else kwargs["weight"])
            rows = self._expanded(call.bias, output.shape)
            return self._layer_output(func, call, output) + rows.to(output.dtype)
        else:
            output = func(*args, **kwargs)
        return self._layer_output(func, call, output)

    def _layer_output(self, func: Callable[..., Any], call: FunctionCall, output: Any) -> Any:
        """Report a call if its weight is that of a recorded module."""
        target = self._target(call.weight)
        if target is None or target.function is not func or not isinstance(output, Tensor):
            return output
        if any(getattr(target.module, key, value) != value for key, value in call.geometry.items()):
            self.changed.add(target.name)
            return output
        with torch.no_grad():
            value = call.value()
        return self._report(target.name, value, output, (call.weight, call.bias))

    def _target(self, weight: Tensor | None) -> Target | None:
        if weight is None:
            return None
        if id(weight) in self._parameters:
            return self._targets.get(id(weight))
        entered = self._entered[-1] if self._entered else None
        return entered if entered is not None and weight.requires_grad and weight.shape == entered.shape else None

    def _root(self, value: Tensor) -> str | None:
        """Name of the bare parameter that a tensor is, or is computed from alone; None for other tensors."""
        return self._bare.get(id(value)) or self._derived.get(id(value), (None,))[0]

    def _bare_use(self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        tensors = [value for value in args if isinstance(value, Tensor)]
        roots = [root for value in tensors if (root := self._root(value))]
        if len(roots) == 1 and len(tensors) == 2 and name in _BROADCASTING:
            shape = torch.broadcast_shapes(*(value.shape for value in tensors))
            return func(*(self._expanded(value, shape) for value in args), **kwargs)
        result = func(*args, **kwargs)
        if len(tensors) != 1 or not isinstance(result, Tensor) or not result.requires_grad:
            return result
        if name in _EXPANDING:
            has_rows = result.dim() > 1 and result.shape[1:].numel() == tensors[0].numel()
            return self._report(roots[0], result.detach(), result.clone(), ()) if has_rows else result
        if name in _KEEPING and result.numel() == tensors[0].numel():
            self._derived[id(result)] = (roots[0], result)
        return result

    def _expanded(self, value: Any, shape: torch.Size) -> Any:
        """Expand a parameter to one copy per row of the result; other arguments are returned unchanged."""
        root = self._root(value) if isinstance(value, Tensor) else None
        if root is None or not shape:
            return value
        aligned = value.reshape((1,) * (len(shape) - value.dim()) + tuple(value.shape))
        if aligned.shape[0] != 1:
            return value
        rows = aligned.expand(shape[0], *aligned.shape[1:])
        return self._report(root, rows.detach(), rows, ())
