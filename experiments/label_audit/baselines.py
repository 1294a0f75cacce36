"""Scores of labels that people use today. Larger = more suspicious."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import torch
from cleanlab.count import estimate_joint
from cleanlab.filter import find_label_issues
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.label_audit.cases import BATCH, Case, Floats
from ifcomp import IFComp, Relative
from ifcomp.tasks.suspects import label_table

NEIGHBOURS = 50
SMALLEST = 1e-12
#: Damping at which label complexity ranks wrong labels best.
COMPLEXITY_DAMPING = Relative(10.0)


@dataclass(frozen=True)
class Cleanlab:
    """Confident learning on given probabilities.

    Attributes:
        score: ``log p(suggested) - log p(given)`` in nats, [N].
        flags: bool [N], True for label issues.
        ranked: bool [N], True for the labels with the largest scores, as many as the audit would flag.
        noise_rate: Estimated share of wrong labels.
        accuracy: Accuracy of the probabilities on the given labels.
    """

    score: Floats
    flags: NDArray[np.bool_]
    ranked: NDArray[np.bool_]
    noise_rate: float
    accuracy: float


def outputs(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits, float64 [N, K], and penultimate features [N, D], the input of the last linear layer."""
    head = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    features: list[Tensor] = []
    handle = head.register_forward_pre_hook(lambda _, inputs: features.append(inputs[0].detach()))
    try:
        with torch.no_grad():
            logits = torch.cat([model(part).double() for part in x.split(BATCH)])
    finally:
        handle.remove()
    return logits, torch.cat(features)


def loss(logits: Tensor, labels: Tensor) -> Floats:
    """Return the cross-entropy in nats, [N]."""
    return _array(F.cross_entropy(logits.double(), labels, reduction="none"))


def margin(logits: Tensor, labels: Tensor) -> Floats:
    """Return the largest other logit minus the logit of the label, [N]."""
    own = logits.gather(1, labels[:, None]).squeeze(1)
    others = logits.scatter(1, labels[:, None], -torch.inf)
    return _array(others.amax(1) - own)


def el2n(logits: Tensor, labels: Tensor) -> Floats:
    """Return the Euclidean norm of ``softmax - one-hot``, [N]."""
    return _array((logits.double().softmax(1) - F.one_hot(labels, logits.shape[1])).norm(dim=1))


def neighbours(features: Tensor, labels: Tensor, k: int = NEIGHBOURS) -> Floats:
    """Return the share of the k nearest neighbours by cosine that have another label, [N]."""
    unit = F.normalize(features.flatten(1).float())
    k, shares = min(k, len(unit) - 1), []
    for start in range(0, len(unit), BATCH):
        part = slice(start, start + BATCH)
        similarity = unit[part] @ unit.T
        rows = torch.arange(len(similarity))
        similarity[rows, start + rows] = -torch.inf
        nearest = similarity.topk(k).indices
        shares.append((labels[nearest] != labels[part, None]).double().mean(1))
    return _array(torch.cat(shares))


def label_complexity(case: Case) -> Floats:
    """Return the label complexity in nats of the first `Case.complexity_examples` examples."""
    count = case.complexity_examples or len(case.x)
    batches = list(zip(case.x[:count].split(BATCH), case.labels[:count].split(BATCH), strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ifc = IFComp(case.model).fit(batches, progress=False)
        table = ifc.score(batches, damping=COMPLEXITY_DAMPING, progress=False)
    return table.column("label_complexity").astype(np.float64)


def cleanlab(labels: Tensor, pred_probs: Tensor) -> Cleanlab:
    """Return cleanlab's judgement of labels [N] by probabilities [N, K]."""
    given, probability = labels.numpy(), pred_probs.double().clamp_min(SMALLEST)
    probability = probability / probability.sum(1, keepdim=True)
    array = _array(probability)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        flags = find_label_issues(given, array, filter_by="confident_learning", n_jobs=1)
        joint = estimate_joint(given, array)
    accuracy = float((probability.argmax(1) == labels).double().mean())
    ranked = label_table(array, given)[0]["is_suspect"].to_numpy()
    score, noise_rate = margin(probability.log(), labels), float(1 - np.trace(joint))
    return Cleanlab(score, np.asarray(flags, dtype=bool), ranked, noise_rate, accuracy)


def _array(values: Tensor) -> Floats:
    return values.double().numpy()
