"""Scores and dampings for label audits: AUROC of label complexity, stochastic complexity and the plain loss.

A LeNet is trained on Fashion-MNIST with flipped labels and audited at three stages of training: the best held-out
accuracy, half of the flipped labels memorised, and the last epoch. Networks are cached in the folder IFCOMP_CACHE.

    IFCOMP_DATA=... IFCOMP_CACHE=... python -m experiments.audit_defaults.run
"""

import copy
import json
import os
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.audit_defaults import data
from experiments.audit_defaults.record import begin, continue_run
from experiments.models import LeNet
from ifcomp import IFComp, Relative
from ifcomp.complexity import LABEL_ADDED_PROBABILITY, label_complexity
from ifcomp.io.files import atomic_write
from ifcomp.tasks.audit import AUDIT_DAMPING
from ifcomp.tasks.metrics import auroc

HERE = Path(__file__).parent
LABEL_COMPLEXITY = "label_complexity"
#: More seeds are used where the score and the plain loss are close.
NOISE = {
    "symmetric": {"rate": 0.6, "images": 10_000, "seeds": 8},
    "asymmetric": {"rate": 0.3, "images": 20_000, "seeds": 2},
}
STAGES = {"early": "best validation accuracy", "middle": "half of the flipped labels memorised", "late": "last epoch"}
SETTINGS = {
    "network": "LeNet",
    "data": "fashion-mnist",
    "noise": NOISE,
    "stages": STAGES,
    "beta": 1.0,
    "damping": AUDIT_DAMPING.multiple,
    "dampings": [1.0, 10.0, 100.0],
    "doubts": [0.1, 1.0],
    "fisher": "exact",
    "fit_images": 5_000,
    "audited_images": 5_000,
    "optimizer": "Adam",
    "learning_rate": "2e-3, linearly to 0",
    "batch_size": 64,
    "epochs": 60,
    "validation_images": 2_000,
}


def flip(labels: Tensor, kind: str, rate: float, seed: int) -> tuple[Tensor, Tensor]:
    """Flip exactly the share ``rate`` of the labels, to any class (symmetric) or the next; also return the mask."""
    generator = np.random.default_rng(seed)
    flipped = torch.zeros(len(labels), dtype=torch.bool)
    flipped[generator.choice(len(labels), round(rate * len(labels)), replace=False)] = True
    shift = torch.tensor(generator.integers(1, 10, len(labels))) if kind == "symmetric" else torch.ones_like(labels)
    return torch.where(flipped, (labels + shift) % 10, labels), flipped


@torch.no_grad()
def logits_of(model: nn.Module, images: Tensor) -> Tensor:
    """Return the logits [N, K]."""
    return torch.cat([model(part) for part in images.split(1000)])


def epochs(images: Tensor, labels: Tensor, seed: int) -> Iterator[nn.Module]:
    """Train a network and yield it after each epoch, always the same object."""
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
    """Return epoch, share of flipped labels memorised, and network by stage, for the stages that are reached."""
    held_out = slice(-SETTINGS["validation_images"], None)
    validation = data.images("fashion-mnist", "train")[held_out], data.labels("fashion-mnist", "train")[held_out]
    stages, best = {}, 0.0
    for epoch, model in enumerate(epochs(images, labels, seed), 1):
        memorised = float((logits_of(model, images[flipped]).argmax(1) == labels[flipped]).double().mean())
        accuracy = float((logits_of(model, validation[0]).argmax(1) == validation[1]).double().mean())
        reached = ["middle"] if memorised >= 0.5 and "middle" not in stages else []
        reached += ["early"] if accuracy > best else []
        reached += ["late"] if epoch == SETTINGS["epochs"] else []
        best = max(best, accuracy)
        stages |= {name: (epoch, memorised, copy.deepcopy(model)) for name in reached}
    return stages


def networks(kind: str, images: Tensor, labels: Tensor, flipped: Tensor, seed: int) -> dict[str, Any]:
    """Return the result of `train`, from the cache if possible."""
    folder = Path(os.environ.get("IFCOMP_CACHE", "cache")) / "audit_defaults" / f"{kind}-{seed}"
    record = folder / "stages.json"
    if not record.exists():
        folder.mkdir(parents=True, exist_ok=True)
        stages = train(images, labels, flipped, seed)
        for stage, (_, _, model) in stages.items():
            save_file(model.state_dict(), folder / f"{stage}.safetensors")
        with atomic_write(record) as scratch:
            scratch.write_text(json.dumps({stage: row[:2] for stage, row in stages.items()}))
    rows = json.loads(record.read_text())
    return {stage: (*row, load_network(folder / f"{stage}.safetensors")) for stage, row in rows.items()}


def load_network(path: Path) -> nn.Module:
    """Load a cached network in eval mode."""
    model = LeNet()
    model.load_state_dict(load_file(path))
    return model.eval()


def audit(model: nn.Module, images: Tensor, labels: Tensor, flipped: Tensor) -> dict[str, Any]:
    """Return the AUROC of every score on the first images, which the fit uses too."""
    fit_data = list(zip(images.split(250), labels.split(250), strict=True))[: SETTINGS["fit_images"] // 250]
    loader, flipped = fit_data[: SETTINGS["audited_images"] // 250], flipped[: SETTINGS["audited_images"]]
    ifc = IFComp(model, SETTINGS["beta"], fisher=SETTINGS["fisher"]).fit(fit_data)
    aurocs: dict[str, float] = {}
    for multiple in SETTINGS["dampings"]:
        table = ifc.score(loader, damping=Relative(multiple))
        for column in ("stochastic_complexity", LABEL_COMPLEXITY):
            aurocs[f"{column} {multiple}"] = auroc(table.column(column), flipped)
    margin = table.column("suggested_probability") - table.column("label_probability")
    aurocs |= {"loss": auroc(table.column("error"), flipped), "margin": auroc(margin, flipped)}
    for added in SETTINGS["doubts"]:
        aurocs[f"doubt {added}"] = auroc(label_complexities(ifc, loader, added).numpy(), flipped)
    return aurocs


def label_complexities(ifc: IFComp, loader: list[tuple[Tensor, Tensor]], added_probability: float) -> Tensor:
    """Return the label complexity of all examples, [N], with another mean added probability than the default."""
    assert ifc.factors is not None
    mean_influence = ifc.factors.effective_parameters(AUDIT_DAMPING)
    scores = []
    for images, labels in loader:
        log_p = (ifc.beta * logits_of(ifc.model, images).double()).log_softmax(1)
        given = labels.unsqueeze(1)
        other = log_p.scatter(1, given, -torch.inf).argmax(1, keepdim=True)
        v = torch.zeros_like(log_p).scatter(1, given, 1.0).scatter(1, other, -1.0)
        contrast = torch.einsum("bi,bij,bj->b", v, ifc.logit_kernel(images, damping=AUDIT_DAMPING), v)
        errors = (-log_p.gather(1, index).squeeze(1) for index in (given, other))
        scores.append(label_complexity(*errors, contrast, mean_influence, added_probability))
    return torch.cat(scores)


def unit(kind: str, seed: int) -> dict[str, Any]:
    """Train one network and audit all its stages."""
    count, rate = NOISE[kind]["images"], NOISE[kind]["rate"]
    images, truth = data.images("fashion-mnist", "train")[:count], data.labels("fashion-mnist", "train")[:count]
    labels, flipped = flip(truth, kind, rate, seed)
    return {
        stage: {"epoch": epoch, "memorised": memorised, "auroc": audit(model, images, labels, flipped)}
        for stage, (epoch, memorised, model) in networks(kind, images, labels, flipped, seed).items()
    }


def page(results: dict[str, Any]) -> str:
    """Format the tables as markdown: means over seeds, then every seed; AUROC in percent."""
    dampings = SETTINGS["dampings"]
    default = f"{LABEL_COMPLEXITY} {AUDIT_DAMPING.multiple}"
    stochastic = {f"sum, {d:g}": f"stochastic_complexity {d}" for d in dampings}
    label = {f"label, {d:g}": f"{LABEL_COMPLEXITY} {d}" for d in dampings}
    added = {f"added {value:g}": f"doubt {value}" for value in SETTINGS["doubts"]}
    plain = {"loss": "loss", "margin": "margin"}
    seeds = [
        f"| {name}, {stage} | {100 * run[stage]['memorised']:.0f} % | {100 * run[stage]['auroc']['loss']:.2f} | "
        f"{100 * run[stage]['auroc'][default]:.2f} | "
        f"{100 * (run[stage]['auroc'][default] - run[stage]['auroc']['loss']):+.2f} |"
        for name, run in results.items()
        for stage in STAGES
        if stage in run
    ]
    return (
        "AUROC of flipped labels in percent, means over seeds; single runs are below. *label* is label "
        f"complexity (default damping in audits: {AUDIT_DAMPING.multiple:g} times the mean). *sum* is stochastic "
        "complexity, error + parametric complexity. The numbers after them are dampings. The command is "
        "`python -m experiments.audit_defaults.run`; settings, date and hardware are in audit.json.\n\n"
        + table(results, plain | label | stochastic)
        + "\nMean added probability of training examples (alpha/n E[IF]) other than the default, "
        + f"{LABEL_ADDED_PROBABILITY:g}, with the default damping:\n\n"
        + table(results, {"loss": "loss", "default": default} | added)
        + f"\nGain of the default over the loss in points, ± standard error of the mean: {gains(results, default)}.\n"
        + "\nEvery run:\n\n| noise, seed, stage | memorised | loss | label, default | gain |\n|---|---|---|---|---|\n"
        + "\n".join(seeds)
        + "\n"
    )


def table(results: dict[str, Any], columns: dict[str, str]) -> str:
    """Format the means over seeds as markdown; ``columns`` maps titles to scores."""
    lines = [f"| noise, stage | memorised | {' | '.join(columns)} |", "|" + "---|" * (len(columns) + 2)]
    for kind, stage in product(NOISE, STAGES):
        runs = [run[stage] for name, run in results.items() if name.startswith(kind) and stage in run]
        if runs:
            cells = [f"{100 * np.mean([run['auroc'][score] for run in runs]):.1f}" for score in columns.values()]
            memorised = f"{100 * np.mean([run['memorised'] for run in runs]):.0f} %"
            lines.append(f"| {kind}, {stage} | {memorised} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def gains(results: dict[str, Any], default: str) -> str:
    """Format the mean difference in points and its standard error by noise and stage."""
    parts = []
    for kind, stage in product(NOISE, STAGES):
        runs = [run[stage]["auroc"] for name, run in results.items() if name.startswith(kind) and stage in run]
        if len(runs) > 1:
            points = 100 * np.array([run[default] - run["loss"] for run in runs])
            error = points.std(ddof=1) / np.sqrt(len(runs))
            parts.append(f"{kind}, {stage}: {points.mean():+.2f} ± {error:.2f} ({len(runs)} runs)")
    return "; ".join(parts)


def main() -> None:
    """Run the missing units, then write the tables."""
    folder = begin(__doc__, HERE / "results")
    units = {f"{kind} {seed}": partial(unit, kind, seed) for kind in NOISE for seed in range(NOISE[kind]["seeds"])}
    results = continue_run(folder / "audit.json", SETTINGS, units)
    (folder / "audit.md").write_text(page(results))


if __name__ == "__main__":
    main()
