"""Trainings with label noise and their stages, shared by the studies of wrong labels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from experiments import noise
from experiments.baselines.inference import run_data
from experiments.datasets import Dataset, load, separate
from experiments.reproduce.subject import Subject, sample
from experiments.runs import Trained

#: Share of memorised wrong labels at the stage "middle".
MIDDLE = 0.5
STAGES = ("early", "middle", "late")
#: Offset of noise seeds from the seeds of splits. Equal seeds would put the wrong labels into the held-out examples.
NOISE_SEED = 1000


@dataclass(frozen=True)
class Noisy:
    """Training data with label noise.

    Attributes:
        data: Training data with noisy labels.
        wrong: Mask of the wrong labels, bool [N].
        validation: Validation data with clean labels, as for early stopping in the paper.
    """

    data: Dataset
    wrong: torch.Tensor
    validation: Dataset

    def sampled(self, count: int | None, seed: int) -> Noisy:
        """Return ``count`` random examples; None returns all."""
        if count is None:
            return self
        marks = replace(self.data, labels=self.wrong.long())
        data, wrong = (sample(part, count, seed) for part in (self.data, marks))
        return replace(self, data=data, wrong=wrong.labels.bool())


def apply(data: Dataset, kind: str, seed: int) -> Dataset:
    """Add label noise: "symmetric 0.6", "asymmetric 0.3", "human random1" or "data-dependent"."""
    name, _, value = kind.partition(" ")
    if name == "symmetric":
        return noise.symmetric(data, float(value), seed=seed).data
    if name == "asymmetric":
        pairs = noise.CIFAR10_PAIRS if data.images.dim() == 4 else noise.next_class(len(data.class_names))
        return noise.asymmetric(data, float(value), pairs, seed=seed).data
    return noise.human(data, value).data if name == "human" else noise.data_dependent(data).data


def prepare(subject: Subject, kind: str) -> Noisy:
    """Return the training data with noise. The noise is added to the whole set before it is split."""
    whole = subject.fitted_to(load(subject.data, "train"))
    clean, validation = separate(whole, subject.held_out)
    changed, _ = separate(apply(whole, kind, NOISE_SEED + subject.seed), subject.held_out)
    if subject.examples is not None:
        clean, changed = clean.first(subject.examples), changed.first(subject.examples)
    return Noisy(changed, changed.labels != clean.labels, validation)


def memorised(subject: Subject, model: nn.Module, noisy: Noisy) -> float:
    """Return the share of wrong labels that the network predicts."""
    part = noisy.data.take(noisy.wrong.nonzero()[:, 0], "wrong")
    outputs = run_data(model, subject.batches(part))
    return float((outputs.logits.argmax(1) == outputs.labels).double().mean())


def stages(subject: Subject, noisy: Noisy) -> dict[str, Any]:
    """Train, and return the epochs of the stages.

    "early" is the best epoch on clean validation data, "middle" the first epoch with stored weights at which at least
    half of the wrong labels are memorised (or the last epoch), and "late" the last epoch.
    """
    trained = subject.training(noisy.data, noisy.validation)
    shares = {kept.epoch: memorised(subject, trained.model(kept.epoch), noisy) for kept in trained.checkpoints}
    last = trained.epochs[-1].epoch
    middle = next((epoch for epoch, share in shares.items() if share >= MIDDLE), last)
    accuracy = {row.epoch: row.validation_accuracy for row in trained.epochs}
    best = trained.best_epoch
    return {
        "early": {"epoch": best, "memorised": memorised(subject, trained.model("best"), noisy)},
        "middle": {"epoch": middle, "memorised": shares[middle]},
        "late": {"epoch": last, "memorised": shares[last]},
        "checkpoints": {str(epoch): share for epoch, share in shares.items()},
        "validation_accuracy": {"early": accuracy[best], "late": accuracy[last]},
        "wrong": float(noisy.wrong.double().mean()),
    }


def at_stage(trained: Trained, stage: str, epoch: int) -> nn.Module:
    """Return the network at a stage."""
    return trained.model("best" if stage == "early" else epoch)
