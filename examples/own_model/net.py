"""Your model: ``build`` creates it; running this file trains it and writes weights and data."""

import numpy as np
import torch
from safetensors.torch import load_model, save_model
from sklearn.datasets import load_digits
from torch import nn


def build() -> nn.Module:
    """Return the network without weights, for ``ifcomp fit net:build``."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip


def trained() -> nn.Module:
    """Return the network with its weights."""
    model = build()
    load_model(model, "net.safetensors")
    return model.eval()


def batches(file: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the inputs and labels of a file in batches, in order."""
    with np.load(file) as data:
        return list(zip(*(torch.tensor(data[key]).split(250) for key in ("x", "y")), strict=True))


if __name__ == "__main__":
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16).float().view(-1, 1, 8, 8), torch.tensor(labels)
    wrong = torch.randperm(1000)[:50]  # flip 50 of the 1,000 training labels
    y[wrong] = (y[wrong] + torch.randint(1, 10, (50,))) % 10
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(40):  # until the wrong labels are memorised
        for batch in torch.randperm(1000).split(50):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    save_model(model, "net.safetensors")
    np.savez("train.npz", x=x[:1000], y=y[:1000])
    np.savez("test.npz", x=x[1000:], y=y[1000:])
    np.savez("inverted.npz", x=1 - x[1000:])
    np.savez("noisy.npz", x=(x + 0.3 * torch.randn(x.shape)).clamp(0, 1)[1000:], y=y[1000:])
