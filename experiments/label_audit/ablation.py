"""Ablation of the pool on development tasks: other weights, members and priors, with the same predictors.

    IFCOMP_DATA=... python -m experiments.label_audit.ablation

Results go to ``results/ablation.json``; tasks with results are skipped.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from experiments.label_audit import tables
from experiments.label_audit.baselines import COMPLEXITY_DAMPING
from experiments.label_audit.cases import Case, Floats
from experiments.label_audit.metrics import f1, ranking
from experiments.label_audit.run import RESULTS, TASKS, save
from ifcomp import IFComp
from ifcomp.evidence.members import Evidence, Member
from ifcomp.tasks.audit import label_table

FILE = RESULTS / "ablation.json"
SEED = 0


@dataclass(frozen=True)
class Pool:
    """Settings of the weights, written independently of the library.

    Attributes:
        power: Exponent of ``1 - r``; 0 gives equal weights.
        uses_margins: Whether labels count by the margin of the other members; otherwise each counts as 1.
        prior: Margins in favour of an echo of 0, relative to the number of examples.
        trained_share: Largest total weight of trained features relative to untrained ones.
        uses_lift: Whether distributions are divided by the class frequencies before they are compared.
        starts_untrained: Whether untrained features judge the other members first; otherwise the weights start equal.
    """

    power: int = 4
    uses_margins: bool = True
    prior: float = 0.03
    trained_share: float = 3.0
    uses_lift: bool = True
    starts_untrained: bool = True


def weights(members: list[Member], labels: np.ndarray, pool: Pool) -> Floats:
    """Return the weight of every member."""
    arrays = [member.probabilities.astype(np.float64) for member in members]
    frequency = np.bincount(labels, minlength=arrays[0].shape[1]) / len(labels)
    divisor = np.where(frequency > 0, frequency, np.inf) if pool.uses_lift else np.ones(len(frequency))

    def margin_of(array: Floats) -> Floats:
        lift = array / divisor
        return margins(lift / lift.sum(1)[:, None], labels)

    agrees = [margin_of(array) > 0 for array in arrays]
    trained = np.array([member.is_trained for member in members])
    factor = np.ones(len(members))
    if (~trained).any():
        factor[trained] = min(1.0, pool.trained_share * (~trained).sum() / trained.sum())
    weight = np.where(trained, 1e-3, 1.0) if pool.starts_untrained and not trained.all() else np.ones(len(members))
    if pool.power == 0:
        return np.ones(len(members))
    for _ in range(40):
        total = np.tensordot(weight, arrays, 1)
        new = np.empty(len(members))
        for i, array in enumerate(arrays):
            margin = margin_of(total - weight[i] * array)
            if not pool.uses_margins:
                margin = np.sign(margin)
            for_label, against = margin.clip(min=0), (-margin).clip(min=0)
            support = (for_label[agrees[i]].sum() + 1) / (for_label.sum() + 1)
            echo = against[agrees[i]].sum() / (against.sum() + max(1, pool.prior * len(labels)))
            new[i] = factor[i] * support * (1 - echo) ** pool.power
        weight = (weight + new / new.max()) / 2
        weight /= weight.max()
    return weight


def margins(probabilities: Floats, labels: np.ndarray) -> Floats:
    """Return the probability of the label minus the largest other one, [N]."""
    rows, others = np.arange(len(labels)), probabilities.copy()
    others[rows, labels] = -np.inf
    result: Floats = probabilities[rows, labels] - others.max(1)
    return result


Choose = Callable[[list[Member]], list[Member]]


def _all(members: list[Member]) -> list[Member]:
    return members


def _correct_prior(members: list[Member], labels: np.ndarray) -> list[Member]:
    """Divide the distributions of predictors by the class frequencies."""
    frequency = np.bincount(labels, minlength=members[0].probabilities.shape[1]) / len(labels)
    result = []
    for member in members:
        p = member.probabilities / np.maximum(frequency, 1 / len(labels))
        result.append(member if member.predictor == "model" else replace(member, probabilities=p / p.sum(1)[:, None]))
    return result


#: Name, settings of the pool and choice of members of every variant.
VARIANTS: Mapping[str, tuple[Pool, Choose]] = {
    "the audit": (Pool(), _all),
    "equal weights": (Pool(power=0), _all),
    "every label counts 1, no prior": (Pool(uses_margins=False, prior=0.0), _all),
    "margins, no prior": (Pool(prior=0.0), _all),
    "prior of 1 %": (Pool(prior=0.01), _all),
    "no limit for trained features": (Pool(trained_share=np.inf), _all),
    "no division by class frequencies": (Pool(uses_lift=False), _all),
    "equal weights at the start": (Pool(starts_untrained=False), _all),
    "votes only": (Pool(), lambda members: [m for m in members if m.predictor != "readout"]),
    "readouts only": (Pool(), lambda members: [m for m in members if m.predictor != "votes"]),
    "without the softmax": (Pool(), lambda members: members[:-1]),
    "without untrained features": (Pool(), lambda members: [m for m in members if m.is_trained]),
}


def judge(evidence: Evidence, members: list[Member], pool: Pool, wrong: np.ndarray) -> dict[str, float | None]:
    """Return AUROC, F1, flagged share and noise rate of one variant."""
    weight = weights(members, evidence.labels, pool)
    pooled = np.tensordot(weight / weight.sum(), [member.probabilities for member in members], 1)
    frame, noise_rate = label_table(pooled, evidence.labels)
    flagged = frame["is_suspect"].to_numpy()
    return {
        "auroc": ranking(frame["score"], wrong),
        "f1": f1(flagged, wrong),
        "flagged": float(flagged.mean()),
        "noise_rate": noise_rate,
    }


def complexity_member(case: Case, evidence: Evidence) -> Member:
    """Return the two-label pNML distribution: the given label, and the label that the model suggests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        table = (
            IFComp(case.model)
            .fit(case.batches, progress=False)
            .score(case.batches, damping=COMPLEXITY_DAMPING, progress=False)
        )
    p = np.exp(-table.column("label_complexity"))
    result, rows = np.zeros((len(p), case.classes)), np.arange(len(p))
    result[rows, table.column("suggested_label")] = 1 - p
    result[rows, evidence.labels] = p
    return Member("model", "model", result)


def variants(case: Case) -> dict[str, dict[str, float | None]]:
    """Return the quality of all variants on one case."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        evidence = IFComp(case.model).audit(case.batches, progress=False).evidence
    members, wrong = list(evidence.members), case.wrong.numpy()
    rows = {name: judge(evidence, choose(members), pool, wrong) for name, (pool, choose) in VARIANTS.items()}
    rows["class-prior correction"] = judge(evidence, _correct_prior(members, evidence.labels), Pool(), wrong)
    if case.complexity_examples is None:
        changed = [*members[:-1], complexity_member(case, evidence)]
        rows["label complexity instead of the softmax"] = judge(evidence, changed, Pool(), wrong)
    return rows


def cases() -> Iterator[tuple[str, Callable[[], Case]]]:
    """Return the development cases of one seed by name, and tables with 5 % wrong labels."""
    for name, task in TASKS.items():
        if task.is_development:
            for stage, build in task.cases(SEED).items():
                if stage == "last":
                    yield name, build
    for source in tables.DEVELOPMENT:
        task = tables.TableTask(source, "symmetric", 0.05)
        yield task.name, task.cases(SEED)["last"]


def main() -> None:
    """Compute what is missing."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {}
    for name, build in cases():
        if name not in results:
            results[name] = variants(build())
            save(FILE, results)


if __name__ == "__main__":
    main()
