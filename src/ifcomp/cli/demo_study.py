"""The study of ``ifcomp demo``: digits with wrong labels, a small network, and the evaluation of three questions.

Settings are chosen on validation digits. Results are measured on test digits, which are altered in other ways.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Generator, Tensor, nn

from ifcomp import IFComp
from ifcomp.tasks.audit import LabelAudit
from ifcomp.tasks.calibration import calibration_summary
from ifcomp.tasks.metrics import auroc
from ifcomp.tasks.ood import OOD_DAMPING
from ifcomp.tasks.simple_scores import loss


@dataclass(frozen=True)
class Digits:
    """Images [N, 1, 8, 8] with values in 0 ... 1, and labels [N]."""

    images: Tensor
    labels: Tensor

    def batches(self, size: int = 250) -> list[tuple[Tensor, Tensor]]:
        """Return batches in order."""
        return list(zip(self.images.split(size), self.labels.split(size), strict=True))

    def select(self, mask: Any) -> Digits:
        """Return the digits for which the mask [N] is true."""
        return Digits(self.images[mask], self.labels[mask])


@dataclass(frozen=True)
class Data:
    """Training digits, of which those in ``flipped`` [N] have a wrong label, and validation and test digits."""

    training: Digits
    flipped: Tensor
    validation: Digits
    test: Digits


def load_data(seed: int) -> Data:
    """Split scikit-learn's digits into 1,000, 300 and 497, and flip 50 training labels to another class."""
    generator = Generator().manual_seed(seed)
    source = load_digits()
    images = torch.tensor(source.images / 16, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(source.target, dtype=torch.int64)
    parts = torch.randperm(len(labels), generator=generator).split([1000, 300, 497])
    training, validation, test = (Digits(images[part], labels[part]) for part in parts)
    chosen = torch.randperm(1000, generator=generator)[:50]
    training.labels[chosen] = (training.labels[chosen] + torch.randint(1, 10, (50,), generator=generator)) % 10
    flipped = torch.zeros(1000, dtype=torch.bool).index_fill(0, chosen, True)
    return Data(training, flipped, validation, test)


# Alterations of images [N, 1, 8, 8] ----------------------------------------------------------------------------------

Alteration = Callable[[Tensor, Generator], Tensor]


def tilt(images: Tensor, _: Generator) -> Tensor:
    """Rotate the images by 25 degrees."""
    sine, cosine = math.sin(math.radians(25)), math.cos(math.radians(25))
    rotation = torch.tensor([[cosine, -sine, 0], [sine, cosine, 0]]).expand(len(images), 2, 3)
    return F.grid_sample(images, F.affine_grid(rotation, list(images.shape), False), align_corners=False)


OOD_INPUTS: dict[str, Alteration] = {
    "inverted digits": lambda images, _: 1 - images,
    "pixel-shuffled digits": lambda images, g: images.flatten(1)[:, torch.randperm(64, generator=g)].view_as(images),
    "uniform noise": lambda images, g: torch.rand(images.shape, generator=g),
}
VALIDATION_SHIFTS: dict[str, Alteration] = {
    "tilted": tilt,
    "partly erased": lambda images, g: images * (torch.rand(images.shape, generator=g) > 0.3),
}
TEST_SHIFTS: dict[str, Alteration] = {
    "clean": lambda images, _: images,
    "blurred": lambda images, _: F.avg_pool2d(images, 3, stride=1, padding=1),
    "noisy": lambda images, g: (images + 0.4 * torch.randn(images.shape, generator=g)).clamp(0, 1),
    "moved": lambda images, _: F.pad(images, (1, -1)),
}

# The network ---------------------------------------------------------------------------------------------------------


def train(digits: Digits, epochs: int, seed: int) -> nn.Module:
    """Train a small CNN with BatchNorm, and return it in eval mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10)),
        )
        optimizer = torch.optim.AdamW(network.parameters(), weight_decay=1e-4)
        steps = epochs * math.ceil(len(digits.labels) / 50)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
        for _ in range(epochs):
            for batch in torch.randperm(len(digits.labels)).split(50):
                optimizer.zero_grad()
                F.cross_entropy(network(digits.images[batch]), digits.labels[batch]).backward()
                optimizer.step()
                schedule.step()
    return network.eval()


def accuracy(network: nn.Module, digits: Digits) -> float:
    """Return the share of correct predictions."""
    return float((network(digits.images).argmax(1) == digits.labels).double().mean())


# The three questions -------------------------------------------------------------------------------------------------


def judge_audit(audit: LabelAudit, network: nn.Module, data: Data) -> dict[str, Any]:
    """Count flipped labels among the suspects and at the top of three rankings."""
    flipped, total = data.flipped, int(data.flipped.sum())

    def judge_ranking(scores: np.ndarray) -> dict[str, float]:
        ranked = flipped[np.argsort(-scores, kind="stable")]
        return {"found": float(ranked[:total].sum()), "auroc": auroc(scores, flipped)}

    top = audit.ranked.head(5)[["index", "label", "suggested", "score"]].rename(columns={"label": "given"})
    first = top["index"].tolist()
    pixels = (16 * data.training.images[first, 0]).round().int().tolist()
    return {
        "headline": audit.headline,
        "examples": len(flipped),
        "flipped": total,
        "suspected": len(audit.suspects),
        "suspected_flipped": int(flipped[audit.suspects["index"].tolist()].sum()),
        "score": judge_ranking(audit.frame["score"].to_numpy()),
        "loss": judge_ranking(loss(network(data.training.images).detach(), data.training.labels)),
        "chance": {"found": total * total / len(flipped), "auroc": 0.5},
        "suspects": top.assign(flipped=flipped[first].numpy(), pixels=pixels).to_dict("records"),
    }


def detect_ood(ifc: IFComp, test: Digits, seed: int) -> list[dict[str, Any]]:
    """Return the AUROC of OOD inputs against test digits, by bounded complexity and by max softmax."""
    is_ood = torch.arange(2 * len(test.images)) >= len(test.images)
    rows = []
    for name, alteration in OOD_INPUTS.items():
        images = torch.cat([test.images, alteration(test.images, Generator().manual_seed(seed))])
        complexity = ifc.bounded_complexity(images, damping=OOD_DAMPING)
        max_softmax = ifc.model(images).detach().softmax(1).amax(1)
        rows.append({"name": name, "complexity": auroc(complexity, is_ood), "max_softmax": auroc(-max_softmax, is_ood)})
    return rows


def calibrate(network: nn.Module, training: Digits, data: Data, seed: int) -> dict[str, Any]:
    """Calibrate on validation digits, clean and shifted, and compare the forms on test digits."""
    validation, test = data.validation, data.test
    shifted = [
        (alteration(validation.images, Generator().manual_seed(seed)), validation.labels)
        for alteration in VALIDATION_SHIFTS.values()
    ]
    ifc = IFComp(network, fisher="exact").fit(training.batches(), progress=False)
    calibration = ifc.calibrate(validation.batches(), shifted, progress=False)
    temperature = float(calibration.frame["temperature"][1])
    rows = []
    for name, alteration in TEST_SHIFTS.items():
        images = alteration(test.images, Generator().manual_seed(seed))
        logits = network(images).detach().double()
        softmax, scaled = logits.softmax(1), (logits / temperature).softmax(1)
        forms = {"softmax": softmax, "temperature": scaled, "ifcomp": ifc.predict_proba(images)}
        metrics = {form: calibration_summary(values, test.labels) for form, values in forms.items()}
        rows.append({"name": name, **metrics})
    chosen = {"alpha": calibration.alpha, "temperature": temperature}
    return {"headline": calibration.headline, **chosen, "chosen_on": ["clean", *VALIDATION_SHIFTS], "rows": rows}
