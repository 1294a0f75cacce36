"""Models of the self-test, and their influence from dense autograd gradients on the CPU in float64.

The oracle shares no code with the fit or with scoring. It differentiates every logit of every example alone. Only the
eigenbasis is that of the fit: the formulas hold in any orthogonal basis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ifcomp.curvature.factors import BlockFactors


@dataclass(frozen=True)
class SelftestCase:
    """A small classifier.

    Attributes:
        name: Name in the table.
        build: Returns the model. It is called under a fixed seed, and every call must give the same weights.
        shape: Shape of one input.
        tokens: Number of different tokens if inputs are indices; None for floating-point inputs.
    """

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    tokens: int | None = None


def build_model(case: SelftestCase) -> nn.Module:
    """Build a model on the CPU in eval mode, with norms and running statistics off their defaults."""
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = case.build()
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
        for name, buffer in model.named_buffers():
            if buffer.is_floating_point():
                buffer.copy_(torch.rand(buffer.shape) + 0.5 if name.endswith("var") else torch.randn(buffer.shape))
    return model.eval()


def make_inputs(case: SelftestCase, count: int, seed: int) -> Tensor:
    """Random inputs on the CPU, in float32 or as indices."""
    generator = torch.Generator("cpu").manual_seed(seed)
    if case.tokens is not None:
        return torch.randint(case.tokens, (count, *case.shape), generator=generator, device="cpu")
    return torch.randn(count, *case.shape, generator=generator, device="cpu")


# Models --------------------------------------------------------------------------------------------------------------


class _Mean(nn.Module):
    """Mean over positions, [B, T, F] to [B, F]."""

    def forward(self, value: Tensor) -> Tensor:
        return value.mean(1)


class _Attention(nn.Module):
    """Self-attention, and a head on the mean token."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, value: Tensor) -> Tensor:
        mixed: Tensor = self.attention(value, value, value, need_weights=False)[0]
        logits: Tensor = self.head(mixed.mean(1))
        return logits


class _ClassToken(nn.Module):
    """Patches, a class token and positions, which are bare parameters, and a transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, 4, 2, 2)
        self.token, self.position = nn.Parameter(torch.zeros(1, 1, 4)), nn.Parameter(torch.zeros(5, 4))
        self.encoder = _encoder()
        self.head = nn.Linear(4, 3)

    def forward(self, value: Tensor) -> Tensor:
        patches = self.patch(value).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(value), -1, -1), patches], 1) + self.position
        logits: Tensor = self.head(self.encoder(tokens)[:, 0])
        return logits


class _Residual(nn.Module):
    """A convolution with BatchNorm that is called twice, around a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 2, 3, padding=1, bias=False), nn.BatchNorm2d(2)
        self.head = nn.Linear(2, 3)

    def forward(self, value: Tensor) -> Tensor:
        for _ in range(2):
            value = value + torch.relu(self.norm(self.conv(value)))
        logits: Tensor = self.head(value.mean((2, 3)))
        return logits


def _encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)


def _convolution(*layers: nn.Module, features: int) -> nn.Module:
    return nn.Sequential(*layers, nn.Tanh(), nn.Flatten(), nn.Linear(features, 3))


#: Models of the package: common layers, three classes each.
CASES = (
    SelftestCase("mlp", lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)), (5,)),
    SelftestCase("tokens", lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), _Mean(), nn.Linear(5, 3)), (6, 4)),
    SelftestCase("conv1d", lambda: _convolution(nn.Conv1d(3, 4, 3), features=20), (3, 7)),
    SelftestCase("conv2d", lambda: _convolution(nn.Conv2d(2, 3, 3, padding=1), features=48), (2, 4, 4)),
    SelftestCase("grouped conv", lambda: _convolution(nn.Conv2d(4, 4, 3, 2, 1, groups=2), features=16), (4, 4, 4)),
    SelftestCase("batchnorm", lambda: _convolution(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), features=12), (2, 4, 4)),
    SelftestCase("groupnorm", lambda: _convolution(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), features=16), (2, 4, 4)),
    SelftestCase("residual", _Residual, (2, 4, 4)),
    SelftestCase("layernorm", lambda: nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 3)), (5,)),
    SelftestCase("embedding", lambda: nn.Sequential(nn.Embedding(7, 4), nn.Tanh(), _Mean(), nn.Linear(4, 3)), (6,), 7),
    SelftestCase("embedding bag", lambda: nn.Sequential(nn.EmbeddingBag(7, 4), nn.Linear(4, 3)), (6,), 7),
    SelftestCase("attention", _Attention, (5, 4)),
    SelftestCase("transformer", lambda: nn.Sequential(_encoder(), _Mean(), nn.Linear(4, 3)), (5, 4)),
    SelftestCase("class token", _ClassToken, (1, 4, 4)),
)


# Dense results -------------------------------------------------------------------------------------------------------


def dense_results(
    model: nn.Module, training: Tensor, inputs: Tensor, blocks: Mapping[str, BlockFactors], damping: float
) -> tuple[dict[str, Tensor], Tensor]:
    """Second moments by block with the exact Fisher, and the influence of every label [B, K].

    Args:
        model: On the CPU.
        training: Examples of the fit, [n, ...].
        inputs: Examples to score, [B, ...].
        blocks: Names, shapes and eigenbases of the blocks.
        damping: Added to the second moments.
    """
    model = model.double()
    (p_training, by_training), (p, by_inputs) = (_label_gradients(model, part) for part in (training, inputs))
    moments, influence = {}, torch.zeros_like(p)
    for name, block in blocks.items():
        squares = _rotated(name, block, by_training).square()
        moments[name] = torch.einsum("by,by...->...", p_training, squares) / len(training)
        squares = _rotated(name, block, by_inputs).square()
        influence += (squares / (moments[name] + damping)).flatten(2).sum(2)
    return moments, influence


def _label_gradients(model: nn.Module, inputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Probabilities [B, K], and gradients ``J^T (p - e_y)`` of every label by parameter, [B, K, *shape]."""
    parameters = dict(model.named_parameters())
    examples = inputs.double() if inputs.is_floating_point() else inputs
    probabilities, rows = [], []
    for example in examples.split(1):
        logits = model(example)[0]
        probabilities.append(logits.detach().softmax(0))
        rows.append([torch.autograd.grad(logit, list(parameters.values()), retain_graph=True) for logit in logits])
    p = torch.stack(probabilities)
    residuals = p.unsqueeze(1) - torch.eye(p.shape[1], dtype=p.dtype, device="cpu")
    gradients = {}
    for position, name in enumerate(parameters):
        jacobian = torch.stack([torch.stack([grads[position] for grads in row]) for row in rows])
        gradients[name] = torch.einsum("byk,bk...->by...", residuals, jacobian)
    return p, gradients


def _rotated(name: str, block: BlockFactors, gradients: Mapping[str, Tensor]) -> Tensor:
    """Gradients of a block in its eigenbasis, ``Q_S^T G Q_A`` [B, K, G, O, J], or [B, K, P] without an eigenbasis."""
    matrices = _matrices(name, block, gradients)
    if block.basis is None:
        return matrices
    if block.basis.outputs is not None:
        matrices = torch.einsum("bygoj,gop->bygpj", matrices, block.basis.outputs.cpu().double())
    if block.basis.inputs is not None:
        matrices = torch.einsum("bygoj,gjq->bygoq", matrices, block.basis.inputs.cpu().double())
    return matrices


def _matrices(name: str, block: BlockFactors, gradients: Mapping[str, Tensor]) -> Tensor:
    """Gradients of a block: weight matrices with the bias as last column, or the vector of a block without a basis."""
    layer, _, part = name.rpartition(".")
    if part in ("q", "k", "v") and f"{layer}.in_proj_weight" in gradients:
        row = "qkv".index(part)
        parts = [gradients[f"{layer}.in_proj_{kind}"].chunk(3, 2)[row] for kind in ("weight", "bias")]
    else:
        prefix = f"{name}." if name else ""  # the model can be a layer itself
        names = [name, f"{prefix}weight", f"{prefix}bias"]
        parts = [gradients[parameter] for parameter in names if parameter in gradients]
    if block.basis is None:
        return torch.cat([values.flatten(2) for values in parts], 2)
    if block.basis.inputs is None:  # an embedding, whose table is [V, D]
        return parts[0].transpose(2, 3).unsqueeze(2)
    groups, outputs, _ = block.second_moments.shape
    return torch.cat([values.reshape(*values.shape[:2], groups, outputs, -1) for values in parts], -1)
