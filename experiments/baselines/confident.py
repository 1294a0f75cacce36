"""Confident learning with cleanlab on given class probabilities, out of sample or in sample. Larger = more suspicious.

| baseline | what it needs | forward passes per example |
|---|---|---|
| cleanlab, out of sample | one training run for each fold, on all but that fold | 1 |
| cleanlab, in sample | the trained model, which has seen the labels it judges | 1 |

Both take `out_of_sample_probabilities` or `in_sample_probabilities` to `label_suspicion` and `label_issues`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.model_selection import StratifiedKFold
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

from experiments.baselines.features import run_data
from ifcomp.curvature.labels import probabilities as softmax
from ifcomp.errors import DataError, LabelError, MissingPackageError, ModelError, SettingError
from ifcomp.progress import track

Method = Literal["self_confidence", "normalized_margin", "confidence_weighted_entropy"]
Filter = Literal[
    "prune_by_noise_rate",
    "prune_by_class",
    "both",
    "confident_learning",
    "predicted_neq_given",
    "low_normalized_margin",
    "low_self_confidence",
]


def label_suspicion(
    labels: NDArray[Any], probabilities: NDArray[Any], method: Method = "self_confidence"
) -> NDArray[Any]:
    """The label quality of cleanlab with the sign turned, so between -1 and 0, [N]. Larger = more suspicious.

    Args:
        labels: Given labels y, [N].
        probabilities: p, [N, K].
        method: The quality is ``p_y``, the margin ``(p_y - max_{k != y} p_k + 1) / 2``, or
            ``log(1 + u) / u`` with ``u = entropy / (log K p_y)``.

    Raises:
        MissingPackageError: If cleanlab is not installed.
    """
    _check(labels, probabilities)
    _check_choice("method", method, get_args(Method))
    quality = _cleanlab().rank.get_label_quality_scores(labels, probabilities, method=method)
    return -np.asarray(quality)


def label_issues(
    labels: NDArray[Any], probabilities: NDArray[Any], filter_by: Filter = "prune_by_noise_rate"
) -> NDArray[np.bool_]:
    """Which labels cleanlab calls wrong, [N].

    Args:
        labels: Given labels, [N].
        probabilities: [N, K].
        filter_by: How the estimated noise rates become a choice; ``"confident_learning"`` takes the examples off the
            diagonal of the confident joint.

    Raises:
        MissingPackageError: If cleanlab is not installed.
    """
    _check(labels, probabilities)
    _check_choice("filter_by", filter_by, get_args(Filter))
    return np.asarray(_cleanlab().filter.find_label_issues(labels, probabilities, filter_by=filter_by, n_jobs=1))


def in_sample_probabilities(model: nn.Module, data: Iterable[Any], *, progress: bool | None = None) -> NDArray[Any]:
    """The model's own probabilities [N, K], in float64. Cost: one forward pass.

    Args:
        model: The classifier.
        data: Batches; labels are not looked at.
        progress: Show a progress bar; None shows it on terminals.
    """
    return softmax(run_data(model, data, labels=False, progress=progress).logits, 1.0).numpy()


def out_of_sample_probabilities(
    train_function: Callable[[Dataset[Any], int], nn.Module],
    data: Dataset[Any],
    folds: int = 5,
    seed: int = 0,
    *,
    batch_size: int = 256,
    progress: bool | None = None,
) -> NDArray[Any]:
    """Probabilities [N, K] of every example by a model that has not seen it: cross-validation, classes in proportion.

    Cost: ``folds`` training runs, then one forward pass.

    Args:
        train_function: From a part of the data and a seed, ``seed + fold``, to a trained classifier.
        data: A data set of ``(x, y)`` with a length.
        folds: Number of parts, each held out once.
        seed: Of the parts and the training runs.
        batch_size: Of the forward passes.
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
    found: NDArray[Any] | None = None
    for fold, (rest, held_out) in enumerate(track(list(parts), "cross-validation", progress)):
        model = train_function(Subset(data, rest.tolist()), seed + fold)
        loader = DataLoader(Subset(data, held_out.tolist()), batch_size)
        p = in_sample_probabilities(model, loader, progress=False)
        found = np.empty((len(labels), p.shape[1])) if found is None else found
        if p.shape[1] != found.shape[1]:
            raise ModelError(
                f"The model of fold {fold} has {p.shape[1]} logits, that of the first fold {found.shape[1]}. Let "
                "train_function make models for all classes, also if a part lacks some."
            )
        found[held_out] = p
    assert found is not None
    return found


def _labels(data: Dataset[Any]) -> NDArray[np.int64]:
    try:
        given = [data[index][1] for index in range(len(data))]  # type: ignore[arg-type]
        labels = torch.as_tensor(given)
    except (TypeError, ValueError, IndexError, KeyError) as error:
        raise DataError(
            f"Cross-validation needs a data set of (x, y) with a length and whole numbers y, not a "
            f"{type(data).__name__} ({error})."
        ) from error
    if labels.dim() != 1 or labels.is_floating_point() or (labels < 0).any():
        raise LabelError(f"Labels must be whole numbers from 0, but are {labels.dtype} of shape {list(labels.shape)}.")
    return labels.numpy().astype(np.int64)


def _check(labels: NDArray[Any], probabilities: NDArray[Any]) -> None:
    if labels.ndim != 1 or probabilities.ndim != 2 or len(labels) != len(probabilities) or not len(labels):
        raise DataError(
            f"labels must have shape [N] and probabilities [N, K] with N > 0, but have {list(labels.shape)} and "
            f"{list(probabilities.shape)}."
        )
    if not np.issubdtype(labels.dtype, np.integer) or labels.min() < 0 or labels.max() >= probabilities.shape[1]:
        raise LabelError(
            f"labels must be whole numbers in 0 ... {probabilities.shape[1] - 1}, the columns of the probabilities."
        )


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise SettingError(f"{name} must be one of {', '.join(allowed)}, but is {value!r}.")


def _cleanlab() -> ModuleType:
    try:
        import cleanlab
        import cleanlab.filter
        import cleanlab.rank
    except ImportError as error:
        raise MissingPackageError(
            f"Confident learning needs cleanlab, which cannot be imported ({error}): pip install 'ifcomp[cleanlab]'."
        ) from error
    return cleanlab  # type: ignore[no-any-return]
