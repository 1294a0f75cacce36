"""Confident learning with cleanlab, on in-sample or out-of-sample probabilities: ``pip install 'ifcomp[cleanlab]'``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.model_selection import StratifiedKFold
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

from experiments.baselines.inference import run_data
from ifcomp.errors import DataError, LabelError, MissingPackageError, ModelError, SettingError
from ifcomp.progress import track

Method = Literal["self_confidence", "normalized_margin", "confidence_weighted_entropy"]


def label_suspicion(
    labels: NDArray[Any], probabilities: NDArray[Any], method: Method = "self_confidence"
) -> NDArray[Any]:
    """Return the negative label quality of cleanlab, between -1 and 0, [N]. Larger = more suspicious.

    Args:
        labels: Given labels y, [N].
        probabilities: p, [N, K].
        method: The quality is ``p_y``, the margin ``(p_y - max_{k != y} p_k + 1) / 2``, or
            ``log(1 + u) / u`` with ``u = entropy / (log K p_y)``.

    Raises:
        MissingPackageError: If cleanlab is not installed.
    """
    try:
        from cleanlab.rank import get_label_quality_scores
    except ImportError as error:
        raise MissingPackageError(
            f"Confident learning needs cleanlab, which cannot be imported ({error}): pip install 'ifcomp[cleanlab]'."
        ) from error
    return -np.asarray(get_label_quality_scores(labels, probabilities, method=method))


def in_sample_probabilities(model: nn.Module, data: Iterable[Any], *, progress: bool | None = None) -> NDArray[Any]:
    """Return ``softmax(f(x))`` of the model that was trained on the data, [N, K] in float64. Cost: one forward pass.

    Args:
        model: The classifier.
        data: Batches; labels are ignored.
        progress: Show a progress bar; None shows it on terminals.
    """
    logits = run_data(model, data, labels=False, progress=progress).logits
    return torch.softmax(logits.double(), 1).numpy()


def out_of_sample_probabilities(
    train_function: Callable[[Dataset[Any], int], nn.Module],
    data: Dataset[Any],
    folds: int = 5,
    seed: int = 0,
    *,
    batch_size: int = 256,
    progress: bool | None = None,
) -> NDArray[Any]:
    """Return ``softmax(f(x))`` of stratified cross-validation, [N, K]: no model was trained on the examples it scores.

    Cost: ``folds`` training runs, then one forward pass.

    Args:
        train_function: Takes a part of the data and a seed, ``seed + fold``; returns a trained classifier.
        data: A data set of ``(x, y)`` with a length.
        folds: Number of parts; each is held out once.
        seed: Seed of the split and of the training runs.
        batch_size: Batch size of the forward passes.
        progress: Show a progress bar; None shows it on terminals.

    Raises:
        SettingError: If a class has fewer examples than there are folds.
    """
    labels = _labels(data)
    smallest = np.bincount(labels)[np.unique(labels)].min()
    if not 2 <= folds <= smallest:
        raise SettingError(
            f"folds must be at least 2 and at most {smallest}, the number of examples of the smallest class, but is "
            f"{folds}."
        )
    parts = StratifiedKFold(folds, shuffle=True, random_state=seed).split(np.zeros(len(labels)), labels)
    rows: dict[int, NDArray[Any]] = {}
    classes: list[int] = []
    for fold, (kept, held_out) in enumerate(track(list(parts), "cross-validation", progress)):
        model = train_function(Subset(data, kept.tolist()), seed + fold)
        probabilities = in_sample_probabilities(
            model, DataLoader(Subset(data, held_out.tolist()), batch_size), progress=False
        )
        rows |= dict(zip(held_out.tolist(), probabilities, strict=True))
        classes.append(probabilities.shape[1])
        if classes[fold] != classes[0]:
            raise ModelError(
                f"The model of fold {fold} has {classes[fold]} logits, that of the first fold {classes[0]}. "
                "train_function must return models for all classes, even if a part lacks a class."
            )
    return np.stack([rows[index] for index in range(len(labels))])


def _labels(data: Dataset[Any]) -> NDArray[np.int64]:
    try:
        labels = torch.as_tensor([data[index][1] for index in range(len(data))])  # type: ignore[arg-type]
    except (TypeError, ValueError, IndexError, KeyError) as error:
        raise DataError(
            f"Cross-validation needs a data set of (x, y) with a length and integer labels y, not a "
            f"{type(data).__name__} ({error})."
        ) from error
    if labels.dim() != 1 or labels.is_floating_point() or (labels < 0).any():
        raise LabelError(f"Labels must be integers from 0, but are {labels.dtype} of shape {list(labels.shape)}.")
    return labels.numpy().astype(np.int64)
