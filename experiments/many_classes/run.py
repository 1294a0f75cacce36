"""Compare predictions and OOD scores from sampled labels with those from all labels, on pairs of MNIST digits.

Run it with: IFCOMP_DATA=... python -m experiments.many_classes.run LeNet
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import environment
from experiments.many_classes.networks import Problem, build
from experiments.runs import cache_folder
from ifcomp import IFComp, complexity
from ifcomp.io.files import atomic_write
from ifcomp.tasks.ood import OOD_DAMPING, ood_metrics

RESULTS = Path(__file__).parent / "results"
TESTED, PER_OOD_SET, SEEDS, BATCH = 200, 100, 10, 50

#: Mean of ``alpha/n E[IF]`` over the training data in the comparison of predictions.
ADDED_PROBABILITY = 0.01


def fitted(problem: Problem) -> IFComp:
    """Fit the curvature on all training pairs, or read it from the cache."""
    path = cache_folder() / "many_classes" / f"{problem.name}.ifcomp"
    if not path.exists():
        IFComp(problem.model).fit(problem.train, progress=False).save(path)
    return IFComp.load(path, problem.model)


def with_seeds(ifc: IFComp) -> Iterator[IFComp]:
    """Return predictors with the same factors and other samples of labels."""
    assert ifc.factors is not None
    for seed in range(SEEDS):
        settings = replace(ifc.factors.settings, seed=seed)
        yield IFComp.from_factors(ifc.model, replace(ifc.factors, settings=settings))


def all_labels(ifc: IFComp, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return log p and the influence of every label, each [B, K]."""
    influence = torch.cat([ifc.influence(part, damping=OOD_DAMPING) for part in x.split(BATCH)])
    with torch.no_grad():
        return torch.cat([ifc.model(part).double().log_softmax(1) for part in x.split(BATCH)]), influence


def scores(ifc: IFComp, x: Tensor) -> dict[str, Tensor]:
    """Return exact scores [B], and estimates and their errors [seeds, B]."""
    assert ifc.factors is not None
    logs, influence = all_labels(ifc, x)
    mean, count = ifc.factors.effective_parameters(OOD_DAMPING), ifc.factors.count
    expected = complexity.expected_influence(logs.exp(), influence)
    found = {
        "bounded": complexity.bounded_complexity(logs, influence, mean),
        "expected": expected,
        "log_probability": logs,
    }
    bounded = [each.bounded_complexity(x, damping=OOD_DAMPING, return_error=True) for each in with_seeds(ifc)]
    found["sampled"], found["error"] = (torch.stack(parts) for parts in zip(*bounded, strict=True))
    probed = [each.parametric_complexity(x, probes=2, linearized=True, damping=OOD_DAMPING) for each in with_seeds(ifc)]
    alpha = ADDED_PROBABILITY * count / mean
    predicted = [each.predict_proba(x, alpha, damping=OOD_DAMPING) for each in with_seeds(ifc)]
    return found | {
        "probed": count * torch.stack(probed),
        "fast": torch.stack(predicted),
        "alpha_n": torch.tensor(alpha / count),
    }


def summarise(found: Mapping[str, Tensor]) -> dict[str, float]:
    """Return errors of the estimates of one set of inputs."""
    difference = found["sampled"] - found["bounded"]
    added = found["alpha_n"] * found["expected"]
    exact = complexity.argmax_keeping_distribution(found["log_probability"].exp(), added, 1, 1.0)
    softmax = found["log_probability"].exp()
    return {
        "outside_3_errors": float(((difference / found["error"]).abs() > 3).double().mean()),
        "rmse_nats": float(difference.square().mean().sqrt()),
        "mean_bounded_nats": float(found["bounded"].mean()),
        "probes_error": float((found["probed"] - found["expected"]).abs().mean() / found["expected"].mean()),
        "tv_fast_exact": float((found["fast"] - exact).abs().sum(-1).mean() / 2),
        "tv_softmax_exact": float((softmax - exact).abs().sum(-1).mean() / 2),
    }


def likelihoods(found: Mapping[str, Tensor], y: Tensor) -> dict[str, float]:
    """Return the NLL in nats of softmax, exact and estimated distributions."""
    softmax = found["log_probability"].exp()
    exact = complexity.argmax_keeping_distribution(softmax, found["alpha_n"] * found["expected"], 1, 1.0)

    def nll(p: Tensor) -> float:
        return float(-p.gather(1, y.unsqueeze(1)).log().mean())

    return {"softmax": nll(softmax), "exact": nll(exact), "fast": nll(found["fast"][0])}


def separation(inside: Mapping[str, Tensor], outside: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the AUROC of exact scores, and its mean and standard deviation over label samples."""
    result: dict[str, Any] = {name: ood_metrics(inside[name], outside[name]).auroc for name in ("bounded", "expected")}
    for name in ("sampled", "probed"):
        values = torch.tensor([ood_metrics(*pair).auroc for pair in zip(inside[name], outside[name], strict=True)])
        result[name] = {"mean": float(values.mean()), "deviation": float(values.std())}
    return result


def main() -> None:
    """Measure one network and write the results."""
    torch.set_num_threads(1)
    problem = build(sys.argv[1])
    ifc = fitted(problem)
    x, y = (part[:TESTED] for part in problem.test)
    test = scores(ifc, x)
    results: dict[str, Any] = {
        "date": date.today().isoformat(),
        "environment": environment(),
        "sizes": {"test": TESTED, "per_ood_set": PER_OOD_SET, "seeds": SEEDS},
        "accuracy": float((test["log_probability"].argmax(1) == y).double().mean()),
        "nll": likelihoods(test, y),
        "sets": {"test": summarise(test)},
        "auroc": {},
    }
    for name, inputs in problem.ood.items():
        found = scores(ifc, inputs[:PER_OOD_SET])
        results["sets"][name], results["auroc"][name] = summarise(found), separation(test, found)
        RESULTS.mkdir(exist_ok=True)
        with atomic_write(RESULTS / f"{problem.name}.json") as scratch:
            scratch.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
