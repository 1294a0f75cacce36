"""Which score of strange inputs is the safe default at beta 1: AUROC beside max softmax and energy.

Bounded and capped complexity need an alpha. Rules that need no strange inputs: 1, as for any training example; or such
that ``alpha/n E[IF]`` has a given mean over the training data. Networks of images are kept in the folder that
IFCOMP_CACHE names.

    IFCOMP_DATA=... IFCOMP_CACHE=... python -m experiments.ood_defaults.run
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.audit_defaults.record import begin, continue_run
from experiments.ood_defaults.situations import Situation, digits, images, table, texts
from ifcomp import IFComp
from ifcomp.complexity import (
    TYPICAL_COMPLEXITY,
    bounded_complexity,
    capped_complexity,
    expected_influence,
)
from ifcomp.tasks.ood import OOD_DAMPING, ood_metrics

HERE = Path(__file__).parent
#: What is run, and how many seeds.
SITUATIONS: dict[str, tuple[Callable[..., Situation], tuple[str, ...], int]] = {
    "breast cancer, MLP": (table, ("breast cancer",), 5),
    "wine, MLP": (table, ("wine",), 5),
    "iris, MLP": (table, ("iris",), 5),
    "topics of texts, MLP": (texts, (), 3),
    "digits, CNN": (digits, ("cnn",), 3),
    "digits, MLP": (digits, ("mlp",), 3),
    "MNIST, LeNet": (images, ("mnist", "lenet"), 0),
    "Fashion-MNIST, LeNet": (images, ("fashion-mnist", "lenet"), 0),
    "CIFAR-10, ResNet-20": (images, ("cifar10", "resnet20"), 0),
}
SETTINGS = {
    "beta": 1.0,
    "damping": OOD_DAMPING.multiple,
    "typical": [0.001, 0.003, 0.01, 0.03, 0.1],
    "capped_typical": [0.01, 1.0],
    "seeds": {name: count or "kept network" for name, (_, _, count) in SITUATIONS.items()},
}
#: Title of each score in the table, in its order; a number is the mean of ``alpha/n E[IF]`` over the training data.
SCORES = {
    "max softmax": "max softmax",
    "energy": "energy",
    "parametric": "parametric",
    "capped, alpha 1": "capped alpha 1",
    **{f"capped, {value:g}": f"capped {value}" for value in SETTINGS["capped_typical"]},
    "bounded, alpha 1": "bounded alpha 1",
    **{f"bounded, {value:g}": f"bounded {value}" for value in SETTINGS["typical"]},
}


def scores(ifc: IFComp, inputs: Tensor) -> dict[str, Tensor]:
    """Every score of some inputs, [N]; larger = more surprising."""
    parts = inputs.split(100)
    with torch.no_grad():
        logits = torch.cat([ifc.model(part) for part in parts]).double()
    influence = torch.cat([ifc.influence(part) for part in parts])
    log_probability, factors = logits.log_softmax(1), ifc.factors
    assert factors is not None
    count, typical = factors.count, factors.effective_parameters(OOD_DAMPING)
    probability = log_probability.exp()
    found = {
        "max softmax": -probability.amax(1),
        "energy": -logits.logsumexp(1),
        "parametric": expected_influence(probability, influence),
    }

    def bounded(weight: float) -> Tensor:
        return bounded_complexity(log_probability, influence, TYPICAL_COMPLEXITY / weight)

    found["capped alpha 1"] = capped_complexity(probability, influence, count, 1.0)
    for value in SETTINGS["capped_typical"]:
        found[f"capped {value}"] = capped_complexity(probability, influence, 1, value / typical)
    found["bounded alpha 1"] = bounded(1 / count)
    return found | {f"bounded {value}": bounded(value / typical) for value in SETTINGS["typical"]}


def unit(make: Callable[..., Situation], given: tuple[Any, ...]) -> dict[str, Any]:
    """AUROC of every score against every kind of strange inputs."""
    case = make(*given)
    fisher = "sampled" if given[-1] == "resnet20" else "exact"
    ifc = IFComp(case.model, SETTINGS["beta"], damping=OOD_DAMPING, fisher=fisher).fit(list(case.train.split(100)))
    usual, strange = scores(ifc, case.usual), {name: scores(ifc, inputs) for name, inputs in case.strange.items()}
    return {
        "auroc": {
            score: {name: ood_metrics(usual[score], found[score]).auroc for name, found in strange.items()}
            for score in usual
        }
    }


def page(results: dict[str, Any]) -> str:
    """Tables as markdown, AUROC in percent."""
    columns = list(SCORES)
    lines = [f"| network | {' | '.join(columns)} |", "|" + "---|" * (len(columns) + 1)]
    every = {name: [run["auroc"] for key, run in results.items() if key.startswith(name)] for name in SITUATIONS}
    means = {
        name: {title: np.mean([list(run[key].values()) for run in runs]) for title, key in SCORES.items()}
        for name, runs in every.items()
        if runs
    }
    rows = means | {"**mean**": {title: np.mean([row[title] for row in means.values()]) for title in columns}}
    lines += [
        f"| {name} | {' | '.join(f'{100 * row[title]:.1f}' for title in columns)} |" for name, row in rows.items()
    ]
    default, plain = f"bounded {TYPICAL_COMPLEXITY}", "parametric"
    lines += ["", "Every kind of strange inputs, parametric → bounded:", "", "| network | kinds |", "|---|---|"]
    for name, runs in every.items():
        if runs:
            kinds = [
                f"{kind} {100 * np.mean([run[plain][kind] for run in runs]):.0f} → "
                f"{100 * np.mean([run[default][kind] for run in runs]):.0f}"
                for kind in runs[0][plain]
            ]
            lines.append(f"| {name} | {'; '.join(kinds)} |")
    return (
        "AUROC in percent of strange against held-out inputs at beta 1, means over kinds of strange inputs and over "
        "seeds. Numbers are the mean of alpha/n E[IF] over the training data, from which alpha follows; the default is "
        f"*bounded, {TYPICAL_COMPLEXITY:g}*. Made by `python -m experiments.ood_defaults.run`; settings, date, "
        "hardware and every run are in ood.json.\n\n" + "\n".join(lines) + "\n"
    )


def main() -> None:
    """Run what is missing, then write the tables."""
    folder = begin(__doc__, HERE / "results")
    units = {
        f"{name} {seed}": partial(unit, make, (*given, seed) if count else given)
        for name, (make, given, count) in SITUATIONS.items()
        for seed in range(count or 1)
    }
    results = continue_run(folder / "ood.json", SETTINGS, units)
    (folder / "ood.md").write_text(page(results))


if __name__ == "__main__":
    main()
