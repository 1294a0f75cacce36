"""Evaluate the audit and the baselines on every task, seed and stage.

Each result is one JSON file with three parts: the scores of the network, the audit, and five-fold cleanlab. Parts that
exist are not computed again, so that the command resumes. Networks of tables, texts and pairs are trained on demand.
Networks of images must be in the cache (`experiments.label_audit.images`).

    IFCOMP_DATA=... python -m experiments.label_audit.run --development --folds
    IFCOMP_DATA=... python -m experiments.label_audit.run --only "fashion*" --epochs
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from experiments.label_audit import baselines, pairs, stages, tables, texts
from experiments.label_audit.baselines import Cleanlab
from experiments.label_audit.cases import Case
from experiments.label_audit.metrics import f1, ranking
from ifcomp import IFComp
from ifcomp.io.files import atomic_write

RESULTS = Path(__file__).parent / "results"
#: Tasks of the figure of AUROC over epochs.
EPOCH_TASKS = ("cifar10-random1", "fashion-mnist-asymmetric")
#: Number of epochs of the figure, and the step between those with label complexity.
EPOCH_POINTS, COMPLEXITY_EVERY = 12, 3
PARTS = ("scores", "audit", "folds")


class Task(Protocol):
    """A task of the study."""

    @property
    def name(self) -> str: ...
    @property
    def seeds(self) -> tuple[int, ...]: ...
    @property
    def is_development(self) -> bool: ...
    def cases(self, seed: int) -> Mapping[str, Callable[[], Case]]: ...
    def fold_probabilities(self, seed: int, may_train: bool) -> Tensor | None: ...


TASKS: Mapping[str, Task] = {**tables.TASKS, **texts.TASKS, **pairs.TASKS, **stages.TASKS}


def score_part(case: Case, with_complexity: bool = True) -> dict[str, Any]:
    """Return the AUROC of the scores of one network, and in-sample cleanlab."""
    start, wrong = time.perf_counter(), case.wrong.numpy()
    logits, features = baselines.outputs(case.model, case.x)
    in_sample = baselines.cleanlab(case.labels, logits.softmax(1))
    values = {
        "loss": baselines.loss(logits, case.labels),
        "margin": baselines.margin(logits, case.labels),
        "el2n": baselines.el2n(logits, case.labels),
        "raw neighbours": baselines.neighbours(case.raw, case.labels),
        "penultimate neighbours": baselines.neighbours(features, case.labels),
        "in-sample cleanlab": in_sample.score,
    }
    if with_complexity:
        values["label complexity"] = baselines.label_complexity(case)
    predicted = logits.argmax(1)
    memorised = (predicted == case.labels)[case.wrong]
    return {
        "accuracy": float((predicted == case.labels).double().mean()),
        "memorised_wrong": float(memorised.double().mean()) if len(memorised) else None,
        "auroc": {name: ranking(score, wrong[: len(score)]) for name, score in values.items()},
        "in-sample cleanlab": flags(in_sample, wrong),
        "seconds": time.perf_counter() - start,
    }


def flags(result: Cleanlab, wrong: np.ndarray) -> dict[str, Any]:
    """Return F1, flagged share and noise rate of cleanlab, and the F1 of as many labels as the audit would flag."""
    return {
        "f1": f1(result.flags, wrong),
        "ranked_f1": f1(result.ranked, wrong),
        "flagged": float(result.flags.mean()),
        "noise_rate": result.noise_rate,
    }


def audit_part(case: Case) -> dict[str, Any]:
    """Return the quality of the audit, its member weights and warnings."""
    start, wrong = time.perf_counter(), case.wrong.numpy()
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        audit = IFComp(case.model).audit(case.batches, progress=False)
    suspect = audit.frame["is_suspect"].to_numpy(dtype=bool)
    score = audit.frame["score"].to_numpy(dtype=np.float64)
    score = np.where(np.isnan(score), -np.inf, score)
    return {
        "auroc": ranking(score, wrong),
        "f1": f1(suspect, wrong),
        "flagged": float(suspect.mean()),
        "noise_rate": float(audit.noise_rate),
        "memorised": float(audit.memorised),
        "weights": json.loads(audit.weights.to_json(orient="records")),
        "warnings": sorted({str(warning.message)[:200] for warning in raised}),
        "seconds": time.perf_counter() - start,
    }


def fold_part(case: Case, pred_probs: Tensor, accuracy: float) -> dict[str, Any]:
    """Return the quality of five-fold cleanlab."""
    wrong, result = case.wrong.numpy(), baselines.cleanlab(case.labels, pred_probs)
    return {
        "auroc": ranking(result.score, wrong),
        **flags(result, wrong),
        "accuracy": result.accuracy,
        "memorised": accuracy - result.accuracy,
    }


def result_file(folder: Path, task: str, seed: int, stage: str) -> Path:
    """Return the path of one result."""
    return folder / f"{task}_s{seed}_{stage}.json"


def complete(task: Task, seed: int, stage: str, folder: Path, folds: bool, again: tuple[str, ...] = ()) -> bool:
    """Compute the missing parts of one result. Return whether anything was computed.

    Args:
        task: Task.
        seed: Seed.
        stage: Stage.
        folder: Folder of the results.
        folds: Whether five-fold networks may be trained.
        again: Parts to compute again.
    """
    path = result_file(folder, task.name, seed, stage)
    result: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    wanted = [part for part in PARTS if part not in result or part in again]
    p = task.fold_probabilities(seed, folds) if "folds" in wanted and stage != "held-out" else None
    wanted = [part for part in wanted if part != "folds" or p is not None]
    if not wanted:
        return False
    case = task.cases(seed)[stage]()
    head = {"task": task.name, "seed": seed, "stage": stage, "development": task.is_development, "epoch": case.epoch}
    result |= head | {"n": len(case.x), "classes": case.classes, "wrong": float(case.wrong.double().mean())}
    if "scores" in wanted:
        result["scores"] = score_part(case, with_complexity=stage != "held-out")
        save(path, result)
    if "audit" in wanted:
        result["audit"] = audit_part(case)
    if p is not None:
        result["folds"] = fold_part(case, p, result["scores"]["accuracy"])
    save(path, result)
    return True


def over_epochs(task: stages.StagedImages, folder: Path, seed: int = 0) -> None:
    """Write the AUROC of loss, label complexity and audit over the training. The file is resumed."""
    path = folder / f"epochs_{task.name}.json"
    rows: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    stored = task.epochs(seed)
    places = np.unique(np.geomspace(1, len(stored), EPOCH_POINTS).round().astype(int)) - 1 if stored else []
    for number, epoch in enumerate(stored[place] for place in places):
        if str(epoch) in rows:
            continue
        case = task.case(seed, epoch)
        wrong, (logits, _) = case.wrong.numpy(), baselines.outputs(case.model, case.x)
        row = {"loss": ranking(baselines.loss(logits, case.labels), wrong), "audit": audit_part(case)["auroc"]}
        row["memorised_wrong"] = float((logits.argmax(1) == case.labels)[case.wrong].double().mean())
        if number % COMPLEXITY_EVERY == 0 or epoch == stored[-1]:
            score = baselines.label_complexity(case)
            row["label complexity"] = ranking(score, wrong[: len(score)])
        rows[str(epoch)] = row
        save(path, rows)


def selected(only: str, development: bool | None) -> Iterator[Task]:
    """Return the tasks whose name matches the pattern; None selects development and test tasks."""
    for name, task in TASKS.items():
        if fnmatch(name, only) and development in (None, task.is_development):
            yield task


def save(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result as JSON. Atomic."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as scratch:
        scratch.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    """Parse the command line and compute what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="pattern of task names")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--development", dest="development", action="store_const", const=True)
    kind.add_argument("--evidence", dest="development", action="store_const", const=False)
    parser.add_argument("--folds", action="store_true", help="train missing five-fold networks")
    parser.add_argument("--again", nargs="*", default=(), choices=PARTS, help="parts to compute again")
    parser.add_argument("--epochs", action="store_true", help="AUROC over epochs of the tasks of the figure")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for task in selected(arguments.only, arguments.development):
        if arguments.epochs:
            if task.name in EPOCH_TASKS and isinstance(task, stages.StagedImages):
                over_epochs(task, RESULTS)
            continue
        for seed in task.seeds:
            for stage in task.cases(seed):
                complete(task, seed, stage, RESULTS, arguments.folds, tuple(arguments.again))


if __name__ == "__main__":
    main()
