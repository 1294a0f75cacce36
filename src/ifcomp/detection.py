"""OOD detection with a fitted model: member scores of inputs, and `OODDetector`."""

from __future__ import annotations

import html
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from ifcomp._version import __version__
from ifcomp.bounded import SAMPLED_LABELS, bounded_complexity
from ifcomp.curvature.factors import Factors
from ifcomp.curvature.reference import reference_positions, unit_rows
from ifcomp.data.batches import Batch
from ifcomp.distributed import gather_rows, shard_batches
from ifcomp.errors import DataError, IfcompWarning, ModelError, NotFittedError
from ifcomp.evidence.neighbours import NEIGHBOURS, nearest_units
from ifcomp.label_samples import label_passes, sample_size
from ifcomp.scoring import Evaluation, Microbatch, evaluate
from ifcomp.tables import write_csv
from ifcomp.tasks.ood import Floats, check_members, member_weights
from ifcomp.tasks.ood_rule import OODRule
from ifcomp.tasks.ood_table import OODTable, compare_scores, compared_scores, draw_scores

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Largest number of nearest training examples of an input in a table.
NEAREST = 4

#: Smallest number of held-out examples of a detector, and number below which a warning is given.
MIN_HELD_OUT, FEW_HELD_OUT = 20, 200


@dataclass(frozen=True, eq=False)
class MemberScorer:
    """Evaluates member scores of inputs.

    Attributes:
        evaluation: The recorded model and its curvature, inverted with the damping of OOD detection.
    """

    evaluation: Evaluation

    @property
    def neighbour_count(self) -> int:
        """Rank k of the neighbour: 50, or half the mean number of reference examples per class if that is smaller."""
        return max(1, min(NEIGHBOURS, len(self.reference) // (2 * self._classes)))

    @cached_property
    def reference(self) -> Tensor:
        """Normalised features of the reference set in float64, [R, D]."""
        assert self.evaluation.factors.reference is not None
        return unit_rows(self.evaluation.factors.reference)

    @cached_property
    def positions(self) -> Tensor:
        """Positions of the reference set in the training data, [R]."""
        factors = self.evaluation.factors
        return reference_positions(factors.count, len(self.reference), factors.settings.seed)

    def missing(self, members: Sequence[str], is_default: bool) -> dict[str, str]:
        """Return the members that the model does not have, with the reason.

        Args:
            members: Names in `ifcomp.tasks.ood.MEMBERS`.
            is_default: Whether they are the default. It leaves out neighbours with a warning.

        Raises:
            ModelError: If the user named neighbours and the model has no penultimate features.
            NotFittedError: If the factors have no reference set although the model has penultimate features.
        """
        if "neighbours" not in members:
            return {}
        head = self.evaluation.recorder.verified.head
        if head is not None:
            check_reference(self.evaluation.factors, head.features)
            return {}
        reason = "the logits of the model are not the output of a linear layer"
        if not is_default:
            raise ModelError(f"score= names neighbours, but {reason}. Leave neighbours out.")
        return {"neighbours": reason}

    def score_data(self, batches: Iterable[Batch], members: Sequence[str]) -> pd.DataFrame:
        """As `score`. Inside `data_parallel` every process evaluates its share, and all processes return all rows."""
        return gather_rows(self.score(shard_batches(batches), members))

    def score(self, batches: Iterable[Batch], members: Sequence[str]) -> pd.DataFrame:
        """Return prediction, confidence, max softmax, energy and the members of every example, in order.

        Neighbours come with ``nearest``: positions of the nearest training examples, at most `NEAREST`.

        Cost: one forward pass; for complexity 1 + 2K up to 32 classes and 35 beyond.

        Args:
            batches: Inputs.
            members: Names in `ifcomp.tasks.ood.MEMBERS`.
        """
        cotangents = label_passes(self._classes, self._samples) if "complexity" in members else 1

        def step(microbatch: Microbatch) -> pd.DataFrame:
            return self._rows(microbatch, members)

        work = f"OOD scores: {', '.join(members)}"
        rows = list(evaluate(self.evaluation, batches, cotangents, step, work=work))
        return pd.concat(rows, ignore_index=True) if rows else pd.DataFrame({"index": []})

    def _rows(self, microbatch: Microbatch, members: Sequence[str]) -> pd.DataFrame:
        from ifcomp.tasks.simple_scores import energy, max_softmax  # imports scipy, which is slow

        logits, batch = microbatch.logits.cpu().numpy(), microbatch.batch
        uncertainty = max_softmax(logits)
        columns: dict[str, Any] = {
            "index": range(batch.position, batch.position + batch.size),
            "prediction": logits.argmax(1),
            "confidence": 1 - uncertainty,
            "max_softmax": uncertainty,
            "energy": energy(logits),
        }
        if "neighbours" in members:
            features = microbatch.recording.penultimate
            if features is None or features.shape != (batch.size, self.reference.shape[1]):
                raise ModelError(f"{batch.name}: the last layer does not run as in the fit. Give score= without it.")
            near = nearest_units(unit_rows(features).cpu(), self.reference, self.neighbour_count)
            columns["neighbours"] = near.distances[:, -1].numpy()
            columns["nearest"] = list(self.positions[near.indices[:, :NEAREST]].numpy())
        if "complexity" in members:
            columns["complexity"] = bounded_complexity(self.evaluation, microbatch, self._samples).value.cpu().numpy()
        return pd.DataFrame(columns)

    @property
    def _classes(self) -> int:
        return self.evaluation.factors.num_classes

    @property
    def _samples(self) -> int | None:
        """Number of sampled labels of bounded complexity; None evaluates all labels."""
        return sample_size(self._classes, SAMPLED_LABELS)


def build_rule(
    scorer: MemberScorer,
    batches: Iterable[Batch],
    score: str | Sequence[str] | None,
    tpr: float,
    identity: Mapping[str, Any],
) -> OODRule:
    """Score held-out data and return the rule of a detector.

    Args:
        scorer: Evaluates the member scores.
        batches: Held-out inputs.
        score: Names of the members, or None for the default.
        tpr: Share of the held-out inputs to accept.
        identity: Settings that identify model and fit, as plain JSON.

    Raises:
        DataError: If there are too few held-out examples.
    """
    chosen = check_members(score)
    left_out = scorer.missing(chosen, score is None)
    for name, reason in left_out.items():
        warnings.warn(f"The score leaves out {name}: {reason}.", IfcompWarning, stacklevel=4)
    members = tuple(name for name in chosen if name not in left_out)
    frame = scorer.score_data(batches, members)
    if len(frame) < MIN_HELD_OUT:
        raise DataError(f"A detector needs at least {MIN_HELD_OUT} held-out examples, but got {len(frame)}.")
    if len(frame) < FEW_HELD_OUT:
        message = f"{len(frame)} held-out examples are few: the threshold is uncertain. Give {FEW_HELD_OUT} or more."
        warnings.warn(message, IfcompWarning, stacklevel=4)
    settings = {
        **identity,
        "held_out_examples": len(frame),
        "tpr": tpr,
        "members": list(members),
        "left_out": left_out,
        "neighbours": scorer.neighbour_count if "neighbours" in members else None,
        "reference_examples": len(scorer.reference) if "neighbours" in members else None,
        "version": __version__,
    }
    held_out = {name: frame[name].to_numpy(copy=True) for name in members}
    weights = member_weights(held_out, frame["max_softmax"].to_numpy(), members)
    return OODRule(weights, held_out, float(tpr), settings)


def check_reference(factors: Factors, features: int) -> None:
    """Raise NotFittedError if factors have no reference set of penultimate features, or one of another model."""
    if factors.reference is None or factors.reference.shape[1] != features:
        raise NotFittedError(
            "The factors have no reference set of training examples, which the distance to neighbours needs: they come "
            "from another source or an earlier version. Fit again, or leave neighbours out: "
            'score=("complexity", "energy").'
        )


class _Read(Protocol):
    """Member scores of inputs or data; checks that the detector belongs to the fit."""

    def __call__(self, rule: OODRule, data: Any, *, is_data: bool, progress: bool | None = None) -> pd.DataFrame: ...


class OODDetector:
    """Detector of inputs that are unlike the training data, from `IFComp.ood_detector`.

    It belongs to one fit of one model: after another `fit`, or with other weights, its methods raise an error.

    Attributes:
        rule: Members of the score, their held-out values, threshold and settings.

    Example:
        >>> gate = ifc.ood_detector(held_out)
        >>> gate.predict(x)                       # True: unlike the training data
        >>> gate.table(new).flagged
    """

    def __init__(self, rule: OODRule, read: _Read) -> None:
        """Store the rule and the method of the predictor that evaluates member scores."""
        self.rule, self._read = rule, read

    @property
    def threshold(self) -> float:
        """Inputs with a larger score are flagged. It accepts at least the share ``tpr`` of the held-out inputs."""
        return self.rule.threshold

    @property
    def members(self) -> tuple[str, ...]:
        """Names of the joined scores; see `ifcomp.tasks.ood.MEMBERS`."""
        return self.rule.members

    @property
    def settings(self) -> Mapping[str, Any]:
        """Settings of fit and detector: beta, damping, digests of model and fit, sizes, members that are left out."""
        return self.rule.settings

    def score(self, x: Any) -> Tensor:
        """Score of inputs, [B] in float64; larger = more surprising.

        It is ``log (sum_m w_m / p_m) / (sum_m w_m)`` over the members m in nats. p is the smoothed share of held-out
        inputs with a larger value, with an exponential tail (`ifcomp.tasks.ood.join_scores`). A single member is
        returned in its own unit.
        """
        return torch.from_numpy(self._joined(self._read(self.rule, x, is_data=False)))

    def parts(self, x: Any) -> dict[str, Tensor]:
        """Member scores of inputs by name, each [B] in float64 in its own unit; larger = more surprising."""
        frame = self._read(self.rule, x, is_data=False)
        return {name: torch.from_numpy(frame[name].to_numpy(copy=True)) for name in self.members}

    def predict(self, x: Any) -> Tensor:
        """Whether inputs are out-of-distribution, [B] booleans: the score is above the threshold."""
        return self.score(x) > self.threshold

    def table(self, data: Any, *, ood: Any = None, progress: bool | None = None) -> OODTable:
        """Score a data set: one row per example, in order.

        Args:
            data: Inputs to check, as for `IFComp.fit`; labels are not used. In-distribution inputs if ``ood`` is given.
            ood: Inputs that are known to be out-of-distribution. The table then compares the AUROC of the score, its
                members, energy and max softmax, and names the best.
            progress: Show progress bars; None shows them on terminals.
        """
        frame = self._read(self.rule, data, is_data=True, progress=progress)
        score = self._joined(frame)
        names = [name for name in ("index", "name", "prediction", "confidence") if name in frame.columns]
        parts = {name: frame[name] for name in self.members}
        table = frame[names].assign(score=score, **parts, is_ood=score > self.threshold)
        nearest = np.stack(frame["nearest"].to_list()) if "nearest" in frame.columns else None
        if ood is None:
            return OODTable(table, self.rule, nearest=nearest)
        outside = self._read(self.rule, ood, is_data=True, progress=progress)
        comparison = compare_scores(compared_scores(self.rule, frame), compared_scores(self.rule, outside))
        return OODTable(table, self.rule, comparison, self._joined(outside), nearest)

    @property
    def frame(self) -> pd.DataFrame:
        """One row per held-out input in the order of the data: ``index``, ``score``, the members and ``is_ood``."""
        score = self.rule.held_out_scores
        columns = {"index": range(len(score)), "score": score, **self.rule.held_out, "is_ood": score > self.threshold}
        return pd.DataFrame(columns)

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the held-out scores, `frame`, to a CSV file, atomically."""
        write_csv(path, self.frame)

    def plot(self) -> Figure:
        """Draw the distribution of the scores of the held-out inputs, and the threshold."""
        return draw_scores({"held-out": self.rule.held_out_scores}, self.threshold, self.rule.title)

    def _joined(self, frame: pd.DataFrame) -> Floats:
        return self.rule.join({name: frame[name].to_numpy(copy=True) for name in self.members})

    def __repr__(self) -> str:
        missing = "".join(f", without {name}: {reason}" for name, reason in self.settings["left_out"].items())
        return (
            f"OODDetector({self.rule.title}, threshold {self.threshold:.3g} accepts {self.rule.tpr:.4g} of "
            f"{self.rule.size:,} held-out inputs{missing})"
        )

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{html.escape(str(name))}</td><td>{html.escape(str(value))}</td></tr>"
            for name, value in self.settings.items()
        )
        return f"<p>{html.escape(repr(self))}</p><table>{rows}</table>"
