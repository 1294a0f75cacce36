"""The study of ``ifcomp demo``: digits with wrong labels, a network that has memorised them, and three questions.

No setting is chosen: the network is trained until it predicts every training label, and everything else has the
defaults of the library.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Generator, Tensor, nn

from ifcomp import IFComp
from ifcomp.detection import OODDetector
from ifcomp.report import Preview
from ifcomp.tasks.audit import LabelAudit
from ifcomp.tasks.calibration import calibration_summary
from ifcomp.tasks.metrics import auroc
from ifcomp.tasks.ood import ood_threshold
from ifcomp.tasks.simple_scores import loss, max_softmax

#: Number of wrong labels among the 1,000 training labels.
WRONG = 50

#: The wrong label of every digit: one that looks similar.
CONFUSED = (6, 7, 3, 8, 9, 6, 0, 1, 3, 4)

#: Largest number of epochs. Training stops when every label is predicted.
MAX_EPOCHS = 100

#: Nominal coverage of the prediction sets.
COVERAGE = 0.95


@dataclass(frozen=True)
class Digits:
    """Images [N, 1, 8, 8] with values in 0 ... 1, and labels [N]."""

    images: Tensor
    labels: Tensor

    def all_shifts(self, seed: int) -> list[tuple[Tensor, Tensor]]:
        """Return one batch of all digits for each of `SHIFTS`."""
        return [(images, self.labels) for _, images in _altered(SHIFTS, self.images, seed)]

    def shifted(self, seed: int) -> Digits:
        """Return the digits, each with a random one of `SHIFTS`."""
        versions = torch.stack([images for images, _ in self.all_shifts(seed)])
        count = len(self.labels)
        chosen = torch.randint(len(SHIFTS), (count,), generator=Generator().manual_seed(seed))
        return Digits(versions[chosen, torch.arange(count)], self.labels)

    def batches(self, size: int = 250) -> list[tuple[Tensor, Tensor]]:
        """Return batches in order."""
        return list(zip(self.images.split(size), self.labels.split(size), strict=True))

    def previews(self, indices: Sequence[int]) -> list[Preview]:
        """Return the images at the given positions, for the report."""
        return [Preview("image", self.images[index, 0]) for index in indices]


@dataclass(frozen=True)
class Data:
    """Training digits, of which those in ``flipped`` [N] have a wrong label, and held-out and test digits."""

    training: Digits
    flipped: Tensor
    held_out: Digits
    test: Digits


def load_data(seed: int) -> Data:
    """Split scikit-learn's digits into 1,000, 300 and 497, and give `WRONG` training digits a similar digit's label."""
    generator = Generator().manual_seed(seed)
    source = load_digits()
    images = torch.tensor(source.images / 16, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(source.target, dtype=torch.int64)
    parts = torch.randperm(len(labels), generator=generator).split([1000, 300, 497])
    training, held_out, test = (Digits(images[part], labels[part]) for part in parts)
    chosen = torch.randperm(1000, generator=generator)[:WRONG]
    training.labels[chosen] = torch.tensor(CONFUSED)[training.labels[chosen]]
    flipped = torch.zeros(1000, dtype=torch.bool).index_fill(0, chosen, True)
    return Data(training, flipped, held_out, test)


# Alterations of images [N, 1, 8, 8] ----------------------------------------------------------------------------------

Alteration = Callable[[Tensor, Generator], Tensor]

OOD_INPUTS: dict[str, Alteration] = {
    "inverted digits": lambda images, _: 1 - images,
    "pixel-shuffled digits": lambda images, g: images.flatten(1)[:, torch.randperm(64, generator=g)].view_as(images),
    "uniform noise": lambda images, g: torch.rand(images.shape, generator=g),
}

#: Alterations of the digits whose predictions are calibrated. Every digit gets one of them.
SHIFTS: dict[str, Alteration] = {
    "clean": lambda images, _: images,
    "blurred": lambda images, _: F.avg_pool2d(images, 3, stride=1, padding=1),
    "noisy": lambda images, g: (images + 0.4 * torch.randn(images.shape, generator=g)).clamp(0, 1),
    "moved": lambda images, _: F.pad(images, (1, -1)),
}

# The network ---------------------------------------------------------------------------------------------------------


def train(digits: Digits, seed: int) -> tuple[nn.Module, int]:
    """Train a small CNN with BatchNorm until it predicts every label. Returns it in eval mode, and the epochs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10)),
        )
        optimizer = torch.optim.AdamW(network.parameters(), 3e-3)
        for epoch in itertools.count(1):
            network.train()
            for batch in torch.randperm(len(digits.labels)).split(50):
                optimizer.zero_grad()
                F.cross_entropy(network(digits.images[batch]), digits.labels[batch]).backward()
                optimizer.step()
            network.eval()
            if accuracy(network, digits) == 1 or epoch == MAX_EPOCHS:
                return network, epoch
    raise AssertionError


def accuracy(network: nn.Module, digits: Digits) -> float:
    """Return the share of correct predictions."""
    return float((logits(network, digits.images).argmax(1) == digits.labels).double().mean())


def logits(network: nn.Module, images: Tensor) -> Tensor:
    """Return the logits [N, K] in float64."""
    with torch.no_grad():
        result: Tensor = network(images).double()
    return result


# The three questions -------------------------------------------------------------------------------------------------


def judge_audit(audit: LabelAudit, network: nn.Module, data: Data) -> dict[str, Any]:
    """Count wrong labels among the suspects, and among as many labels with the largest loss."""
    flipped, suspected = data.flipped, len(audit.suspects)

    def judge_ranking(scores: np.ndarray) -> dict[str, float]:
        ranked = flipped[np.argsort(-scores, kind="stable")]
        return {"found": int(ranked[:suspected].sum()), "auroc": auroc(scores, flipped)}

    top = audit.ranked.head(5)[["index", "label", "suggested", "score"]].rename(columns={"label": "given"})
    first = top["index"].tolist()
    pixels = (16 * data.training.images[first, 0]).round().int().tolist()
    memorised = (logits(network, data.training.images).argmax(1) == data.training.labels)[flipped]
    return {
        "headline": audit.headline,
        "examples": len(flipped),
        "flipped": WRONG,
        "memorised": float(memorised.double().mean()),
        "suspected": suspected,
        "audit": judge_ranking(audit.frame["score"].to_numpy()),
        "loss": judge_ranking(loss(logits(network, data.training.images), data.training.labels)),
        "suspects": top.assign(flipped=flipped[first].numpy(), pixels=pixels).to_dict("records"),
    }


def judge_gate(gate: OODDetector, network: nn.Module, data: Data, seed: int) -> dict[str, Any]:
    """Return the share of inputs that the detector flags, and that max softmax flags at its own threshold."""
    threshold = ood_threshold(max_softmax(logits(network, data.held_out.images).numpy()), gate.rule.tpr)
    rows = []
    for name, images in _altered({"test digits": lambda images, _: images, **OOD_INPUTS}, data.test.images, seed):
        simple = max_softmax(logits(network, images).numpy()) > threshold
        flagged = float(gate.predict(images).double().mean())
        rows.append({"name": name, "gate": flagged, "max_softmax": float(simple.mean())})
    return {"accepted": gate.rule.tpr, "rows": rows}


def judge_predictions(ifc: IFComp, digits: Digits) -> dict[str, Any]:
    """Compare confidence and prediction sets of the softmax and of the calibrated predictions."""
    softmax, calibrated = logits(ifc.model, digits.images).softmax(1), ifc.predict_proba(digits.images)
    sets = ifc.predict_set(digits.images, COVERAGE)
    return {
        "headline": ifc.calibration.headline if ifc.calibration else "",
        "coverage": COVERAGE,
        "softmax": _judge_form(softmax, softmax_sets(softmax, COVERAGE), digits.labels),
        "ifcomp": _judge_form(calibrated, sets, digits.labels),
    }


def softmax_sets(probabilities: Tensor, coverage: float) -> Tensor:
    """Return the smallest sets [N, K] of the most probable labels whose probabilities sum to the coverage."""
    ranked = probabilities.sort(1, descending=True)
    before = ranked.values.cumsum(1) - ranked.values
    return torch.zeros_like(probabilities, dtype=torch.bool).scatter(1, ranked.indices, before < coverage)


def _judge_form(probabilities: Tensor, sets: Tensor, labels: Tensor) -> dict[str, float]:
    return {
        **calibration_summary(probabilities, labels),
        "confidence": float(probabilities.amax(1).mean()),
        "covered": float(sets.gather(1, labels.unsqueeze(1)).double().mean()),
        "size": float(sets.double().sum(1).mean()),
    }


def _altered(alterations: Mapping[str, Alteration], images: Tensor, seed: int) -> list[tuple[str, Tensor]]:
    return [(name, alter(images, Generator().manual_seed(seed))) for name, alter in alterations.items()]
