"""Influence and second moments from dense autograd gradients, one example at a time, in float64.

Only the eigenbases, the second moments and the order of a block's elements come from the predictor. Every gradient is
computed by ``torch.autograd.grad`` of one logit of one example. ``P`` parameters, ``K`` classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from experiments.zoo.entry import Inputs
from ifcomp import IFComp
from ifcomp.layers.layer import Layer

#: Gradients below this multiple of the model's largest gradient are rounding errors.
ROUNDING = 1e-12

_AFFINE = {
    getattr(torch.nn.functional, name)
    for name in ("linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
}


@dataclass(frozen=True)
class BlockView:
    """One block of a predictor.

    Attributes:
        name: Name of the block.
        parameters: Names of its parameters, or of its effective weights.
        arrange: Arranges arrays by parameter name as one vector in the order of the block.
        sources: Names of the parameters from which effective weights are computed.
    """

    name: str
    parameters: tuple[str, ...]
    arrange: Callable[[Mapping[str, Tensor]], Tensor]
    sources: tuple[str, ...] = ()


def block_views(ifc: IFComp) -> list[BlockView]:
    """Return all blocks of a fitted predictor."""
    assert ifc._recorder is not None
    inventory = ifc._recorder.inventory
    views = [
        _effective_view(layer) if layer.arguments else BlockView(layer.name, layer.block.parameters, layer.gradient)
        for layer in inventory.layers
    ]
    for block in inventory.others:
        names = block.parameters
        views.append(BlockView(block.name, names, lambda values, names=names: _flat(values, names)))
    return views


def _effective_view(layer: Layer) -> BlockView:
    """The block of a layer that is recorded by function. Its weight and bias can be computed from parameters."""
    names = tuple(f"{layer.name}.{argument}" for argument in layer.arguments)
    return BlockView(
        layer.name,
        names,
        lambda values: layer.argument_gradient([values[name] for name in names]),
        layer.block.parameters,
    )


def uncovered(views: Sequence[BlockView], shapes: Mapping[str, torch.Size]) -> list[str]:
    """Return parameters of which an element is in no block, or in several.

    Args:
        views: All blocks.
        shapes: Shapes of the parameters that must be covered.
    """
    total = sum(shape.numel() for shape in shapes.values())
    counts = torch.zeros(total, dtype=torch.int64)
    indices, start = {}, 0
    for name, shape in shapes.items():
        indices[name] = torch.arange(start, start + shape.numel(), dtype=torch.float64).reshape(shape)
        start += shape.numel()
    for view in views:
        for name in view.sources:
            counts[indices[name].long()] += 1
        if not view.sources and all(name in indices for name in view.parameters):
            order = view.arrange({name: indices[name] for name in view.parameters}).long()
            counts.index_add_(0, order, torch.ones_like(order))
    return [name for name, index in indices.items() if not (counts[index.long()] == 1).all()]


def _flat(values: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    return torch.cat([values[name].flatten() for name in names])


class DenseGradients:
    """Gradients of the logits of single examples by parameters and effective weights.

    An effective weight is not a parameter: it is the weight with which a module calls an affine function, such as a
    normalised or standardised weight. It is named like a parameter of the module.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], effective: Sequence[str] = ()) -> None:
        """Bind a model.

        Args:
            model: The classifier, in float64 and eval mode. Its caches are cleared by a change of mode.
            names: Parameters and effective weights to differentiate by.
            effective: Names of effective weights. Names that no parameter has are effective weights in any case.
        """
        self._model = model.requires_grad_(True).train().eval()
        self._names = list(names)
        self._parameters = dict(self._model.named_parameters(remove_duplicate=False))
        self._effective = {name for name in names if name in effective or name not in self._parameters}

    def __call__(self, example: Inputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Return logits [K] and, by name, gradients [K, *shape] of a batch of one."""
        modules = {name.rpartition(".")[0]: [] for name in self._effective}
        with _Capture(self._model, modules):
            output = self._model(**example) if isinstance(example, dict) else self._model(example)
        logits = (output if isinstance(output, Tensor) else output.logits)[0]
        calls = {name: self._calls(name, modules) for name in self._names}
        variables = [variable for found in calls.values() for variable in found]
        rows = [torch.autograd.grad(logit, variables, retain_graph=True, allow_unused=True) for logit in logits]
        grads: dict[str, Tensor] = {}
        start = 0
        for name, found in calls.items():
            stop = start + len(found)
            grads[name] = torch.stack([_total(row[start:stop], found[0]) for row in rows])
            start = stop
        return logits.detach(), grads

    def _calls(self, name: str, captured: Mapping[str, list[dict[str, Tensor]]]) -> list[Tensor]:
        if name not in self._effective:
            return [self._parameters[name]]
        module, _, attribute = name.rpartition(".")
        used = [call[attribute] for call in captured[module]]
        if not used:  # the module is not called, or calls no affine function
            return [self._parameters[name]]
        return list({id(weight): weight for weight in used}.values())


def _total(grads: Sequence[Tensor | None], like: Tensor) -> Tensor:
    given = [grad for grad in grads if grad is not None]
    return torch.stack(given).sum(0) if given else torch.zeros_like(like)


class _Capture(TorchFunctionMode):
    """Records the weights of affine calls inside modules, and evaluates BatchNorm by its formula in eval mode.

    The backward of PyTorch's BatchNorm is wrong for a batch of one with a transposed output gradient on a CPU.
    """

    def __init__(self, model: nn.Module, modules: dict[str, list[dict[str, Tensor]]]) -> None:
        super().__init__()
        self._inside: list[str] = []
        self._modules, self._model, self._hooks = modules, model, []

    def __enter__(self) -> _Capture:
        for name in self._modules:
            module = self._model.get_submodule(name)
            self._hooks.append(module.register_forward_pre_hook(lambda *_, name=name: self._inside.append(name)))
            self._hooks.append(module.register_forward_hook(lambda *_: self._inside.pop() and None))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.batch_norm:
            return _batch_norm(*args, **kwargs)
        if func in _AFFINE and self._inside:
            weight, bias = (_argument(args, kwargs, index, name) for index, name in ((1, "weight"), (2, "bias")))
            self._modules[self._inside[-1]].append({"weight": weight, "bias": bias})
        return func(*args, **kwargs)


def _argument(args: tuple[Any, ...], kwargs: Mapping[str, Any], index: int, name: str) -> Any:
    return args[index] if len(args) > index else kwargs.get(name)


def _batch_norm(
    x: Tensor,
    mean: Tensor | None,
    var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    axes = [axis for axis in range(x.dim()) if axis != 1]
    shape = [1, -1, *[1] * (x.dim() - 2)]
    if training or mean is None or var is None:
        mean, var = x.mean(axes), x.var(axes, unbiased=False)
    normalised = (x - mean.view(shape)) / (var.view(shape) + eps).sqrt()
    scaled = normalised if weight is None else normalised * weight.view(shape)
    return scaled if bias is None else scaled + bias.view(shape)


class Reference:
    """Dense quantities of a fitted predictor."""

    def __init__(self, ifc: IFComp, model: nn.Module) -> None:
        """Bind a predictor and its model.

        Args:
            ifc: The fitted predictor.
            model: A new copy of its model.
        """
        assert ifc.factors is not None
        self.factors, self._beta = ifc.factors, ifc.beta
        self.views = block_views(ifc)
        names = dict.fromkeys(name for view in self.views for name in view.parameters)
        effective = [name for view in self.views if view.sources for name in view.parameters]
        self._dense = DenseGradients(model, list(names), effective)

    def label_gradients(self, example: Inputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Return probabilities [K] and rotated label gradients [K, ...] of every block, for a batch of one."""
        logits, grads = self._dense(example)
        probability = torch.softmax(self._beta * logits, 0)
        residuals = probability.unsqueeze(0) - torch.eye(len(probability), dtype=probability.dtype)
        found = {}
        for view in self.views:
            rows = [view.arrange({name: grads[name][k] for name in view.parameters}) for k in range(len(logits))]
            found[view.name] = self._rotate(view.name, residuals @ torch.stack(rows))
        return probability, found

    def second_moments(self, examples: Sequence[Inputs]) -> dict[str, Tensor]:
        """Return the exact second moments of every block in the fitted eigenbasis."""
        totals: dict[str, Tensor] = {}
        for example in examples:
            probability, gradients = self.label_gradients(example)
            for name, values in gradients.items():
                squares = torch.einsum("k,k...->...", probability, values.square()) / len(examples)
                totals[name] = totals[name] + squares if name in totals else squares
        return totals

    def influence(self, examples: Sequence[Inputs], dampings: Mapping[str, float]) -> Tensor:
        """Return the influence of every label, [B, K].

        Args:
            examples: Batches of one.
            dampings: Absolute damping of every block. Blocks that are not listed have no influence.
        """
        rows = []
        for example in examples:
            _, gradients = self.label_gradients(example)
            parts = [
                (gradients[name].square() / (self.factors.blocks[name].second_moments + damping)).flatten(1).sum(1)
                for name, damping in dampings.items()
            ]
            rows.append(torch.stack(parts).sum(0))
        return torch.stack(rows)

    def _rotate(self, name: str, vectors: Tensor) -> Tensor:
        """Rotate vectors [K, P] into the eigenbasis."""
        block = self.factors.blocks[name]
        shape = block.second_moments.shape
        values = vectors.reshape(len(vectors), *shape)
        if block.basis is None:
            return values
        values = torch.einsum("kgoj,gop->kgpj", values, block.basis.outputs)
        if block.basis.inputs is None:
            return values
        basis = block.basis.inputs
        side = basis.shape[-1]
        if side == shape[2]:
            return torch.einsum("kgpj,gjq->kgpq", values, basis)
        offsets = shape[2] // side  # one basis over the channels serves all offsets of the kernel
        channels = values[..., : side * offsets].unflatten(-1, (side, offsets))
        rotated = torch.einsum("kgpcs,gcd->kgpds", channels, basis).flatten(-2)
        return torch.cat([rotated, values[..., side * offsets :]], -1)


def alive(moments: Mapping[str, Tensor]) -> set[str]:
    """Return the blocks whose gradients exceed the rounding of the model's largest gradient."""
    sizes = {name: float(values.max()) ** 0.5 if values.numel() else 0.0 for name, values in moments.items()}
    limit = ROUNDING * max(sizes.values(), default=0.0)
    return {name for name, size in sizes.items() if size > limit}
