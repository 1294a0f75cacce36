"""Probabilities of a whole data set: the model's own, and the calibrated pNML distribution."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ifcomp import IFComp
from ifcomp.data.batches import as_batches
from ifcomp.data.checks import check_labels
from ifcomp.data.sources import Source
from ifcomp.distributed import process_info
from ifcomp.layers.forward import run_model
from ifcomp.progress import track
from ifcomp.tasks.calibration import ReliabilityCurve, calibration_summary, reliability_curve

#: What the two are called in tables, figures and JSON.
OWN, CALIBRATED = "model", "calibrated"

#: The metrics that are shown.
METRICS = ("accuracy", "nll", "ece", "brier")


@dataclass(frozen=True, eq=False)
class Probabilities:
    """Of N examples: the model's own distribution and the calibrated one, [N, K] each, and labels [N] if there are."""

    own: Tensor
    calibrated: Tensor
    labels: Tensor | None

    def summaries(self) -> dict[str, dict[str, float]]:
        """Metrics of both; needs labels."""
        both = {OWN: self.own, CALIBRATED: self.calibrated}
        return {name: calibration_summary(found, self._truth) for name, found in both.items()}

    def curves(self) -> dict[str, ReliabilityCurve]:
        """Reliability of both; needs labels."""
        both = {OWN: self.own, CALIBRATED: self.calibrated}
        return {name: reliability_curve(found, self._truth) for name, found in both.items()}

    @property
    def _truth(self) -> Tensor:
        assert self.labels is not None
        return self.labels


def probabilities(ifc: IFComp, source: Source, alpha: float, keep_argmax: bool) -> Probabilities:
    """Go over the data once."""
    own, calibrated, labels = [], [], []
    device = next(ifc.model.parameters()).device
    for batch in as_batches(track(source.batches(), "predicting", None if process_info().rank == 0 else False)):
        with torch.no_grad():
            own.append(run_model(ifc.model, batch.to(device)).double().softmax(1).cpu())
        inputs = batch.kwargs or batch.args[0]
        calibrated.append(ifc.predict_proba(inputs, alpha, keep_argmax=keep_argmax).cpu())
        if batch.labels is not None:
            labels.append(check_labels(batch, own[-1].shape[1]))
    return Probabilities(torch.cat(own), torch.cat(calibrated), torch.cat(labels) if labels else None)


def metric_rows(summaries: Mapping[str, Mapping[str, float]]) -> list[tuple[str, ...]]:
    """A row for each name with its metrics."""
    return [(name, *(f"{found[metric]:.4f}" for metric in METRICS)) for name, found in summaries.items()]
