"""Plain torch models of images and signals: convolutions of all kinds, also transposed and parametrised."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from experiments.zoo.entry import CLASSES, Entry, normal


class StandardisedConv2d(nn.Conv2d):
    """A convolution with a standardised weight."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        mean, var = weight.mean((1, 2, 3), keepdim=True), weight.var((1, 2, 3), keepdim=True)
        weight = (weight - mean) / (var + 1e-5).sqrt()
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class SqueezeExcite(nn.Module):
    """Scales channels by a gate of their means."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(width, 2, 1), nn.Conv2d(2, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.expand(torch.relu(self.reduce(x.mean((2, 3), keepdim=True)))).sigmoid()


class ViT(nn.Module):
    """A vision transformer with class token, positions and LayerScale."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.token, self.position = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(torch.zeros(1, 5, width))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Linear(16, width))
        self.scale1, self.scale2 = nn.Parameter(torch.full((width,), 0.1)), nn.Parameter(torch.full((width,), 0.1))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.scale1 * self.out(attended)
        x = x + self.scale2 * self.mlp(self.norm2(x))
        return self.head(x[:, 0])


class CachedBias(nn.Module):
    """Attention over pixels with a bias that eval mode caches."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.head = nn.Linear(3, 12), nn.Linear(4, CLASSES)
        self.bias, self.cache = nn.Parameter(torch.zeros(7)), {}
        self.register_buffer("index", (torch.arange(16).view(-1, 1) - torch.arange(16)).clamp(-3, 3) + 3)

    def train(self, mode: bool = True) -> nn.Module:
        if mode:
            self.cache = {}
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        if self.training or "bias" not in self.cache:
            self.cache["bias"] = self.bias[self.index]
        q, k, v = self.qkv(x.flatten(2).transpose(1, 2)).split(4, -1)
        weights = (q @ k.transpose(1, 2) / 2 + self.cache["bias"]).softmax(-1)
        return self.head((weights @ v).mean(1))


class ConvMixer(nn.Module):
    """Depthwise and pointwise convolutions with BatchNorm and a residual connection."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 2, 2), nn.GELU(), nn.BatchNorm2d(width))
        self.depth = nn.Sequential(
            nn.Conv2d(width, width, 3, groups=width, padding="same"), nn.GELU(), nn.BatchNorm2d(width)
        )
        self.point = nn.Sequential(nn.Conv2d(width, width, 1), nn.GELU(), nn.BatchNorm2d(width))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(self.point(x + self.depth(x)).mean((2, 3)))


class Transposed(nn.Module):
    """A convolution of the transposed sequence between BatchNorms, as in models of time series."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)
        self.norm.requires_grad_(False)
        self.conv, self.head = nn.Conv1d(6, 5, 3, padding=1), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, 4]
        x = self.norm(self.first(x).transpose(1, 2))
        return self.head(torch.relu(self.conv(x)).transpose(1, 2).mean(1))


def _pooled(*layers: nn.Module, width: int, dims: int = 2) -> nn.Module:
    pool = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)[dims - 1]
    return nn.Sequential(*layers, nn.GELU(), pool(1), nn.Flatten(), nn.Linear(width, CLASSES))


def _transposed() -> nn.Module:
    return _pooled(nn.Conv2d(3, 4, 2, 2), nn.GELU(), nn.ConvTranspose2d(4, 6, 3, 2, 1, output_padding=1), width=6)


def _transposed_groups() -> nn.Module:
    return _pooled(nn.Conv1d(3, 4, 3), nn.GELU(), nn.ConvTranspose1d(4, 6, 2, groups=2, bias=False), width=6, dims=1)


def _lenet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 8, 2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(32, 10), nn.ReLU(), nn.Linear(10, CLASSES)),
    )


_IMAGES = {
    "LeNet": _lenet,
    "CNN, BatchNorm": lambda: _pooled(nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6), width=6),
    "CNN, GroupNorm": lambda: _pooled(nn.Conv2d(3, 6, 3, padding=1), nn.GroupNorm(2, 6), width=6),
    "CNN, InstanceNorm": lambda: _pooled(nn.Conv2d(3, 6, 3), nn.InstanceNorm2d(6, affine=True), width=6),
    "CNN, grouped and dilated": lambda: _pooled(
        nn.Conv2d(3, 6, 3, dilation=2), nn.GELU(), nn.Conv2d(6, 6, 3, padding=1, groups=3), width=6
    ),
    "CNN, reflected padding": lambda: _pooled(nn.Conv2d(3, 6, 3, padding=1, padding_mode="reflect"), width=6),
    "CNN, squeeze and excite": lambda: _pooled(nn.Conv2d(3, 6, 3), SqueezeExcite(6), width=6),
    "CNN, standardised weights": lambda: _pooled(StandardisedConv2d(3, 6, 3), nn.GroupNorm(2, 6), width=6),
    "CNN, weight_norm": lambda: _pooled(parametrizations.weight_norm(nn.Conv2d(3, 6, 3)), width=6),
    "CNN, spectral_norm": lambda: _pooled(parametrizations.spectral_norm(nn.Conv2d(3, 6, 3)), width=6),
    "CNN, channels last": lambda: _lenet().to(memory_format=torch.channels_last),
    "CNN, PixelShuffle": lambda: _pooled(nn.Conv2d(3, 8, 3), nn.PixelShuffle(2), nn.Conv2d(2, 5, 3), width=5),
    "ConvTranspose2d": _transposed,
    "ConvMixer": ConvMixer,
    "ViT, class token, LayerScale": ViT,
}

ENTRIES = [
    *(Entry(name, "torch", build, normal(3, 8, 8)) for name, build in _IMAGES.items()),
    Entry("attention bias cached in eval mode", "torch", CachedBias, normal(3, 4, 4)),
    Entry("ConvTranspose1d, groups", "torch", _transposed_groups, normal(3, 9)),
    Entry("Conv1d", "torch", lambda: _pooled(nn.Conv1d(3, 6, 3, 2), nn.BatchNorm1d(6), width=6, dims=1), normal(3, 11)),
    Entry(
        "Conv3d", "torch", lambda: _pooled(nn.Conv3d(2, 4, 2), nn.BatchNorm3d(4), width=4, dims=3), normal(2, 4, 4, 4)
    ),
    Entry("Conv1d, transposed, frozen BatchNorm", "torch", Transposed, normal(7, 4)),
]
