"""Trained networks with held-out and OOD inputs. None of them is reported in docs/results."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_digits, load_iris, load_wine
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.datasets import load
from experiments.recipes import QUICK
from experiments.reproduce import synthetic_ood
from experiments.reproduce.subject import Subject, sample

TABLES = {"breast cancer": load_breast_cancer, "wine": load_wine, "iris": load_iris}
TOPICS = [
    ["oven", "flour", "butter", "salt", "pepper", "onion", "pan", "soup", "bread", "knife"],
    ["rain", "cloud", "storm", "wind", "sunny", "frost", "fog", "snow", "hail", "thunder"],
    ["goal", "team", "match", "coach", "league", "score", "player", "ball", "referee", "medal"],
]
FILLER = ["the", "a", "with", "and", "then", "before", "after", "some", "very", "quite", "we", "they"]
UNSEEN = ["car", "road", "tree", "river", "house", "book", "lamp", "chair", "paper", "phone"]
WORDS = {word: index for index, word in enumerate([*TOPICS[0], *TOPICS[1], *TOPICS[2], *FILLER, *UNSEEN])}
#: Images per set and images of the fit; few for slow networks.
IMAGES = {"lenet": 300, "resnet20": 100}
FIT_IMAGES = {"lenet": 3000, "resnet20": 500}


@dataclass(frozen=True)
class Situation:
    """A trained network in eval mode with its training inputs, held-out inputs, and OOD inputs by kind."""

    model: nn.Module
    train: Tensor
    held_out: Tensor
    ood: Mapping[str, Tensor]


def trained(model: nn.Module, x: Tensor, y: Tensor, epochs: int, rate: float) -> nn.Module:
    """Train the network with Adam and return it in eval mode."""
    optimizer = torch.optim.Adam(model.parameters(), rate)
    for _ in range(epochs):
        for batch in torch.randperm(len(y)).split(50):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    return model.eval()


def digits(network: str, seed: int) -> Situation:
    """Digits without two classes. OOD inputs: the two classes, altered digits and generated images."""
    torch.manual_seed(seed)
    values, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(labels))
    pixels = torch.tensor((255 / 16 * values[order]).round(), dtype=torch.uint8).reshape(-1, 8, 8)
    left_out = torch.tensor(np.isin(labels[order], (seed % 10, (seed + 3) % 10)))
    y = torch.tensor(np.unique(labels[order][~left_out], return_inverse=True)[1])
    if network == "cnn":
        start = [nn.Unflatten(1, (1, 8)), nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
        model = nn.Sequential(*start, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 8))
    else:
        layers = [nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 8)]
        model = nn.Sequential(*layers)
    known = pixels[~left_out]
    base, generator = known[1100:], torch.Generator().manual_seed(seed)
    sets = {kind: make(base, generator) for kind, make in synthetic_ood.KINDS.items()}
    sets["new classes"] = pixels[left_out]
    x = known / 255
    model = trained(model, x[:800], y[:800], 12 if network == "cnn" else 40, 3e-3)
    return Situation(model, x[:800], x[800:1100], {name: inputs / 255 for name, inputs in sets.items()})


def table(name: str, seed: int) -> Situation:
    """A standardised table. OOD rows have permuted columns, other scales or other locations."""
    torch.manual_seed(seed)
    values, labels = TABLES[name](return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(labels))
    values, y, half = values[order], torch.tensor(labels[order]), len(labels) // 2
    x = torch.tensor(StandardScaler().fit(values[:half]).transform(values), dtype=torch.float32)
    columns, held_out = x.shape[1], x[half:]
    model = nn.Sequential(nn.Linear(columns, 32), nn.ReLU(), nn.Linear(32, int(y.max()) + 1))
    sets = {
        "columns in another order": held_out[:, torch.randperm(columns)],
        "columns of different rows": torch.stack([column[torch.randperm(len(held_out))] for column in held_out.T], 1),
        "noise": 3 * torch.randn_like(held_out),
        "scaled by 5": 5 * held_out,
        "moved by 3": held_out + 3,
        "not standardised": torch.tensor(values[half:], dtype=torch.float32),
    }
    return Situation(trained(model, x[:half], y[:half], 60, 0.01), x[:half], held_out, sets)


def texts(seed: int) -> Situation:
    """Sentences of ten words about one topic. OOD sentences have no topic, all topics, or unseen words."""
    torch.manual_seed(seed)
    generator = np.random.default_rng(seed)

    def sentences(count: int, *sources: list[str]) -> Tensor:
        """Sample sentences with three words of each source and filler words."""
        rows = []
        for _ in range(count):
            words = [word for source in sources for word in generator.choice(source, 3)]
            words += list(generator.choice(FILLER, 10 - len(words)))
            rows.append([WORDS[word] for word in generator.permutation(words)])
        return torch.tensor(rows)

    y = torch.arange(900) % 3
    x = torch.cat([sentences(1, TOPICS[label]) for label in y])
    model = nn.Sequential(
        nn.Embedding(len(WORDS), 16), nn.Flatten(), nn.Linear(160, 64), nn.ReLU(), nn.Linear(64, len(TOPICS))
    )
    sets = {
        "all topics": sentences(300, *TOPICS),
        "no topic": sentences(300),
        "unseen words": sentences(300, UNSEEN),
        "one word": torch.tensor(generator.integers(0, len(WORDS), (300, 1))).expand(300, 10).contiguous(),
    }
    return Situation(trained(model, x[:600], y[:600], 30, 3e-3), x[:600], x[600:], sets)


def images(data: str, network: str) -> Situation:
    """Validation images. OOD inputs: another alphabet, altered images and generated images."""
    subject = Subject(data, network, None if network == "resnet20" else QUICK, 2000 if network == "resnet20" else 5000)
    known, validation, _ = subject.parts()
    images = sample(validation, 2 * IMAGES[network], 1)
    held_out = images.take(torch.arange(0, len(images), 2), "even")
    base = images.take(torch.arange(1, len(images), 2), "odd")
    sets = {kind: synthetic_ood.make(kind, base, 1) for kind in synthetic_ood.KINDS}
    sets["kmnist"] = replace(subject.fitted_to(sample(load("kmnist"), len(base), 1)), labels=None)
    inputs = {
        name: torch.cat([x for (x,) in subject.inputs(part)]) for name, part in (sets | {"held out": held_out}).items()
    }
    train = torch.cat([x for (x,) in subject.inputs(sample(known, FIT_IMAGES[network], 1))])
    return Situation(subject.network(), train, inputs.pop("held out"), inputs)
