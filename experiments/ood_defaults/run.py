"""Scores of OOD inputs at beta 1: AUROC of complexities, max softmax and energy.

Bounded and capped complexity need an alpha. Two rules need no OOD inputs: alpha = 1, the weight of a training example,
and the alpha for which ``alpha/n E[IF]`` has a given mean over the training data. Image networks are cached in the
folder IFCOMP_CACHE.

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
from ifcomp.complexity import BOUNDED_ADDED_PROBABILITY, bounded_complexity, capped_complexity, expected_influence
from ifcomp.tasks.ood import OOD_DAMPING, ood_metrics

HERE = Path(__file__).parent
#: Function, arguments and number of seeds of each situation; 0 seeds: one published or cached network.
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
#: Scores by their titles in the table. Numbers are means of ``alpha/n E[IF]`` over the training data.
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
    """Return every score of the inputs, each [N]; larger = more surprising."""
    parts = inputs.split(100)
    with torch.no_grad():
        logits = torch.cat([ifc.model(part) for part in parts]).double()
    influence = torch.cat([ifc.influence(part) for part in parts])
    log_probability, factors = logits.log_softmax(1), ifc.factors
    assert factors is not None
    count, mean_influence = factors.count, factors.effective_parameters(OOD_DAMPING)
    probability = log_probability.exp()

    def bounded(added_probability: float) -> Tensor:
        return bounded_complexity(log_probability, influence, mean_influence, added_probability)

    def capped(added_probability: float) -> Tensor:
        return capped_complexity(probability, influence, 1, added_probability / mean_influence)

    return {
        "max softmax": -probability.amax(1),
        "energy": -logits.logsumexp(1),
        "parametric": expected_influence(probability, influence),
        "capped alpha 1": capped(mean_influence / count),
        **{f"capped {value}": capped(value) for value in SETTINGS["capped_typical"]},
        "bounded alpha 1": bounded(mean_influence / count),
        **{f"bounded {value}": bounded(value) for value in SETTINGS["typical"]},
    }


def unit(make: Callable[..., Situation], arguments: tuple[Any, ...]) -> dict[str, Any]:
    """Return the AUROC of every score for every kind of OOD inputs."""
    case = make(*arguments)
    fisher = "sampled" if arguments[-1] == "resnet20" else "exact"
    ifc = IFComp(case.model, SETTINGS["beta"], damping=OOD_DAMPING, fisher=fisher).fit(list(case.train.split(100)))
    inside = scores(ifc, case.held_out)
    outside = {kind: scores(ifc, inputs) for kind, inputs in case.ood.items()}
    return {
        "auroc": {
            score: {kind: ood_metrics(inside[score], values[score]).auroc for kind, values in outside.items()}
            for score in inside
        }
    }


def page(results: dict[str, Any]) -> str:
    """Format the tables as markdown, AUROC in percent."""
    columns = list(SCORES)
    lines = [f"| network | {' | '.join(columns)} |", "|" + "---|" * (len(columns) + 1)]
    runs_of = {name: [run["auroc"] for key, run in results.items() if key.startswith(name)] for name in SITUATIONS}
    means = {
        name: {title: np.mean([list(run[key].values()) for run in runs]) for title, key in SCORES.items()}
        for name, runs in runs_of.items()
        if runs
    }
    rows = means | {"**mean**": {title: np.mean([row[title] for row in means.values()]) for title in columns}}
    lines += [
        f"| {name} | {' | '.join(f'{100 * row[title]:.1f}' for title in columns)} |" for name, row in rows.items()
    ]
    default, plain = f"bounded {BOUNDED_ADDED_PROBABILITY}", "parametric"
    lines += ["", "Kinds of OOD inputs, parametric → bounded:", "", "| network | kinds |", "|---|---|"]
    for name, runs in runs_of.items():
        if runs:
            kinds = [
                f"{kind} {100 * np.mean([run[plain][kind] for run in runs]):.0f} → "
                f"{100 * np.mean([run[default][kind] for run in runs]):.0f}"
                for kind in runs[0][plain]
            ]
            lines.append(f"| {name} | {'; '.join(kinds)} |")
    return (
        "AUROC of OOD against held-out inputs in percent at beta 1, means over kinds of OOD inputs and over seeds. "
        "Numbers are means of alpha/n E[IF] over the training data, which set alpha; the default is *bounded, "
        f"{BOUNDED_ADDED_PROBABILITY:g}*. The command is `python -m experiments.ood_defaults.run`; settings, date, "
        "hardware and all runs are in ood.json.\n\n" + "\n".join(lines) + "\n"
    )


def main() -> None:
    """Run the missing units, then write the tables."""
    folder = begin(__doc__, HERE / "results")
    units = {
        f"{name} {seed}": partial(unit, make, (*arguments, seed) if count else arguments)
        for name, (make, arguments, count) in SITUATIONS.items()
        for seed in range(count or 1)
    }
    results = continue_run(folder / "ood.json", SETTINGS, units)
    (folder / "ood.md").write_text(page(results))


if __name__ == "__main__":
    main()
