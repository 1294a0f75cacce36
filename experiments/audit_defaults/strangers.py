"""Which damping is a good default for inputs from elsewhere: AUROC of parametric complexity beside max softmax.

A LeNet is trained on MNIST, another on Fashion-MNIST; test images of the same data set against images of others.

    IFCOMP_DATA=... python -m experiments.audit_defaults.strangers
"""

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.audit_defaults import data
from experiments.audit_defaults.record import begin, continue_run
from experiments.models import LeNet
from ifcomp import IFComp, Relative
from ifcomp.tasks.ood import ood_metrics

HERE = Path(__file__).parent
SETTINGS = {
    "network": "LeNet",
    "known": ["mnist", "fashion-mnist"],
    "betas": [0.1, 0.66, 1.0],
    "dampings": [1e-8, 1e-6, 1e-4, 1e-2, 0.1, 1.0],
    "fisher": "exact",
    "seeds": [0, 1],
    "training_images": 20_000,
    "fit_images": 5_000,
    "images_per_set": 1_000,
    "epochs": 5,
    "optimizer": "Adam",
    "learning_rate": 1e-3,
    "batch_size": 64,
}


def train(images: Tensor, labels: Tensor, seed: int) -> nn.Module:
    """A trained network in eval mode."""
    torch.manual_seed(seed)
    model = LeNet()
    optimizer = torch.optim.Adam(model.parameters(), SETTINGS["learning_rate"])
    for _ in range(SETTINGS["epochs"]):
        for batch in torch.randperm(len(images)).split(SETTINGS["batch_size"]):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    return model.eval()


def test_sets() -> dict[str, Tensor]:
    """Test images of all data sets."""
    sets = {name: data.images(name, "t10k") for name in ("mnist", "fashion-mnist", "notmnist")}
    return {
        name: images[: SETTINGS["images_per_set"]] for name, images in (sets | {"kmnist": data.kuzushiji()}).items()
    }


def unit(known: str, seed: int) -> dict[str, Any]:
    """AUROC of every score against every other data set."""
    count = SETTINGS["training_images"]
    images, labels = data.images(known, "train")[:count], data.labels(known, "train")[:count]
    model = train(images, labels, seed)
    loader = list(images[: SETTINGS["fit_images"]].split(250))
    scores: dict[str, dict[str, Tensor]] = {}
    for beta in SETTINGS["betas"]:
        ifc = IFComp(model, beta, fisher=SETTINGS["fisher"]).fit(loader)
        for multiple in SETTINGS["dampings"]:
            scores[f"{beta} {multiple}"] = {
                name: torch.cat([ifc.parametric_complexity(x, damping=Relative(multiple)) for x in inputs.split(250)])
                for name, inputs in test_sets().items()
            }
    with torch.no_grad():
        scores["max softmax"] = {name: -model(inputs).softmax(1).amax(1) for name, inputs in test_sets().items()}
    return {
        score: {name: ood_metrics(found[known], found[name]).auroc for name in found if name != known}
        for score, found in scores.items()
    }


def table(results: dict[str, Any]) -> str:
    """Means over seeds and data sets as markdown, AUROC in percent."""
    dampings = SETTINGS["dampings"]
    lines = [f"| known, beta | {' | '.join(f'{d:g}' for d in dampings)} | max softmax |"]
    lines.append("|" + "---|" * (len(dampings) + 2))
    for known, beta in product(SETTINGS["known"], SETTINGS["betas"]):
        runs = [run for name, run in results.items() if name.startswith(known)]
        names = [*(f"{beta} {d}" for d in dampings), "max softmax"]
        cells = [f"{100 * np.mean([list(run[name].values()) for run in runs]):.1f}" for name in names]
        lines.append(f"| {known}, {beta:g} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run what is missing, then write the table."""
    folder = begin(__doc__, HERE / "results")
    units = {f"{known} {seed}": partial(unit, known, seed) for seed in SETTINGS["seeds"] for known in SETTINGS["known"]}
    results = continue_run(folder / "strangers.json", SETTINGS, units)
    (folder / "strangers.md").write_text(table(results))


if __name__ == "__main__":
    main()
