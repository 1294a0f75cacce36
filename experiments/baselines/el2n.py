"""EL2N: the norm of the prediction error."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from experiments.baselines.inference import as_models, run_data


def el2n(models: nn.Module | Sequence[nn.Module], data: Iterable[Any], *, progress: bool | None = None) -> NDArray[Any]:
    """Return ``||p - e_y||_2``, averaged over networks, [N]. Larger = more suspicious.

    The published code averages the squared norm. For one network the order of examples is the same; a mean over
    several networks gives more weight to large errors when they are squared. Cost: one forward pass per network.

    Args:
        models: One network, or several that differ in their seed.
        data: Batches with labels. With several networks it is iterated several times.
        progress: Show a progress bar; None shows it on terminals.
    """
    outputs = [run_data(model, data, progress=progress) for model in as_models(models, data)]
    return np.mean([_error_norms(output.logits, output.labels) for output in outputs], 0)


def _error_norms(logits: Tensor, labels: Tensor | None) -> NDArray[Any]:
    """Return ``||p - e_y||_2`` in float64, [N]."""
    assert labels is not None
    others = torch.softmax(logits.double(), 1).scatter(1, labels.unsqueeze(1), 0.0)
    error = others.sum(1)  # 1 - p_y without cancellation
    return (others.square().sum(1) + error.square()).sqrt().numpy()
