"""A device without float64, such as Apple's MPS, simulated on a CPU.

`DeviceTensor` wraps a tensor of the CPU and claims to be on another device. The device is called ``meta``, because
PyTorch needs no driver for it. As on a real device, an operation fails if it mixes tensors of the device with tensors
of the CPU that have an axis, and results are on the device unless ``device=`` names another one. An operation that
returns a tensor of 64-bit floats on the device fails, as on MPS.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("meta")

#: Types that the device does not have.
_MISSING = {torch.float64, torch.complex128}

aten = torch.ops.aten

#: Operations that accept tensors of two devices.
_MAY_MIX = (aten._to_copy, aten.copy_, aten.copy, aten.index, aten.index_put, aten.index_put_)


class NoDoubleError(TypeError):
    """An operation would create a tensor of 64-bit floats on the device."""


class MixedDevicesError(RuntimeError):
    """An operation has tensors of two devices."""


class DeviceTensor(Tensor):
    """A tensor that claims to be on the device.

    Attributes:
        inner: The values, on the CPU.
    """

    inner: Tensor
    is_meta = False
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls: type["DeviceTensor"], inner: Tensor) -> "DeviceTensor":
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )
        made.inner = inner
        return made

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.inner.untyped_storage()

    def tolist(self) -> Any:
        return self.inner.tolist()

    def __repr__(self) -> str:
        return f"DeviceTensor({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(function, args, kwargs or {}, ())


class PretendedDevice(TorchDispatchMode):
    """Creates new tensors on the device.

    Attributes:
        copies: Number of copies between the CPU and the device.
    """

    def __init__(self, exempt: Sequence[str] = ()) -> None:
        super().__init__()
        self.exempt, self.copies = exempt, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = _run(function, args, kwargs or {}, self.exempt)
        if function.overloadpacket is aten._to_copy:
            self.copies += isinstance(result, DeviceTensor) != isinstance(args[0], DeviceTensor)
        return result


@contextmanager
def pretended_device(monkeypatch: pytest.MonkeyPatch, exempt: Sequence[str] = ()) -> Iterator[PretendedDevice]:
    """A device without float64 and without autocast.

    Args:
        monkeypatch: Removes autocast of the device, which PyTorch knows by name only.
        exempt: Ends of file names. Code called from these files may create float64 tensors on the device.
    """
    autocast, is_enabled = torch.autocast, torch.is_autocast_enabled

    def cast(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return nullcontext() if device_type == DEVICE.type else autocast(device_type, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "autocast", cast)
        patch.setattr(torch, "is_autocast_enabled", lambda kind="cpu": kind != DEVICE.type and is_enabled(kind))
        with PretendedDevice(exempt) as mode:
            yield mode


def on_device(model: nn.Module) -> nn.Module:
    """Move a model to the device, in place."""
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, value in module._parameters.items():
            if value is not None:
                wrapped = nn.Parameter(DeviceTensor(value.detach()), value.requires_grad)
                module._parameters[name] = moved.setdefault(id(value), wrapped)
        for name, value in module._buffers.items():
            if value is not None:
                module._buffers[name] = DeviceTensor(value)
    return model


def _run(function: Any, args: Any, kwargs: dict[str, Any], exempt: Sequence[str]) -> Any:
    """Run an operation on the values, and wrap the result if it is on the device."""
    tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
    wrapped = [value for value in tensors if isinstance(value, DeviceTensor)]
    if wrapped and function.overloadpacket not in _MAY_MIX:
        others = [value for value in tensors if not isinstance(value, DeviceTensor) and value.dim()]
        if others:
            raise MixedDevicesError(f"{function} received {others[0].dtype} {list(others[0].shape)} from the CPU.")
    target = kwargs.get("device")
    is_here = bool(wrapped) if target is None else torch.device(target).type == DEVICE.type
    if function.overloadpacket is aten.copy_:
        is_here = isinstance(args[0], DeviceTensor)
    inner_kwargs = kwargs if target is None else {**kwargs, "device": "cpu"}
    inner_args, inner_kwargs = tree_map(_inner, (args, inner_kwargs))
    result = function(*inner_args, **inner_kwargs)
    if not is_here:
        return result
    if not _is_exempt(exempt):
        missing = [
            value.dtype for value in tree_leaves(result) if isinstance(value, Tensor) and value.dtype in _MISSING
        ]
        if missing:
            raise NoDoubleError(f"{function} returned a tensor of {missing.pop()} on the device.")
    by_inner = {id(value.inner): value for value in wrapped}
    return tree_map(lambda value: _wrap(value, by_inner), result)


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, DeviceTensor) else value


def _wrap(value: Any, known: dict[int, DeviceTensor]) -> Any:
    """Wrap a tensor. In-place operations return their first argument."""
    if not isinstance(value, Tensor):
        return value
    return known[id(value)] if id(value) in known else DeviceTensor(value)


def _is_exempt(names: Sequence[str]) -> bool:
    frame = sys._getframe() if names else None
    while frame is not None:
        if frame.f_code.co_filename.endswith(tuple(names)):
            return True
        frame = frame.f_back
    return False
