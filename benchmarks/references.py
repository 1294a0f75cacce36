"""References of the timings: influence with ``vmap`` as in the paper, gradient norms and a plain forward pass.

They use ``torch.func`` only and share no code with the library, so they also verify its results. Gradients are in
beta-free units: ``g_y = J^T (p - e_y)`` with ``p = softmax(beta f(x))``.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypedDict

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F


class LayerFactors(TypedDict):
    """Eigenbasis and weights of the inverse curvature of one layer.

    The gradient of a layer is a matrix [O, J]: the flattened weight, then the bias as last column.

    Attributes:
        input_basis: Q_A. [J, J] with ``offsets=1``. With ``offsets = kh * kw`` (SUA) it is [C, C] over input channels
            and applies at every kernel offset; the bias column is not rotated. None for a diagonal block.
        output_basis: Q_S, [O, O]. None for a diagonal block.
        weights: 1 / (Lambda + delta), [O, J]; [P] over (weight, bias) for a diagonal block.
        offsets: Number of kernel offsets that share one input basis; column j is ``channel * offsets + offset``.
    """

    input_basis: Tensor | None
    output_basis: Tensor | None
    weights: Tensor
    offsets: int


def paper_influence(
    model: nn.Module, x: Tensor, factors: Mapping[str, LayerFactors], beta: float, chunk: int = 8
) -> Tensor:
    """Return the influence of every label from explicit gradients G: ``sum((Q_S^T G Q_A)^2 * W)`` over layers.

    Args:
        model: Classifier of Linear, Conv2d (one group) and BatchNorm2d layers.
        x: Inputs, [B, ...].
        factors: Factors by layer name; parameters of other layers are ignored.
        beta: Inverse temperature, positive.
        chunk: Number of examples whose K gradients are in memory at once.

    Returns:
        IF_beta(x, y) for every label, [B, K].
    """
    layers = {name: list(_layer_parameters(model, name)) for name in factors}
    parameters = dict(model.named_parameters())
    covered = {key: parameters[key] for keys in layers.values() for key in keys}
    chunks = []
    for gradients in _label_gradients(model, covered, x, beta, chunk):
        blocks = [_block_influence([gradients[key] for key in layers[name]], factors[name]) for name in layers]
        chunks.append(torch.stack(blocks).sum(0))
    return torch.cat(chunks)


def vmap_gradient_norm(model: nn.Module, x: Tensor, beta: float = 1.0, chunk: int = 8) -> Tensor:
    """Return the squared gradient norm of every label over all trainable parameters.

    Args:
        model: Classifier that returns logits [B, K].
        x: Inputs, [B, ...].
        beta: Inverse temperature, positive.
        chunk: Number of examples whose K gradients are in memory at once.

    Returns:
        ``|J^T (p - e_y)|^2`` for every label, [B, K].
    """
    trainable = {key: parameter for key, parameter in model.named_parameters() if parameter.requires_grad}
    return torch.cat(
        [
            torch.stack([g.flatten(2).square().sum(2) for g in gradients.values()]).sum(0)
            for gradients in _label_gradients(model, trainable, x, beta, chunk)
        ]
    )


def forward(model: nn.Module, x: Tensor) -> Tensor:
    """Return the logits [B, K] of inputs [B, ...] in eval mode, without autograd."""
    with _eval_mode(model), torch.no_grad():
        logits: Tensor = model(x)
    return logits


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _label_gradients(
    model: nn.Module, parameters: Mapping[str, Tensor], x: Tensor, beta: float, chunk: int
) -> Iterator[dict[str, Tensor]]:
    """Yield the gradients of ``-log softmax(beta f)[y] / beta`` of all labels per chunk, each [b, K, *shape]."""
    if beta <= 0:
        raise ValueError(f"beta must be positive, but is {beta}")

    def loss(parameters: dict[str, Tensor], example: Tensor, label: Tensor) -> Tensor:
        logits = functional_call(model, parameters, (example[None],))
        return F.cross_entropy(beta * logits, label[None]) / beta

    labels = torch.arange(forward(model, x[:1]).shape[1], device=x.device)
    over_labels = vmap(grad(loss), in_dims=(None, None, 0))
    over_examples = vmap(over_labels, in_dims=(None, 0, None))
    for examples in torch.split(x, chunk):
        # Entered for each chunk, because a generator must not keep modes while its caller runs.
        with _eval_mode(model), torch.no_grad():
            gradients = over_examples(dict(parameters), examples, labels)
        yield gradients


def _layer_parameters(model: nn.Module, name: str) -> Iterator[str]:
    for leaf, _ in model.get_submodule(name).named_parameters(recurse=False):
        yield f"{name}.{leaf}" if name else leaf


def _block_influence(gradients: list[Tensor], factors: LayerFactors) -> Tensor:
    """Return the influence of one layer, [b, K], from the gradients of weight and bias, each [b, K, *shape]."""
    input_basis, output_basis, weights = factors["input_basis"], factors["output_basis"], factors["weights"]
    if input_basis is None or output_basis is None:
        return _join([g.flatten(2) for g in gradients]).square() @ weights
    columns = _join([g.flatten(3) if g.dim() > 3 else g[..., None] for g in gradients])
    rotated = _rotate_columns(output_basis.T @ columns, input_basis, factors["offsets"])
    return rotated.square().flatten(2) @ weights.flatten()


def _rotate_columns(gradient: Tensor, basis: Tensor, offsets: int) -> Tensor:
    """Multiply [b, K, O, J] by the basis at each kernel offset; the bias column is not rotated."""
    if offsets == 1:
        return gradient @ basis
    shared, rest = gradient.tensor_split([len(basis) * offsets], 3)
    rotated = basis.T @ shared.reshape(*shared.shape[:3], len(basis), offsets)
    return _join([rotated.flatten(3), rest])


def _join(parts: list[Tensor]) -> Tensor:
    """Concatenate along the last axis, without a copy if only one part is non-empty."""
    non_empty = [part for part in parts if part.shape[-1]]
    return non_empty[0] if len(non_empty) == 1 else torch.cat(non_empty, -1)
