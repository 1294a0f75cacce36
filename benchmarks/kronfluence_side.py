"""Kronfluence as reference of fits and self-influence.

Kronfluence covers Linear and Conv2d only and has no SUA, so the library is timed on networks of these layers with
``sua=False``. Both use float32 and the same batches. The times of kronfluence include the files that it always writes.
"""

import copy
import warnings
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from kronfluence.analyzer import Analyzer, prepare_model
from kronfluence.arguments import FactorArguments, ScoreArguments
from kronfluence.task import Task
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

FACTORS, SCORES = "factors", "scores"


class Classification(Task):
    """Task with the cross-entropy summed over the batch, with labels of the data or sampled labels."""

    def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
        """Return the summed cross-entropy."""
        inputs, labels = batch
        logits = model(inputs)
        if sample:
            labels = torch.multinomial(logits.detach().softmax(1), 1).flatten()
        return F.cross_entropy(logits, labels, reduction="sum")

    def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
        """Return the loss; self-influence does not use it."""
        return self.compute_train_loss(batch, model)


class Kronfluence:
    """Kronfluence analysis of a copy of a model."""

    def __init__(self, model: nn.Module, folder: Path) -> None:
        """Prepare a copy of the model; files are written to the folder."""
        task = Classification()
        prepared = prepare_model(copy.deepcopy(model), task)
        self._analyzer = Analyzer(
            "bench", prepared, task, cpu=True, disable_tqdm=True, output_dir=str(folder), log_level=50
        )

    def fit(self, data: TensorDataset, batch: int) -> Path:
        """Fit EKFAC factors with sampled labels, the default of IFComp, and return their folder."""
        with _quiet():
            self._analyzer.fit_all_factors(
                FACTORS,
                data,
                per_device_batch_size=batch,
                factor_args=FactorArguments(strategy="ekfac"),
                overwrite_output_dir=True,
            )
        folder: Path = self._analyzer.factors_output_dir(FACTORS)
        return folder

    def self_influence(self, data: TensorDataset, batch: int) -> Tensor:
        """Return the self-influence of the given labels, [N], at a damping of 0.1 times the mean of each layer."""
        with _quiet():
            self._analyzer.compute_self_scores(
                scores_name=SCORES,
                factors_name=FACTORS,
                train_dataset=data,
                per_device_train_batch_size=batch,
                score_args=ScoreArguments(damping_factor=None),
                overwrite_output_dir=True,
            )
        scores: Tensor = self._analyzer.load_self_scores(SCORES)["all_modules"]
        return scores


def _quiet() -> AbstractContextManager[Any]:
    return warnings.catch_warnings(action="ignore", category=FutureWarning)
