"""All-label influence beside a forward pass, the paper's way and a gradient norm: ``python -m benchmarks.influence``.

Everything is timed by turns in one run, so that the ratios hold on a busy machine. The unit is one forward pass of the
same batch in eval mode with the same threads; per-example, per-label gradients alone would need 1 + 2K of them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.references import LayerFactors, forward, paper_influence, vmap_gradient_norm
from benchmarks.timing import environment, interleaved
from experiments.models import LeNet, resnet18, resnet20
from ifcomp import IFComp, Relative
from ifcomp.layers.block import KroneckerBlock

CLASSES = 10
DAMPING = Relative(0.1)
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Subject:
    """A network to time.

    Attributes:
        make: Builds it, untrained; time does not depend on the weights.
        shape: Of one input.
        batch: Examples for the forward pass and ours.
        reference_batch: Examples for the references, which take much longer.
        prototype: Units that the first prototype took.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch: int
    reference_batch: int
    prototype: float


SUBJECTS = {
    "LeNet": Subject(lambda: LeNet(CLASSES), (1, 28, 28), 256, 64, 1.23 / 0.069),
    "ResNet-20": Subject(lambda: resnet20(CLASSES), (3, 32, 32), 64, 16, 43.6 / 1.44),
    "ResNet-18": Subject(lambda: resnet18(CLASSES), (3, 32, 32), 32, 8, 474 / 16.7),
}


def plain_factors(ifc: IFComp) -> dict[str, LayerFactors]:
    """The library's factors in the references' form."""
    assert ifc.factors is not None
    assert ifc._session is not None
    plain: dict[str, LayerFactors] = {}
    for block in ifc._session.recorded:
        factors = ifc.factors.blocks[block.name]
        weights = 1 / (factors.second_moments + ifc.factors.damping_of(block.name, DAMPING))
        basis = factors.basis
        plain[block.name] = {
            "input_basis": None if basis is None or basis.inputs is None else basis.inputs[0],
            "output_basis": None if basis is None else basis.outputs[0],
            "weights": weights if basis is None else weights[0],
            "offsets": block.offsets if isinstance(block, KroneckerBlock) else 1,
        }
    return plain


def time_subject(subject: Subject, threads: int, rounds: int) -> dict[str, float]:
    """Milliseconds an example of each way, and how far ours is from the paper's."""
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    model = subject.make().eval()
    x = torch.randn(subject.batch, *subject.shape)
    few = x[: subject.reference_batch]
    ifc = IFComp(model, damping=DAMPING, sua=True).fit([x])
    factors = plain_factors(ifc)
    error = _relative_difference(ifc.influence(few), paper_influence(model, few, factors, 1.0))
    fast = interleaved({"forward": lambda: forward(model, x), "ours": lambda: ifc.influence(x)}, rounds)
    slow = interleaved(
        {
            "forward": lambda: forward(model, x),
            "paper": lambda: paper_influence(model, few, factors, 1.0),
            "gradient_norm": lambda: vmap_gradient_norm(model, few),
        },
        max(1, rounds // 3),
    )
    sizes = {"paper": len(few), "gradient_norm": len(few)}
    best = slow | fast | {"forward": min(slow["forward"], fast["forward"])}
    return {name: 1e3 * seconds / sizes.get(name, len(x)) for name, seconds in best.items()} | {"difference": error}


def _relative_difference(value: Tensor, reference: Tensor) -> float:
    return float((value - reference).abs().max() / reference.abs().max())


def table(results: dict[str, dict[str, float]], threads: int) -> Table:
    """Ratios of one run."""
    shown = Table(title=f"All-label influence, K = {CLASSES}, threads: {threads}; milliseconds an example")
    shown.add_column("model", no_wrap=True)
    for heading in ("forward", "ours", "units", "limit", "prototype", "paper's way", "ratio", "gradient norm", "ratio"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for name, row in results.items():
        shown.add_row(
            name,
            f"{row['forward']:.3f}",
            f"{row['ours']:.2f}",
            f"{row['ours'] / row['forward']:.1f}",
            str(1 + 2 * CLASSES),
            f"{SUBJECTS[name].prototype:.1f}",
            f"{row['paper']:.1f}",
            f"{row['paper'] / row['ours']:.1f}x",
            f"{row['gradient_norm']:.1f}",
            f"{row['gradient_norm'] / row['ours']:.1f}x",
        )
    return shown


def main() -> None:
    """Time all subjects, print the tables and write the raw numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--output", type=Path, default=RESULTS / "influence.json")
    options = parser.parse_args()
    console = Console(width=120)
    runs = []
    for threads in options.threads:
        results = {name: time_subject(SUBJECTS[name], threads, options.rounds) for name in options.models}
        console.print(table(results, threads))
        runs.append({"environment": environment(), "classes": CLASSES, "milliseconds_per_example": results})
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(runs, indent=2) + "\n")
    console.print(f"raw numbers: {options.output}")


if __name__ == "__main__":
    main()
