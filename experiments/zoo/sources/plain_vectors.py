"""Plain torch models of vectors: perceptrons, parametrised layers, mixtures of experts, shared and tied weights."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from experiments.zoo.entry import CLASSES, Entry, Inputs, normal


class Residual(nn.Module):
    """``x + scale * branch(x)``; the scale is a parameter (LayerScale)."""

    def __init__(self, width: int, branch: nn.Module, scale: float = 0.1) -> None:
        super().__init__()
        self.branch, self.scale = branch, nn.Parameter(torch.full((width,), scale))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.branch(x)


class FunctionalLinear(nn.Module):
    """Applies the weight of a Linear module by ``F.linear``, with a bias that is a parameter of the parent."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.bias = nn.Linear(6, 8, bias=False), nn.Parameter(torch.zeros(8))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(F.linear(x, weight=self.inner.weight, bias=self.bias)))


class CalledAndFunctional(nn.Module):
    """Calls a Linear module and also applies its weight by ``F.linear``."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(6, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.inner(x))
        return self.head(torch.tanh(F.linear(x, self.inner.weight)))


class Autoencoder(nn.Module):
    """Decodes with the transposed weight of the encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(6, 4), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.encoder(x))
        return self.head(x - hidden @ self.encoder.weight)


class Experts(nn.Module):
    """A mixture of experts. Each is called with the examples that are routed to it, or not at all."""

    def __init__(self, experts: int = 3) -> None:
        super().__init__()
        self.gate = nn.Linear(6, experts)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.GELU()) for _ in range(experts))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(1)
        chosen = (x[:, 0] > 1.0).long() * 2 + (x[:, 0].abs() <= 1.0).long()  # by the input, as hash routing does
        out = x.new_zeros(len(x), 8)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, number : number + 1])
        return self.head(out)


class DenseExperts(Experts):
    """A mixture of experts in which every expert runs on every example."""

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(1)
        return self.head(sum(w.unsqueeze(1) * expert(x) for w, expert in zip(weights.T, self.experts, strict=True)))


class Conditional(nn.Module):
    """Calls a layer only for batches that need it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.extra, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        needed = x[:, 1] > 1.2
        if needed.any():
            hidden = torch.where(needed.unsqueeze(1), torch.tanh(self.extra(hidden)), hidden)
        return self.head(hidden)


class SharedInput(nn.Module):
    """Reads an input without a batch axis, as long as the batch of the scored examples."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position, self.head = nn.Linear(4, 6), nn.Linear(3, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(x) + self.position(positions)).mean(1))


class Maxout(nn.Module):
    """The largest of three affine maps."""

    def __init__(self) -> None:
        super().__init__()
        self.maps, self.head = nn.Linear(6, 24), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.maps(x).unflatten(1, (8, 3)).amax(2))


class Bilinear(nn.Module):
    """A bilinear form of two halves of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.form, self.head = nn.Bilinear(3, 3, 5), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.form(x[:, :3], x[:, 3:])))


class Highway(nn.Module):
    """Highway layers: a gate mixes the input with its transformation."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.maps = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for gate, layer in zip(self.gates, self.maps, strict=True):
            mix = gate(x).sigmoid()
            x = mix * torch.relu(layer(x)) + (1 - mix) * x
        return self.head(x)


class HyperNetwork(nn.Module):
    """A layer whose weight is the output of another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.randn(4))
        self.weights, self.head = nn.Linear(4, 6 * 5), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weights(self.code).view(5, 6)
        return self.head(torch.tanh(F.linear(x, weight)))


class TwoTowers(nn.Module):
    """One network for two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.head = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5)), nn.Linear(15, CLASSES)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        a, b = self.tower(left), self.tower(right)
        return self.head(torch.cat([a, b, a * b], 1))


class Cosine(nn.Module):
    """Cosine similarity with class prototypes, times a learned scale."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.GELU())
        self.prototypes, self.scale = nn.Parameter(torch.randn(CLASSES, 8)), nn.Parameter(torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * F.linear(F.normalize(self.body(x)), F.normalize(self.prototypes))


def _mlp(layer: nn.Module, width: int = 8) -> nn.Module:
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(width, CLASSES))


def _hooked(apply: object) -> nn.Module:
    return _mlp(apply(nn.Linear(6, 8)))  # type: ignore[operator]


def _norms() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.Linear(8, 8),
        nn.LayerNorm(8),
        nn.GELU(),
        nn.Linear(8, CLASSES),
    )


def _residual() -> nn.Module:
    blocks = [Residual(8, nn.Sequential(nn.RMSNorm(8), nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8))) for _ in "ab"]
    return nn.Sequential(nn.Linear(6, 8), *blocks, nn.Linear(8, CLASSES))


def _frozen_batchnorm() -> nn.Module:
    model = _norms()
    model[1].requires_grad_(False)
    return model


def _two(size: int, generator: torch.Generator) -> Inputs:
    return {name: torch.randn(size, 6, generator=generator) for name in ("left", "right")}


def _shared(size: int, generator: torch.Generator) -> Inputs:
    x = torch.randn(size, 8, 4, generator=generator)
    return {"x": x, "positions": torch.linspace(-1, 1, 24).view(8, 3)}


_VECTORS = {
    "MLP": lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, CLASSES)),
    "MLP with norms": _norms,
    "MLP, frozen BatchNorm": _frozen_batchnorm,
    "MLP, residual, LayerScale, RMSNorm": _residual,
    "MLP, PReLU": lambda: nn.Sequential(nn.Linear(6, 8), nn.PReLU(8), nn.Linear(8, CLASSES)),
    "MLP, GLU": lambda: nn.Sequential(nn.Linear(6, 16), nn.GLU(), nn.Linear(8, CLASSES)),
    "MLP, weight_norm": lambda: _hooked(parametrizations.weight_norm),
    "MLP, spectral_norm": lambda: _hooked(parametrizations.spectral_norm),
    "MLP, orthogonal": lambda: _hooked(parametrizations.orthogonal),
    "MLP, weight_norm by a hook": lambda: _hooked(nn.utils.weight_norm),
    "F.linear with a module's weight": FunctionalLinear,
    "Linear, called and by F.linear": CalledAndFunctional,
    "autoencoder, transposed weight": Autoencoder,
    "mixture of experts, routed": Experts,
    "mixture of experts, dense": DenseExperts,
    "layer called conditionally": Conditional,
    "maxout": Maxout,
    "Bilinear": Bilinear,
    "highway": Highway,
    "hypernetwork": HyperNetwork,
    "cosine classifier": Cosine,
}

ENTRIES = [
    *(Entry(name, "torch", build, normal(6)) for name, build in _VECTORS.items()),
    Entry("two towers", "torch", TwoTowers, _two),
    Entry("shared input", "torch", SharedInput, _shared, shared=frozenset({"positions"})),
    Entry("logistic regression", "torch", partial(nn.Linear, 6, CLASSES), normal(6)),
]
