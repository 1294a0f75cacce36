"""Which damping is safe for label audits: AUROC of error + parametric complexity beside the plain loss.

A LeNet is trained on Fashion-MNIST with flipped labels, and audited at three stages of its training: where it
predicts held-out images best, when it has memorised half of the flipped labels, and at the end.

    IFCOMP_DATA=... python -m experiments.audit_defaults.run
"""

import argparse
import copy
import warnings
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.audit_defaults import data
from experiments.audit_defaults.record import continue_run
from experiments.models import LeNet
from ifcomp import IFComp, Relative
from ifcomp.errors import CurvatureWarning
from ifcomp.tasks.metrics import auroc

HERE = Path(__file__).parent
NOISE = {"symmetric": {"rate": 0.6, "images": 10_000}, "asymmetric": {"rate": 0.3, "images": 20_000}}
STAGES = {"early": "best validation accuracy", "middle": "half of the flipped labels memorised", "late": "last epoch"}
SETTINGS = {
    "network": "LeNet",
    "data": "fashion-mnist",
    "noise": NOISE,
    "stages": STAGES,
    "beta": 1.0,
    "dampings": [0.1, 1.0, 10.0, 100.0],
    "fishers": ["exact", "sampled"],
    "seeds": [0, 1],
    "fit_images": 10_000,
    "audited_images": 5_000,
    "optimizer": "Adam",
    "learning_rate": "2e-3, linearly to 0",
    "batch_size": 64,
    "epochs": 60,
    "validation_images": 2_000,
}


def flip(labels: Tensor, kind: str, rate: float, seed: int) -> tuple[Tensor, Tensor]:
    """Labels of which just the share ``rate`` is another class (any, or the next), and which are."""
    generator = np.random.default_rng(seed)
    flipped = torch.zeros(len(labels), dtype=torch.bool)
    flipped[generator.choice(len(labels), round(rate * len(labels)), replace=False)] = True
    shift = torch.tensor(generator.integers(1, 10, len(labels))) if kind == "symmetric" else torch.ones_like(labels)
    return torch.where(flipped, (labels + shift) % 10, labels), flipped


@torch.no_grad()
def logits_of(model: nn.Module, images: Tensor) -> Tensor:
    """[N, K]."""
    return torch.cat([model(part) for part in images.split(1000)])


def epochs(images: Tensor, labels: Tensor, seed: int) -> Iterator[nn.Module]:
    """The network after each epoch; always the same object."""
    torch.manual_seed(seed)
    model = LeNet()
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, SETTINGS["epochs"])
    for _ in range(SETTINGS["epochs"]):
        for batch in torch.randperm(len(images)).split(SETTINGS["batch_size"]):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
        schedule.step()
        yield model


def train(images: Tensor, labels: Tensor, flipped: Tensor, seed: int) -> dict[str, tuple[int, float, nn.Module]]:
    """For every stage: epoch, share of flipped labels memorised, network."""
    held_out = slice(-SETTINGS["validation_images"], None)
    validation = data.images("fashion-mnist", "train")[held_out], data.labels("fashion-mnist", "train")[held_out]
    found, best = {}, 0.0
    for epoch, model in enumerate(epochs(images, labels, seed), 1):
        memorised = float((logits_of(model, images[flipped]).argmax(1) == labels[flipped]).double().mean())
        accuracy = float((logits_of(model, validation[0]).argmax(1) == validation[1]).double().mean())
        reached = ["middle"] if memorised >= 0.5 and "middle" not in found else []
        reached += ["early"] if accuracy > best else []
        reached += ["late"] if epoch == SETTINGS["epochs"] else []
        best = max(best, accuracy)
        found |= {name: (epoch, memorised, copy.deepcopy(model)) for name in reached}
    return found


def audit(model: nn.Module, images: Tensor, labels: Tensor, flipped: Tensor, seed: int) -> dict[str, Any]:
    """AUROC of every score on the first images; the fit takes more of them."""
    fit_data = list(zip(images.split(250), labels.split(250), strict=True))[: SETTINGS["fit_images"] // 250]
    images, labels, flipped = (part[: SETTINGS["audited_images"]] for part in (images, labels, flipped))
    probability = logits_of(model, images).double().softmax(1)
    own = probability.gather(1, labels[:, None])[:, 0]
    other = probability.scatter(1, labels[:, None], -1).amax(1)
    aurocs = {"loss": auroc(-own, flipped), "margin": auroc(other - own, flipped)}
    loader = list(zip(images.split(250), labels.split(250), strict=True))
    for fisher in SETTINGS["fishers"]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CurvatureWarning)  # what this does to an audit is the question
            ifc = IFComp(model, SETTINGS["beta"], fisher=fisher, seed=seed).fit(fit_data)
        for multiple in SETTINGS["dampings"]:
            table = ifc.score(loader, damping=Relative(multiple))
            for column in ("stochastic_complexity", "parametric_complexity"):
                aurocs[f"{column} {fisher} {multiple}"] = auroc(table.column(column), flipped)
    return aurocs


def unit(kind: str, seed: int) -> dict[str, Any]:
    """All stages of one training run."""
    count, rate = NOISE[kind]["images"], NOISE[kind]["rate"]
    images, truth = data.images("fashion-mnist", "train")[:count], data.labels("fashion-mnist", "train")[:count]
    labels, flipped = flip(truth, kind, rate, seed)
    return {
        stage: {"epoch": epoch, "memorised": memorised, "auroc": audit(model, images, labels, flipped, seed)}
        for stage, (epoch, memorised, model) in train(images, labels, flipped, seed).items()
    }


def table(results: dict[str, Any]) -> str:
    """Means over seeds as markdown, AUROC in percent."""
    dampings, fishers = SETTINGS["dampings"], SETTINGS["fishers"]
    columns = ["loss", "margin", *(f"stochastic_complexity {f} {d}" for f, d in product(fishers, dampings))]
    titles = ["loss", "margin", *(f"sum, {f}, {d:g}" for f, d in product(fishers, dampings))]
    lines = [f"| noise, stage | memorised | {' | '.join(titles)} |", "|" + "---|" * (len(titles) + 2)]
    for kind, stage in product(NOISE, STAGES):
        runs = [run[stage] for name, run in results.items() if name.startswith(kind) and stage in run]
        if runs:
            cells = [f"{100 * np.mean([run['auroc'][column] for run in runs]):.1f}" for column in columns]
            memorised = f"{100 * np.mean([run['memorised'] for run in runs]):.0f} %"
            lines.append(f"| {kind}, {stage} | {memorised} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run what is missing, then write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=HERE / "results", help="where results are")
    folder = parser.parse_args().folder
    folder.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    units = {f"{kind} {seed}": partial(unit, kind, seed) for seed in SETTINGS["seeds"] for kind in NOISE}
    results = continue_run(folder / "audit.json", SETTINGS, units)
    (folder / "audit.md").write_text(table(results))


if __name__ == "__main__":
    main()
