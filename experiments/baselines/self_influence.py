"""Self-influence: the influence of the given label alone, with the factors that IF-COMP uses. Larger = more suspicious.

| baseline | what it needs | forward passes per example |
|---|---|---|
| `self_influence` | an `IFComp` fitted at beta = 1 | 3; none beside a score table, whose column ``influence`` it is |
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from numpy.typing import NDArray

from ifcomp.curvature.factors import Damping
from ifcomp.curvature.labels import Cotangents, label_residuals
from ifcomp.data.batches import as_batches
from ifcomp.data.checks import check_data, check_labels
from ifcomp.errors import EmptyDataError, SettingError
from ifcomp.predictor import IFComp
from ifcomp.progress import track
from ifcomp.scoring import pieces


def self_influence(
    ifc: IFComp, data: Iterable[Any], *, damping: Damping | None = None, progress: bool | None = None
) -> NDArray[Any]:
    """Self-IF: ``g_y^T (G + damping)^-1 g_y`` of the given label at beta = 1, [N]. Larger = more suspicious.

    The column ``influence`` of ``ifc.score(data)``, without the other labels.

    Args:
        ifc: Fitted at beta = 1.
        data: Batches with labels.
        damping: Overrides that of ``ifc``.
        progress: Show a progress bar; None shows it on terminals.

    Raises:
        SettingError: If ``ifc`` is at another temperature.
    """
    if ifc.beta != 1:
        raise SettingError(
            f"Self-influence is that of the ordinary loss, but beta is {ifc.beta}. Fit IFComp(model, beta=1)."
        )
    check_data(data)
    batches = as_batches(track(data, "self-influence", progress))
    first = next(batches, None)
    if first is None:
        raise EmptyDataError("There is no example: the data is empty.")
    evaluation = ifc._evaluation(first, damping)
    found = []
    with evaluation.session.attached():
        for piece in pieces(evaluation, itertools.chain([first], batches), 1):
            labels = check_labels(piece.batch, evaluation.factors.num_classes).to(piece.probability.device)
            residuals = Cotangents.of(label_residuals(piece.probability, labels).unsqueeze(0))
            found.append(piece.evaluator.forms(residuals).squeeze(1))
    return torch.cat(found).cpu().numpy()
