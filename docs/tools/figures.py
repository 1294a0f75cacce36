"""Draw the figures of the documentation from real runs: ``python -m docs.tools.figures [NAME ...]``, all by default.

Settings are chosen on validation digits; what is called a test was not looked at before.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from scipy.stats import spearmanr
from sklearn.datasets import make_moons
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from experiments.tuning import Tuned, tune
from ifcomp import IFComp, Relative, oracle
from ifcomp.cli.demo_study import OOD_INPUTS, Alteration, Data, load_data
from ifcomp.tasks.audit import AUDIT_DAMPING
from ifcomp.tasks.metrics import auroc
from ifcomp.tasks.ood import OOD_DAMPING

ASSETS = Path(__file__).resolve().parents[1] / "assets"
DAMPINGS = (1e-8, 1e-6, 1e-4, 1e-2, 0.1, 1.0, 10.0)
BETAS = (0.0, 0.01, 0.1, 0.3, 1.0, 2.0)
SEED = 0

#: Weight of the distance to the base model in the hindsight model's objective, which is damping times n.
LAMBDA = 100.0


def tilt(images: Tensor, _: Generator) -> Tensor:
    """Rotate the images by 25 degrees."""
    sine, cosine = math.sin(math.radians(25)), math.cos(math.radians(25))
    rotation = torch.tensor([[cosine, -sine, 0], [sine, cosine, 0]]).expand(len(images), 2, 3)
    return F.grid_sample(images, F.affine_grid(rotation, list(images.shape), False), align_corners=False)


VALIDATION_SHIFTS: dict[str, Alteration] = {
    "tilted": tilt,
    "partly erased": lambda images, g: images * (torch.rand(images.shape, generator=g) > 0.3),
}


@dataclass(frozen=True)
class Trained:
    """The digits and two networks: wrong labels, stopped early; right labels."""

    data: Data
    noisy: nn.Module
    clean: nn.Module
    clean_training: list[tuple[Tensor, Tensor]]

    @property
    def noisy_training(self) -> list[tuple[Tensor, Tensor]]:
        return self.data.training.batches()


def train(x: Tensor, y: Tensor, epochs: int) -> nn.Module:
    """A small CNN without normalisation, which grows overconfident under shift as it is trained on."""
    torch.manual_seed(SEED)
    layers = (nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU())
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(y)).split(50):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    return model.eval()


@cache
def trained() -> Trained:
    """All networks."""
    data = load_data(SEED)
    right = ~data.flipped
    x, y = data.training.images[right], data.training.labels[right]
    noisy = train(data.training.images, data.training.labels, 6)
    return Trained(data, noisy, train(x, y, 20), [(x, y)])


@cache
def tuned() -> Tuned:
    """Alpha at beta = 1, chosen on validation digits, clean and altered in other ways than the test digits."""
    own = trained()
    validation = own.data.held_out
    parts = [altered(validation.images, alteration) for alteration in VALIDATION_SHIFTS.values()]
    shifted = [(part, validation.labels) for part in parts]
    settings: dict[str, Any] = {"betas": [1.0], "keep_argmax": True, "fisher": "sampled", "progress": False}
    return tune(own.clean, own.clean_training, validation.batches(), shifted=shifted, **settings)


def altered(images: Tensor, alteration: Alteration) -> Tensor:
    """The images in one alteration."""
    return alteration(images, torch.Generator().manual_seed(SEED))


def audit_quality(ifc: IFComp, damping: float | Relative = AUDIT_DAMPING) -> float:
    """AUROC of label complexity against the labels that are wrong."""
    own = trained()
    table = ifc.score(own.noisy_training, damping=damping, progress=False)
    return auroc(table.column("label_complexity"), own.data.flipped)


def ood_quality(ifc: IFComp, damping: float | Relative = OOD_DAMPING, probes: int | None = None) -> float:
    """Mean AUROC of bounded complexity, or parametric from probes, of OOD inputs against validation digits."""
    images = trained().data.held_out.images
    found = []

    def complexity(x: Tensor) -> Tensor:
        if probes is None:
            return ifc.bounded_complexity(x, damping=damping)
        return ifc.parametric_complexity(x, damping=damping, probes=probes)

    inside = complexity(images)
    for alteration in OOD_INPUTS.values():
        outside = complexity(altered(images, alteration))
        found.append(auroc(torch.cat([inside, outside]), torch.arange(2 * len(images)) >= len(images)))
    return float(np.mean(found))


@cache
def fitted(beta: float = 1.0, fisher: str = "sampled", sua: bool = False, noisy: bool = False) -> IFComp:
    """The early-stopped or the clean network, fitted."""
    own = trained()
    model, data = (own.noisy, own.noisy_training) if noisy else (own.clean, own.clean_training)
    return IFComp(model, beta, fisher=fisher, sua=sua).fit(data, progress=False)  # type: ignore[arg-type]


# Figures ---------------------------------------------------------------------------------------------------------


@cache
def moons() -> tuple[nn.Module, Tensor, Tensor]:
    """A network trained on two half-moons of 200 points, and these."""
    points, labels = make_moons(200, noise=0.15, random_state=SEED)
    x, y = torch.tensor(points).float(), torch.tensor(labels)
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(400):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model, x, y


def plane() -> Figure:
    """Confidence and complexity in two dimensions."""
    model, x, y = moons()
    across, up = np.meshgrid(np.linspace(-3, 4, 80), np.linspace(-2.5, 3, 80))
    grid = torch.tensor(np.stack([across.ravel(), up.ravel()], 1)).float()
    ifc, soft = (IFComp(model, beta, fisher="exact").fit([(x, y)], progress=False) for beta in (1.0, 0.1))
    with torch.no_grad():
        softmax = model(grid).softmax(1).amax(1)
    panels = {
        "softmax: confidence": softmax,
        "parametric complexity, nats": ifc.parametric_complexity(grid, damping=OOD_DAMPING),
        "the same at beta = 0.1": soft.parametric_complexity(grid, damping=OOD_DAMPING),
        "pNML: confidence (alpha = 0.1)": ifc.predict_proba(grid, alpha=0.1, keep_argmax=True).amax(1),
    }
    figure = Figure(figsize=(13, 3), layout="constrained")
    for axes, (title, values) in zip(figure.subplots(1, 4), panels.items(), strict=True):
        drawn = axes.pcolormesh(across, up, values.reshape(across.shape).numpy(), shading="auto", rasterized=True)
        axes.scatter(*x.T, c=y, s=6, cmap="coolwarm", edgecolors="white", linewidths=0.3)
        axes.set(title=title, xticks=[], yticks=[])
        figure.colorbar(drawn, ax=axes)
    return figure


def hindsight() -> Figure:
    """Distributions of an ambiguous digit: model, hindsight and pNML."""
    own, choice = trained(), tuned()
    images = altered(own.data.held_out.images, VALIDATION_SHIFTS["tilted"])
    ifc, alpha = choice.predictor, choice.alpha
    with torch.no_grad():
        probabilities = own.clean(images).double().softmax(1)
    index = int((probabilities.amax(1) - 0.6).abs().argmin())
    p, influence = probabilities[index], ifc.influence(images[index : index + 1])[0]
    best = p * (1 + alpha / len(own.clean_training[0][1]) * influence)
    figure = Figure(figsize=(9, 3), layout="constrained")
    picture, axes = figure.subplots(1, 2, width_ratios=[1, 4])
    picture.imshow(images[index, 0], cmap="gray_r")
    picture.axis("off")
    places = np.arange(10)
    bars = {"model": p, "in hindsight, label by label": best, "pNML: normalised": best / best.sum()}
    for place, (name, values) in enumerate(bars.items()):
        axes.bar(places + 0.27 * (place - 1), values, 0.27, label=name)
    axes.set(xticks=places, xlabel="label", ylabel="probability", title=f"log of the sum: {best.sum().log():.3f} nats")
    axes.legend()
    return figure


def hindsight_trained() -> Figure:
    """Gain of a label by training a hindsight model, over the gain that its influence predicts."""
    model, x, y = moons()
    inputs = torch.tensor(np.random.default_rng(SEED).uniform([-1.5, -1], [2.5, 1.5], (30, 2))).float()
    trained_gain = oracle.hindsight(model, [(x, y)], inputs, lam=LAMBDA, progress=False).regret.flatten()
    ifc = IFComp(model, fisher="exact").fit([(x, y)], progress=False)
    predicted = ifc.influence(inputs, damping=LAMBDA / len(y)).flatten() / len(y)
    figure = Figure(figsize=(5, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.scatter(predicted, trained_gain, s=14)
    axes.axline((1, 1), slope=1, color="grey", linestyle="--", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="predicted from one gradient, IF / n, in nats")
    axes.set(ylabel="a model trained for it, in nats", xlim=(1e-12, 30), ylim=(1e-12, 30))
    axes.set_title(
        f"Gain of a label in hindsight (rank correlation {spearmanr(predicted, trained_gain).statistic:.2f})"
    )
    return figure


def lines(x: Sequence[float], panels: dict[str, dict[str, Iterable[float]]], xlabel: str, scale: str = "log") -> Figure:
    """Panels of lines over one setting."""
    figure = Figure(figsize=(4.2 * len(panels), 3), layout="constrained")
    for axes, (title, curves) in zip(figure.subplots(1, len(panels), squeeze=False).flat, panels.items(), strict=True):
        for name, values in curves.items():
            axes.plot(x, list(values), marker="o", markersize=4, label=name)
        axes.set(xlabel=xlabel, title=title)
        axes.set_xscale(scale, **({"linthresh": min(value for value in x if value)} if scale == "symlog" else {}))
        axes.legend()
    return figure


def alpha() -> Figure:
    """NLL, ECE and accuracy on validation digits over alpha."""
    frame = tuned().frame.query("alpha <= 10")
    kinds = {"pNML": frame.query("not keep_argmax"), "keep_argmax": frame.query("keep_argmax")}
    titles = {"nll": "NLL in nats (smaller is better)", "ece": "ECE (smaller is better)", "accuracy": "accuracy"}
    panels = {title: {name: kind[metric] for name, kind in kinds.items()} for metric, title in titles.items()}
    return lines(sorted(set(frame["alpha"])), panels, "alpha", "symlog")


def damping() -> Figure:
    """Both uses over damping."""
    audits = [audit_quality(fitted(noisy=True), Relative(value)) for value in DAMPINGS]
    detections = [ood_quality(fitted(), Relative(value)) for value in DAMPINGS]
    panels = {"AUROC (larger is better)": {"wrong labels": audits, "OOD inputs": detections}}
    return lines(DAMPINGS, panels, "damping: Relative(...)")


def beta() -> Figure:
    """Both uses over beta."""
    audits = [audit_quality(fitted(value, noisy=True)) for value in BETAS]
    detections = [ood_quality(fitted(value)) for value in BETAS]
    panels = {"AUROC (larger is better)": {"wrong labels": audits, "OOD inputs": detections}}
    return lines(BETAS, panels, "beta", "symlog")


def fisher() -> Figure:
    """Kinds of Fisher, and SUA, beside the exact one."""
    variants = {
        "exact": {"fisher": "exact"},
        "sampled": {},
        "empirical": {"fisher": "empirical"},
        "sampled, SUA": {"sua": True},
    }
    images = trained().data.held_out.images
    both = torch.cat([images, altered(images, OOD_INPUTS["inverted digits"])])
    exact = fitted(fisher="exact").parametric_complexity(both)
    rows = {name: fitted(**options) for name, options in variants.items()}  # type: ignore[arg-type]
    panels = {
        "rank correlation of complexity with exact": [
            spearmanr(exact, ifc.parametric_complexity(both)).statistic for ifc in rows.values()
        ],
        "AUROC of OOD inputs": [ood_quality(ifc) for ifc in rows.values()],
        "AUROC of wrong labels": [audit_quality(fitted(noisy=True, **options)) for options in variants.values()],  # type: ignore[arg-type]
    }
    figure = Figure(figsize=(11, 2.6), layout="constrained")
    for axes, (title, values) in zip(figure.subplots(1, 3, sharey=True), panels.items(), strict=True):
        drawn = axes.barh(list(rows), values)
        axes.bar_label(drawn, fmt="%.3f", label_type="center", color="white")
        axes.set(title=title, xlim=(0, 1))
        axes.invert_yaxis()
    return figure


def probes() -> Figure:
    """Accuracy of the estimate over the number of probes."""
    counts = (1, 2, 3, 4, 6, 8, 10)
    images = trained().data.held_out.images
    both = torch.cat([images, altered(images, OOD_INPUTS["inverted digits"])])
    exact = fitted().parametric_complexity(both, damping=OOD_DAMPING)
    found = [fitted().parametric_complexity(both, damping=OOD_DAMPING, probes=count) for count in counts]
    panels = {
        "rank correlation with all labels": {"complexity": [spearmanr(exact, values).statistic for values in found]},
        "AUROC (larger is better)": {"OOD inputs": [ood_quality(fitted(), probes=count) for count in counts]},
    }
    return lines(counts, panels, "probes", "linear")


FIGURES = {
    "plane.png": plane,
    "hindsight.svg": hindsight,
    "trained.svg": hindsight_trained,
    "alpha.svg": alpha,
    "damping.svg": damping,
    "beta.svg": beta,
    "fisher.svg": fisher,
    "probes.svg": probes,
}


def main(names: list[str]) -> None:
    """Write all figures, or those that are named."""
    import matplotlib as mpl

    mpl.rcParams["svg.hashsalt"] = "ifcomp"
    torch.set_num_threads(1)
    ASSETS.mkdir(exist_ok=True)
    for name in names or FIGURES:
        kind = Path(name).suffix[1:]
        metadata = {"Date": None} if kind == "svg" else None
        FIGURES[name]().savefig(ASSETS / name, format=kind, dpi=110, metadata=metadata)


if __name__ == "__main__":
    main(sys.argv[1:])
