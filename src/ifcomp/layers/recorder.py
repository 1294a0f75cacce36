"""The recorder runs a model, records the calls of its layers and leaves the model unchanged."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from ifcomp.blocks.block import Block
from ifcomp.data.batches import Batch
from ifcomp.errors import ModelError
from ifcomp.layers.forward import autocast_dtype, evaluating, run_in_autocast
from ifcomp.layers.functions import FunctionCalls, Target
from ifcomp.layers.head import Head, first_input
from ifcomp.layers.inventory import Inventory
from ifcomp.layers.layer import TrackedModule
from ifcomp.layers.layout import Layout
from ifcomp.layers.other import other_gradients
from ifcomp.layers.recording import Recording
from ifcomp.layers.settling import check_bare, check_gradient, settle_layouts, used_layers
from ifcomp.layers.threads import exclusive, is_foreign
from ifcomp.layers.wrappers import uncompiled


@dataclass(frozen=True)
class Verified:
    """Blocks of a model, and how they run on the verified examples.

    Attributes:
        inventory: All blocks; layers whose rule does not hold are demoted.
        layouts: Batch axis of every layer that was called.
        order: Names of the layers in the order of the forward pass.
        num_classes: K, the number of logits.
        rows: Rows of the first axis per example, by name of the layer.
        rounding: Names of blocks whose gradients are rounding errors.
        uses_vmap: Whether ``vmap`` gives the right gradients of parameters without a layer rule.
        shared: Names of inputs without a batch axis; see `Batch.shared`.
        uses: Uses of the parameters of every layer by functions, per call.
        head: The layer that maps penultimate features to logits, or None.
    """

    inventory: Inventory
    layouts: Mapping[str, Layout]
    order: tuple[str, ...] = ()
    num_classes: int = 0
    rows: Mapping[str, Collection[int]] = field(default_factory=dict)
    rounding: frozenset[str] = frozenset()
    uses_vmap: bool = True
    shared: frozenset[str] = frozenset()
    uses: Mapping[str, float] = field(default_factory=dict)
    head: Head | None = None


class Recorder:
    """Records the layers of an inventory.

    Example:
        >>> with recorder.attached():
        ...     recording = recorder.record(batch)
    """

    def __init__(self, model: nn.Module, verified: Verified) -> None:
        """Prepare; the model is not touched yet.

        Args:
            model: The classifier.
            verified: Its blocks, and how they run.
        """
        self.model, self.verified = model, verified
        self.inventory, self.layouts, self.num_classes = verified.inventory, verified.layouts, verified.num_classes
        self.shared = verified.shared
        self.device = next(model.parameters()).device
        self.dtype = working_dtype(model)
        self._recording: Recording | None = None
        self._is_attached = False
        self._called = {*verified.rows, *verified.rounding}
        self._thread: int | None = None
        self._functions: FunctionCalls | None = None

    @property
    def blocks(self) -> tuple[Block, ...]:
        """All blocks."""
        return self.inventory.blocks

    @property
    def precision(self) -> float:
        """The largest eps of the model's parameters."""
        dtypes = {parameter.dtype for parameter in self.model.parameters() if parameter.is_floating_point()}
        return max(torch.finfo(dtype).eps for dtype in dtypes)

    @property
    def autocast(self) -> str | None:
        """The precision of the surrounding ``torch.autocast``; None outside of it."""
        dtype = autocast_dtype(self.device)
        return None if dtype is None else str(dtype)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Put the model in eval mode and hook its layers; afterwards it is as before.

        Only covered parameters require gradients inside, so autograd stores nothing below the first of them. Calls
        can be nested; only the outermost attaches. Other threads that record the model wait. Threads that only run the
        model are not recorded.
        """
        with ExitStack() as stack:
            stack.enter_context(exclusive(self.model))
            if self._is_attached:
                yield
                return
            parameters = dict(self.model.named_parameters(remove_duplicate=False))  # scripted models lack get_parameter
            covered = {id(parameters[name]) for block in self.blocks for name in block.parameters}
            self._is_attached, self._thread = True, get_ident()
            stack.callback(setattr, self, "_is_attached", False)
            stack.enter_context(evaluating(self.model))
            stack.enter_context(uncompiled(self.model))
            for tracked in self.inventory.tracked:
                self._attach(tracked, stack)
            if self.verified.head is not None:
                head = self.model.get_submodule(self.verified.head.name)
                stack.callback(head.register_forward_pre_hook(self._record_head, with_kwargs=True).remove)
            for parameter in self.model.parameters():
                if parameter.requires_grad and id(parameter) not in covered:
                    parameter.requires_grad_(False)
                    stack.callback(parameter.requires_grad_, True)
            yield

    def record(self, batch: Batch, *, settle: bool = True) -> Recording:
        """Run the model on a batch; inside `attached`.

        Args:
            batch: Examples on the model's device.
            settle: Whether layouts are checked where layers do not run as on the verified examples.
        """
        functions = self._function_calls()
        recording = Recording(
            batch.size,
            self.inventory.layers,
            self.layouts,
            self.dtype,
            self.inventory.others,
            lambda names, cotangents: other_gradients(
                self.model, names, batch, cotangents, self.dtype, self.verified.uses_vmap
            ),
        )
        self._recording, self._functions = recording, functions
        try:
            with torch.inference_mode(False), torch.enable_grad():
                recording.logits, recording.backward_dtype = run_in_autocast(self.model, batch, functions)
        finally:
            self._recording = self._functions = None
        recording.uses = functions.uses
        for layer in self.inventory.layers:
            recording.check_unchanged(layer)
        if settle:
            _check_settings(functions.changed)
            self._settle(recording, functions)
        return recording

    def _function_calls(self) -> FunctionCalls:
        """The mode that records parameters by function."""
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        targets = [_target(tracked) for tracked in self.inventory.tracked if tracked.by_function]
        weights = [(target.module._parameters.get("weight"), target) for target in targets]
        return FunctionCalls(
            self._report,
            {id(weight): target for weight, target in weights if weight is not None},
            {id(parameters[layer.name]): layer.name for layer in self.inventory.bare},
            [id(parameter) for parameter in parameters.values()],
            [id(buffer) for buffer in self.model.buffers()],
        )

    def _report(self, name: str, value: Tensor, output: Tensor, arguments: Sequence[Tensor | None]) -> Tensor:
        """Record one call of a function."""
        recording = self._recording
        if recording is None or not output.requires_grad:
            return output
        if arguments:
            value, output = self._shared_rows([name], value, output, recording.batch_size)
        recording.add(name, value, output, arguments=arguments)
        return output

    def _settle(self, recording: Recording, functions: FunctionCalls) -> None:
        """Settle the layouts of a batch, and verify layers that are called for the first time."""
        settle_layouts(
            recording, self.inventory.layers, self.verified.rows, functions.rearranges, functions.reads_content
        )
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        uncalled = [layer for layer in self.inventory.layers if layer.name not in recording.calls]
        used = used_layers(recording, uncalled, parameters)
        check_bare(used, self.inventory.bare)
        recording.others = (*recording.others, *(layer.block for layer in used))
        uses = self.uses_per_call(recording)
        for layer in self.inventory.layers:
            if layer.name not in recording.calls or layer.name in self.verified.rounding:
                continue
            is_new = layer.name not in self._called or uses[layer.name] != self.verified.uses.get(layer.name)
            if is_new and check_gradient(recording, layer, parameters):
                self._called.add(layer.name)

    def uses_per_call(self, recording: Recording) -> dict[str, float]:
        """Uses of the parameters of every layer by functions, per recorded call. A change indicates another use."""
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        return {
            layer.name: sum(recording.uses.get(id(parameters[name]), 0) for name in layer.block.parameters)
            / len(recording.calls[layer.name])
            for layer in self.inventory.layers
            if layer.name in recording.calls
        }

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Disable autograd, inference mode and autocast, independent of the surrounding modes."""
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            yield

    def zeros(self, *shape: int) -> Tensor:
        """An accumulator on the model's device."""
        with self.computing():
            return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def _attach(self, tracked: TrackedModule, stack: ExitStack) -> None:
        """Hook a module, or replace its forward, until the stack is closed."""
        if tracked.by_function:
            stack.callback(_restore_forward, tracked.module, vars(tracked.module).get("forward"))
            tracked.module.forward = self._inside(tracked, tracked.module.forward)
        elif tracked.forward is None:
            hook = tracked.module.register_forward_hook(self._hook(tracked), prepend=True, with_kwargs=True)
            stack.callback(hook.remove)
        else:
            tracked.module.forward = self._replacement(tracked, tracked.module.forward)
            stack.callback(delattr, tracked.module, "forward")

    def _record_head(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the penultimate features: the input of the head."""
        value = first_input(args, kwargs)
        if self._recording is not None and isinstance(value, Tensor) and not is_foreign(self._thread):
            self._recording.penultimate = value.detach()

    def _inside(self, tracked: TrackedModule, original: Callable[..., object]) -> Callable[..., object]:
        target = _target(tracked)

        def forward(*args: Any, **kwargs: Any) -> object:
            if self._functions is None or is_foreign(self._thread):
                return original(*args, **kwargs)
            with self._functions.inside(target):
                return original(*args, **kwargs)

        return forward

    def _hook(self, tracked: TrackedModule) -> Callable[..., Tensor]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
            value = args[0] if args else next(iter(kwargs.values()))
            return self._emit(tracked, {tracked.layers[0].name: None}, value, output)

        return hook

    def _replacement(self, tracked: TrackedModule, original: Callable[..., object]) -> Callable[..., object]:
        def emit(parts: dict[str, slice | None], value: Tensor, output: Tensor) -> Tensor:
            return self._emit(tracked, parts, value, output)

        def forward(*args: Any, **kwargs: Any) -> object:
            if tracked.forward is None or is_foreign(self._thread):
                return original(*args, **kwargs)
            return tracked.forward(emit, *args, **kwargs)

        return forward

    def _emit(self, tracked: TrackedModule, parts: Mapping[str, slice | None], value: Tensor, output: Tensor) -> Tensor:
        """Record one affine map. If one row serves the whole batch, expand it to B rows."""
        recording = self._recording
        if recording is None or not output.requires_grad or is_foreign(self._thread):
            return output
        names = [layer.name for layer in tracked.layers if layer.name in parts]
        value, output = self._shared_rows(names, value, output, recording.batch_size)
        for name in names:
            recording.add(name, value, output, parts[name])
        return output

    def _shared_rows(
        self, names: Sequence[str], value: Tensor, output: Tensor, batch_size: int
    ) -> tuple[Tensor, Tensor]:
        """Expand a row that serves the whole batch. A view is copied: in-place operations on it would hide the call."""
        if batch_size > 1 and any(self.layouts.get(name) is Layout.SHARED for name in names):
            value = value.expand(batch_size, *value.shape[1:])
            output = output.expand(batch_size, *output.shape[1:])
        elif output._is_view():
            output = output.clone()
        return value, output


def _target(tracked: TrackedModule) -> Target:
    with torch.no_grad():
        shape = tracked.module.weight.shape
    assert isinstance(shape, torch.Size)
    layer = tracked.layers[0]
    assert layer.function is not None
    return Target(layer.name, tracked.module, shape, layer.function)


def _restore_forward(module: nn.Module, previous: object) -> None:
    """Restore the ``forward`` of a module: that of the instance, or that of its class."""
    if previous is None:
        del module.forward
    else:
        module.__dict__["forward"] = previous


def _check_settings(changed: Collection[str]) -> None:
    if changed:
        raise ModelError(
            f"Layer '{min(changed)}' is called with other settings (stride, dilation, groups or padding_idx) than "
            "those of its module, so its gradient cannot be formed. Leave it out with layers= or requires_grad_(False)."
        )


def working_dtype(model: nn.Module) -> torch.dtype:
    """The precision of canonical tensors and factors: float64 if a parameter has it, else float32."""
    doubles = any(parameter.dtype == torch.float64 for parameter in model.parameters())
    return torch.float64 if doubles else torch.float32
