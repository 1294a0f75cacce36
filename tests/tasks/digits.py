"""Handwritten digits with flipped labels, and a small network that trains on them in a second."""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from ifcomp import IFComp, Relative, ScoreTable


def images_and_labels() -> tuple[Tensor, Tensor]:
    """Return the digits [1797, 64] in [0, 1] and their labels."""
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)


def flipped_labels(rate: float, seed: int) -> tuple[Tensor, np.ndarray]:
    """Replace a share of the labels by a uniformly random other class; also return the mask of flipped labels."""
    generator = np.random.default_rng(seed)
    truth = images_and_labels()[1]
    flipped = np.zeros(len(truth), dtype=bool)
    flipped[generator.choice(len(truth), round(rate * len(truth)), replace=False)] = True
    shift = torch.tensor(np.where(flipped, generator.integers(1, 10, len(truth)), 0))
    return (truth + shift) % 10, flipped


def train_network(images: Tensor, labels: Tensor, epochs: int = 8, seed: int = 0) -> nn.Module:
    """Train a multilayer perceptron with one hidden layer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        optimizer = torch.optim.Adam(model.parameters(), 3e-3)
        for _ in range(epochs):
            for batch in torch.randperm(len(images)).split(64):
                optimizer.zero_grad()
                F.cross_entropy(model(images[batch]), labels[batch]).backward()
                optimizer.step()
    return model.eval()


def score_digits(labels: Tensor, beta: float, damping: Relative, epochs: int = 8) -> ScoreTable:
    """Score all digits with a network that was trained on these labels."""
    images = images_and_labels()[0]
    ifc = IFComp(train_network(images, labels, epochs), beta, fisher="exact", damping=damping)
    return ifc.fit([(images, labels)], progress=False).score([(images, labels)], progress=False)
