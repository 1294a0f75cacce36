"""OOD detection with a fitted model: member scores of inputs, and `OODDetector`."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import pandas as pd
import torch
from torch import Tensor

from ifcomp import complexity
from ifcomp.curvature.factors import Factors
from ifcomp.curvature.reference import unit_rows
from ifcomp.data.batches import Batch
from ifcomp.distributed import gather_rows, shard_batches
from ifcomp.errors import ModelError, NotFittedError
from ifcomp.evidence.neighbours import NEIGHBOURS, neighbour_distances
from ifcomp.prediction import MAX_EXACT_CLASSES
from ifcomp.scoring import Evaluation, Microbatch, evaluate, label_influence
from ifcomp.tasks.ood import Floats
from ifcomp.tasks.ood_rule import OODRule
from ifcomp.tasks.ood_table import OODTable, compare_scores, compared_scores, draw_scores

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
        factors = self.evaluation.factors
        return max(1, min(NEIGHBOURS, len(self.reference) // (2 * factors.num_classes)))

    @cached_property
    def reference(self) -> Tensor:
        """Normalised features of the reference set in float64, [R, D]."""
        assert self.evaluation.factors.reference is not None
        return unit_rows(self.evaluation.factors.reference)

    def missing(self, members: Sequence[str], is_default: bool) -> dict[str, str]:
        """Return the members to leave out of a score, with the reason.

        Args:
            members: Names in `ifcomp.tasks.ood.MEMBERS`.
            is_default: Whether they are the default, which leaves out complexity for many classes.

        Raises:
            ModelError: If neighbours are not a default and the model has no penultimate features.
            NotFittedError: If the factors have no reference set although the model has penultimate features.
        """
        left_out, classes = {}, self.evaluation.factors.num_classes
        head = self.evaluation.recorder.verified.head
        if is_default and classes > MAX_EXACT_CLASSES:
            left_out["complexity"] = f"it needs a backward pass for each of {classes:,} labels"
        if "neighbours" in members and head is None:
            left_out["neighbours"] = "the logits of the model are not the output of a linear layer"
            if not is_default:
                raise ModelError(f"score= names neighbours, but {left_out['neighbours']}. Leave neighbours out.")
        if "neighbours" in members and head is not None:
            check_reference(self.evaluation.factors, head.features)
        return left_out

    def score_data(self, batches: Iterable[Batch], members: Sequence[str]) -> pd.DataFrame:
        """As `score`. Inside `data_parallel` every process evaluates its share, and all processes return all rows."""
        return gather_rows(self.score(shard_batches(batches), members))

    def score(self, batches: Iterable[Batch], members: Sequence[str]) -> pd.DataFrame:
        """Return prediction, confidence, max softmax, energy and the members of every example, in order.

        Cost: one forward pass, and one backward pass per label for complexity.

        Args:
            batches: Inputs.
            members: Names in `ifcomp.tasks.ood.MEMBERS`.
        """
        classes = self.evaluation.factors.num_classes
        cotangents = classes if "complexity" in members else 1

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
            distances = neighbour_distances(unit_rows(features).cpu(), self.reference, self.neighbour_count)
            columns["neighbours"] = distances.numpy()
        if "complexity" in members:
            columns["complexity"] = self._complexity(microbatch).cpu().numpy()
        return pd.DataFrame(columns)

    def _complexity(self, microbatch: Microbatch) -> Tensor:
        influence = label_influence(microbatch)
        log_probability = torch.log_softmax(self.evaluation.beta * microbatch.logits, 1)
        mean_influence = self.evaluation.effective_parameters or 1.0
        return complexity.bounded_complexity(log_probability, influence, mean_influence)


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

        It is ``log mean_m(1 / p_m)`` over the members m in nats. p is the smoothed share of held-out inputs with a
        larger value (`ifcomp.tasks.ood.join_scores`). A single member is returned in its own unit.
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
        if ood is None:
            return OODTable(table, self.rule)
        outside = self._read(self.rule, ood, is_data=True, progress=progress)
        comparison = compare_scores(compared_scores(self.rule, frame), compared_scores(self.rule, outside))
        return OODTable(table, self.rule, comparison, self._joined(outside))

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
