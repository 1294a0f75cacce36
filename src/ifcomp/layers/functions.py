"""Calls of torch functions during a recorded forward pass.

Parameters can be used outside of a known ``forward``: a subclass overrides ``forward``, a weight is normalised before
use, a parent module calls ``F.linear(x, child.weight)``, or a parameter is multiplied or added directly.
`FunctionCalls` intercepts every torch function and reports the calls that use such parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ifcomp.layers.batch_norm import affine_batch_norm

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

#: Functions whose result is a value on the CPU, or has a size that depends on the content of a tensor.
_CONTENT = frozenset(
    [
        "nonzero",
        "argwhere",
        "masked_select",
        "unique",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
        "repeat_interleave",
        "bincount",
        "_pack_padded_sequence",
        "item",
        "tolist",
        "numpy",
        "__array__",
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
    ]
)

#: Functions whose rows along the first axis depend on the content of a tensor.
_REARRANGING = frozenset(
    [
        "masked_select",
        "repeat_interleave",
        "unique",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
        "_pack_padded_sequence",
    ]
)

#: Functions that do so along a given axis: the second argument, or ``dim``.
_ALONG_AXIS = frozenset(
    f"{name}{suffix}"
    for name in ("index_select", "gather", "take_along_dim", "sort", "topk", "scatter", "index_add", "index_copy")
    for suffix in ("", "_")
)


@dataclass(frozen=True)
class FunctionCall:
    """One call of a function with a weight.

    Attributes:
        value: Computes the input of the layer: padded for convolutions, normalised for norms.
        weight: The weight as used.
        bias: The bias as used.
        geometry: Settings that must equal those of the module, by name of its attribute.
    """

    value: Callable[[], Tensor]
    weight: Tensor | None
    bias: Tensor | None = None
    geometry: Mapping[str, Any] = field(default_factory=dict)


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
        self.rearranges = self.rearranges or self._rearranges(name, args, kwargs)
        self.reads_content = self.reads_content or _reads_content(name, args)
        if not torch.is_grad_enabled():
            return func(*args, **kwargs)
        self.uses.update(id(value) for value in (*args, *kwargs.values()) if id(value) in self._parameters)
        if func in _READERS:
            return self._layer(func, _READERS[func](*args, **kwargs), args, kwargs)
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

    def _rearranges(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether a function may move rows of a tensor that is neither a parameter nor a buffer."""
        if not args or id(args[0]) in self._parameters or id(args[0]) in self._buffers:
            return False
        if name in ("__getitem__", "__setitem__"):
            return _moves_rows(args[1][0] if isinstance(args[1], tuple) and args[1] else args[1])
        axis = kwargs.get("dim", args[1] if len(args) > 1 else -1)
        return name in _REARRANGING or (name in _ALONG_AXIS and axis in (0, -args[0].dim()))

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


def _reads_content(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a function reads the content of a tensor: a boolean index, a bound of a slice, a listed function."""
    if name == "where":
        return len(args) == 1
    if name != "__getitem__":
        return name in _CONTENT
    index = args[1] if isinstance(args[1], tuple | list) else (args[1],)
    bounds = [bound for part in index if isinstance(part, slice) for bound in (part.start, part.stop, part.step)]
    is_mask = any(isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) for part in index)
    return is_mask or any(isinstance(bound, Tensor) for bound in bounds)


def _moves_rows(index: Any) -> bool:
    """Whether an index of the first axis may change the order or the number of rows. ``arange`` does not."""
    if isinstance(index, list):
        return True
    if not isinstance(index, Tensor) or not index.dim():
        return False
    return index.dtype == torch.bool or not torch.equal(index, torch.arange(len(index), device=index.device))


def _read_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> FunctionCall:
    return FunctionCall(lambda: input, weight, bias)


def _read_embedding(input: Tensor, weight: Tensor, padding_idx: int | None = None, *_: Any, **__: Any) -> FunctionCall:
    return FunctionCall(lambda: input, weight, geometry={"padding_idx": padding_idx})


def _read_conv(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> FunctionCall:
    kernel = weight.shape[2:]
    spread = _each_axis(dilation, len(kernel))

    def padded() -> Tensor:
        if isinstance(padding, str):
            totals = [step * (size - 1) if padding == "same" else 0 for step, size in zip(spread, kernel, strict=True)]
            widths = [width for total in reversed(totals) for width in (total // 2, total - total // 2)]
        else:
            widths = [width for size in reversed(_each_axis(padding, len(kernel))) for width in (size, size)]
        return F.pad(input, widths)

    geometry = {"stride": _each_axis(stride, len(kernel)), "dilation": spread, "groups": groups}
    return FunctionCall(padded, weight, bias, geometry)


def _read_layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> FunctionCall:
    return FunctionCall(lambda: F.layer_norm(input, list(normalized_shape), eps=eps), weight, bias)


def _read_rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> FunctionCall:
    return FunctionCall(lambda: F.rms_norm(input, list(normalized_shape), eps=eps), weight)


def _read_group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> FunctionCall:
    return FunctionCall(lambda: F.group_norm(input, num_groups, eps=eps), weight, bias)


def _read_batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> FunctionCall:
    return FunctionCall(lambda: F.batch_norm(input, running_mean, running_var, eps=eps), weight, bias)


def _each_axis(value: int | Sequence[int], axes: int) -> tuple[int, ...]:
    """A setting of a convolution for every axis."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * (axes // len(values)) if len(values) < axes else values


_READERS: Mapping[Callable[..., Any], Callable[..., FunctionCall]] = {
    F.linear: _read_linear,
    F.embedding: _read_embedding,
    F.conv1d: _read_conv,
    F.conv2d: _read_conv,
    F.conv3d: _read_conv,
    F.layer_norm: _read_layer_norm,
    F.rms_norm: _read_rms_norm,
    F.group_norm: _read_group_norm,
    F.batch_norm: _read_batch_norm,
}
