"""What the demo does: train a network on digits with some wrong labels, then ask `IFComp` three questions about it.

Every function returns plain data (`demo_results`), and `demo_tables` shows it. Settings are chosen on validation digits
that are altered in other ways than the test digits; results are measured on test digits only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ifcomp import IFComp, Relative
from ifcomp.cli.demo_data import (
    TEST_SHIFTS,
    TEST_STRANGERS,
    VALIDATION_SHIFTS,
    VALIDATION_STRANGERS,
    Alteration,
    Data,
    Digits,
    load_data,
)
from ifcomp.cli.demo_results import (
    Alpha,
    Audit,
    Calibration,
    Damping,
    Demo,
    Detection,
    Networks,
    OutOfDistribution,
    Quality,
    Ranking,
    Shifted,
    Suspect,
)
from ifcomp.tasks.calibration import accuracy, expected_calibration_error, negative_log_likelihood
from ifcomp.tasks.metrics import auroc
from ifcomp.tasks.mislabel import AUDIT_COLUMN, AUDIT_DAMPING, LabelAudit, audit_labels

#: Wrong labels are learnt last: training with them stops before they are memorised; without them it can go on.
EPOCHS = 7
EPOCHS_CLEANED = 40
BATCH_SIZE = 50
LEARNING_RATE = 3e-3

SUSPECTS_SHOWN = 5

#: Candidates, of which validation digits choose; and how much validation accuracy an alpha may cost.
DAMPINGS = (1e-4, 1e-2, 0.1, 1.0)
ALPHAS = (3e-5, 1e-4, 3e-4, 1e-3)
ACCURACY_COST = 0.01
INVERSE_TEMPERATURES = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0, 3.0)


def run(seed: int, announce: Callable[[str], None]) -> Demo:
    """The whole demo; ``announce`` is told what is being done."""
    started = time.perf_counter()
    data = load_data(seed)
    announce("Training a small network on digits of which 5 % are mislabelled")
    network = train(data.training, EPOCHS, seed)
    announce("Fitting its curvature, and auditing the labels")
    ifc = fit(network, data.training, seed)
    labels = audit_labels(ifc.score(data.training.batches(), damping=AUDIT_DAMPING, progress=False))
    audit = judge_audit(labels, data)
    announce("Training and fitting again without the suspects")
    kept = torch.tensor(labels.frame.loc[~labels.frame["is_suspect"], "index"].to_numpy()).sort().values
    cleaned = Digits(data.training.images[kept], data.training.labels[kept])
    better = train(cleaned, EPOCHS_CLEANED, seed)
    ifc_cleaned = fit(better, cleaned, seed)
    networks = compare_networks(network, better, data, ifc_cleaned)
    announce("Looking for inputs from elsewhere")
    out_of_distribution = detect_strangers(better, ifc_cleaned, data, seed)
    announce("Calibrating predictions")
    calibration = calibrate(better, ifc_cleaned, data, seed)
    sizes = (len(data.training), len(data.validation), len(data.test))
    seconds = time.perf_counter() - started
    return Demo(seed, *sizes, networks, audit, out_of_distribution, calibration, seconds)


# Training ----------------------------------------------------------------------------------------------------------


def build_network() -> nn.Module:
    """Two convolutions with BatchNorm, and two linear layers."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def train(digits: Digits, epochs: int, seed: int) -> nn.Module:
    """A network trained on the digits, in eval mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = build_network().train()
        optimizer = torch.optim.AdamW(network.parameters(), LEARNING_RATE, weight_decay=1e-4)
        steps = epochs * -(-len(digits) // BATCH_SIZE)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
        for _ in range(epochs):
            for batch in torch.randperm(len(digits)).split(BATCH_SIZE):
                optimizer.zero_grad()
                F.cross_entropy(network(digits.images[batch]), digits.labels[batch]).backward()
                optimizer.step()
                schedule.step()
    return network.eval()


def fit(network: nn.Module, digits: Digits, seed: int) -> IFComp:
    """Curvature with the expectation over all ten labels: exact, and still quick on so few examples."""
    return IFComp(network, fisher="exact", seed=seed).fit(digits.batches(), progress=False)


@torch.no_grad()
def logits_of(network: nn.Module, images: Tensor) -> Tensor:
    """The network's own logits [N, K] in float64."""
    found: Tensor = network(images)
    return found.double()


def compare_networks(network: nn.Module, better: nn.Module, data: Data, ifc: IFComp) -> Networks:
    """Accuracy before and after the audit."""
    learnt = logits_of(network, data.training.images).argmax(1) == data.training.labels
    before, after = (logits_of(model, data.test.images).softmax(1) for model in (network, better))
    return Networks(
        parameters=ifc.coverage.total,
        covered=ifc.coverage.covered,
        memorised=float(learnt[data.flipped].double().mean()),
        accuracy=accuracy(before, data.test.labels),
        accuracy_cleaned=accuracy(after, data.test.labels),
    )


# Which labels are wrong? -------------------------------------------------------------------------------------------


def judge_audit(labels: LabelAudit, data: Data) -> Audit:
    """How many flipped labels the audit finds, beside plain loss and chance."""
    frame = labels.frame.sort_values("index")
    suspects = torch.tensor(labels.suspects["index"].to_numpy())
    examples, flipped = len(data.training), int(data.flipped.sum())
    return Audit(
        examples=examples,
        flipped=flipped,
        suspected=len(suspects),
        suspected_flipped=int(data.flipped[suspects].sum()),
        complexity=rank(torch.tensor(frame[AUDIT_COLUMN].to_numpy()), data.flipped),
        loss=rank(torch.tensor(frame["error"].to_numpy()), data.flipped),
        chance=Ranking(flipped * flipped / examples, 0.5),
        suspects=[_suspect(row, data) for row in labels.frame.head(SUSPECTS_SHOWN).itertuples()],
    )


def rank(score: Tensor, flipped: Tensor) -> Ranking:
    """Sort by a score of which larger means more suspicious."""
    first = score.argsort(descending=True)[: int(flipped.sum())]
    return Ranking(float(flipped[first].sum()), auroc(score, flipped))


def _suspect(row: Any, data: Data) -> Suspect:
    return Suspect(
        index=row.index,
        given=row.label,
        suggested=row.suggested_label,
        complexity=row.label_complexity,
        flipped=bool(data.flipped[row.index]),
        pixels=(16 * data.training.images[row.index, 0]).round().int().tolist(),
    )


# Which inputs are new? ---------------------------------------------------------------------------------------------


def detect_strangers(network: nn.Module, ifc: IFComp, data: Data, seed: int) -> OutOfDistribution:
    """Choose the damping on validation digits and their strangers, then measure on test digits and theirs."""
    candidates = [_validate_damping(ifc, damping, data, seed) for damping in DAMPINGS]
    best = max(candidates, key=lambda candidate: candidate.validation_auroc)

    def complexity(images: Tensor) -> Tensor:
        return ifc.bounded_complexity(images, damping=Relative(best.relative))

    def doubt(images: Tensor) -> Tensor:
        return -logits_of(network, images).softmax(1).amax(1)

    ours = separations(complexity, data.test.images, TEST_STRANGERS, seed)
    theirs = separations(doubt, data.test.images, TEST_STRANGERS, seed)
    rows = [Detection(name, ours[name], theirs[name]) for name in TEST_STRANGERS]
    return OutOfDistribution(best, candidates, list(VALIDATION_STRANGERS), rows)


def separations(
    score: Callable[[Tensor], Tensor], images: Tensor, strangers: Mapping[str, Alteration], seed: int
) -> dict[str, float]:
    """AUROC of every kind of strangers, made from the images, against the images themselves."""
    familiar = score(images)
    found = {}
    for name, alter in strangers.items():
        strange = score(alter(images, torch.Generator().manual_seed(seed)))
        is_strange = torch.arange(len(familiar) + len(strange)) >= len(familiar)
        found[name] = auroc(torch.cat([familiar, strange]), is_strange)
    return found


def _validate_damping(ifc: IFComp, damping: float, data: Data, seed: int) -> Damping:
    def complexity(images: Tensor) -> Tensor:
        return ifc.bounded_complexity(images, damping=Relative(damping))

    found = separations(complexity, data.validation.images, VALIDATION_STRANGERS, seed)
    return Damping(damping, sum(found.values()) / len(found))


# How far to trust a prediction? ------------------------------------------------------------------------------------


def calibrate(network: nn.Module, ifc: IFComp, data: Data, seed: int) -> Calibration:
    """Choose alpha, and a temperature to compare with, on validation digits, then measure on test digits."""
    parts = altered(data.validation, VALIDATION_SHIFTS, seed).values()
    validation = Digits(torch.cat([part.images for part in parts]), torch.cat([part.labels for part in parts]))
    inverse = choose_inverse_temperature(logits_of(network, validation.images), validation.labels)
    predicted = {0.0: logits_of(network, validation.images).softmax(1)}
    predicted |= {value: ifc.predict_proba(validation.images, value) for value in ALPHAS}
    candidates = [_validate_alpha(value, found, validation.labels) for value, found in predicted.items()]
    alpha = choose_alpha(candidates)
    rows = []
    for name, digits in altered(data.test, TEST_SHIFTS, seed).items():
        own = logits_of(network, digits.images)
        compared = (own.softmax(1), (inverse * own).softmax(1), ifc.predict_proba(digits.images, alpha.value))
        rows.append(Shifted(name, *(quality(probabilities, digits.labels) for probabilities in compared)))
    return Calibration(alpha, candidates, ACCURACY_COST, inverse, list(VALIDATION_SHIFTS), rows)


def choose_inverse_temperature(logits: Tensor, labels: Tensor) -> float:
    """The one with the smallest NLL."""
    return min(INVERSE_TEMPERATURES, key=lambda beta: negative_log_likelihood((beta * logits).softmax(1), labels))


def choose_alpha(candidates: list[Alpha]) -> Alpha:
    """The smallest NLL of those that cost at most `ACCURACY_COST` beside the softmax, which comes first."""
    enough = candidates[0].validation_accuracy - ACCURACY_COST
    allowed = [candidate for candidate in candidates if candidate.validation_accuracy >= enough]
    return min(allowed, key=lambda candidate: candidate.validation_nll)


def altered(digits: Digits, alterations: Mapping[str, Alteration], seed: int) -> dict[str, Digits]:
    """The digits in every alteration."""
    return {
        name: Digits(alter(digits.images, torch.Generator().manual_seed(seed)), digits.labels)
        for name, alter in alterations.items()
    }


def quality(probabilities: Tensor, labels: Tensor) -> Quality:
    """ECE, NLL and accuracy."""
    return Quality(
        ece=expected_calibration_error(probabilities, labels),
        nll=negative_log_likelihood(probabilities, labels),
        accuracy=accuracy(probabilities, labels),
    )


def _validate_alpha(alpha: float, probabilities: Tensor, labels: Tensor) -> Alpha:
    return Alpha(alpha, negative_log_likelihood(probabilities, labels), accuracy(probabilities, labels))
