"""Where the time of all-label influence goes, layer by layer: ``python -m benchmarks.profile [NETWORK]``.

What the library itself calls is timed while it works: the backward of every label, which is cut at the moments when
the gradient reaches a layer's output; the rotation of output gradients; and the kernel, with what it does once for all
labels shared among them. Clocks and cuts cost a little time themselves.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest.mock import patch

from rich.console import Console
from torch import Tensor

from benchmarks.networks import LENET, RESNET18, RESNET20, Network
from benchmarks.record import RESULTS
from benchmarks.suite import Setup
from benchmarks.suites.influence import fitted
from benchmarks.timing import environment
from ifcomp.cli.output import table
from ifcomp.influence import forms
from ifcomp.io.files import atomic_write
from ifcomp.layers.block import KroneckerBlock
from ifcomp.layers.capture import Recording

NETWORKS = {"LeNet": LENET, "ResNet-20": RESNET20, "ResNet-18": RESNET18}
HEADINGS = ("layer", "kernel", "T", "O", "J", "backward", "rotation", "kernel", "together")


@dataclass(frozen=True)
class LayerTime:
    """Milliseconds an example and label.

    Attributes:
        layer: Its name.
        kernel: "direct" or "pairs"; empty for a layer without an eigenbasis, such as a norm.
        positions: T; 0 without a kernel, as all sizes.
        rows: O.
        columns: J, of all groups.
        backward: From the layer's output to the outputs of the layers before it.
        rotation: Reading its output gradients and turning them into the eigenbasis.
        kernel_time: Quadratic forms.
    """

    layer: str
    kernel: str
    positions: int
    rows: int
    columns: int
    backward: float
    rotation: float
    kernel_time: float

    @property
    def together(self) -> float:
        """All of it."""
        return self.backward + self.rotation + self.kernel_time


@dataclass(frozen=True)
class Profile:
    """Layers in the order of the forward pass, and all of a run in milliseconds an example and label."""

    layers: list[LayerTime]
    total: float


class Clocks:
    """Seconds by layer while the library works."""

    def __init__(self, bases: dict[int, str]) -> None:
        """Start at zero; ``bases`` maps the identity of an output basis to its layer."""
        self.backward: dict[str, float] = defaultdict(float)
        self.rotation: dict[str, float] = defaultdict(float)
        self.kernel: dict[str, float] = defaultdict(float)
        self.chosen: dict[str, tuple[str, int, KroneckerBlock]] = {}
        self._bases = bases
        self._pairs: dict[int, str] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time what the library calls, for the length of the context."""
        stream, rows = Recording.stream, Recording.rows
        replaced: list[tuple[object, str, Callable[..., Any]]] = [
            (Recording, "stream", lambda *arguments: self._cut(stream, *arguments)),
            (Recording, "rows", self._clock(self.rotation, rows, lambda _, block, __: block.name)),
            (forms, "put_rows", self._clock(self.rotation, forms.put_rows, self._basis_layer)),
            (forms, "direct_forms", self._clock(self.kernel, forms.direct_forms, self._direct_layer)),
            (forms, "pair_matrix", self._pair_matrix(forms.pair_matrix)),
            (forms, "pair_forms", self._clock(self.kernel, forms.pair_forms, lambda pairs, _: self._pairs[id(pairs)])),
        ]
        with ExitStack() as stack:
            for owner, name, function in replaced:
                stack.enter_context(patch.object(owner, name, function))
            yield

    @staticmethod
    def _clock(sums: dict[str, float], function: Callable[..., Any], layer: Callable[..., str]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            start = perf_counter()
            found = function(*arguments)
            sums[layer(*arguments)] += perf_counter() - start
            return found

        return run

    def _basis_layer(self, room: Tensor, found: Tensor, basis: Tensor | None) -> str:
        return self._bases.get(id(basis), "")  # what is only copied is of no layer

    def _direct_layer(self, recording: Recording, block: KroneckerBlock, *_: Any) -> str:
        self.chosen[block.name] = "direct", recording.positions(block), block
        return block.name

    def _pair_matrix(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(recording: Recording, block: KroneckerBlock, *rest: Any) -> Tensor:
            start = perf_counter()
            found = function(recording, block, *rest)
            self.kernel[block.name] += perf_counter() - start
            self.chosen[block.name] = "pairs", recording.positions(block), block
            self._pairs[id(found)] = block.name
            return found

        return run

    def _cut(
        self,
        stream: Callable[..., None],
        recording: Recording,
        cotangent: Tensor,
        blocks: Any,
        take: Callable[..., None],
    ) -> None:
        """A backward whose time goes to the layer whose output the gradient has reached last.

        The clock stands still while gradients are taken.
        """
        moments: list[tuple[float, str]] = []
        taking = [0.0]

        def taken(*arguments: Any) -> None:
            start = perf_counter()
            take(*arguments)
            taking[0] += perf_counter() - start

        def note(name: str) -> None:
            moments.append((perf_counter() - taking[0], name))

        reached = [(name, use.edge.node) for name, uses in recording.uses.items() for use in uses]
        handles = [node.register_prehook(_noting(note, name)) for name, node in reached]
        try:
            stream(recording, cotangent, blocks, taken)
        finally:
            for handle in handles:
                handle.remove()
        note("")
        for (start, name), (end, _) in pairwise(moments):
            self.backward[name] += end - start


def _noting(note: Callable[[str], None], name: str) -> Callable[[Any], None]:
    return lambda _: note(name)


def profile(network: Network, classes: int, setup: Setup) -> Profile:
    """The times of one call of ``influence`` after another that warms up."""
    ifc, x = fitted(network, classes, setup, setup.size(network.batch))
    assert ifc.factors is not None
    assert ifc._session is not None
    bases = {id(own.basis.outputs): name for name, own in ifc.factors.blocks.items() if own.basis is not None}
    clocks = Clocks(bases)
    ifc.influence(x)
    with clocks.running():
        start = perf_counter()
        ifc.influence(x)
        total = perf_counter() - start
    share = 1e3 / (len(x) * classes)
    layers = [_layer_time(block.name, clocks, share) for block in ifc._session.recorded]
    return Profile(layers, total * share)


def _layer_time(name: str, clocks: Clocks, share: float) -> LayerTime:
    kernel, positions, block = clocks.chosen.get(name, ("", 0, None))
    sizes = (0, 0) if block is None else (block.rows, block.groups * block.columns)
    seconds = (clocks.backward[name], clocks.rotation[name], clocks.kernel[name])
    return LayerTime(name, kernel, positions, *sizes, *(own * share for own in seconds))


def rows(found: Profile) -> list[tuple[str, ...]]:
    """Cells: every layer with a kernel, norms together, what is left, and the total."""
    cells = [
        (
            *(own.layer, own.kernel, str(own.positions), str(own.rows), str(own.columns)),
            *(f"{value:.4f}" for value in (own.backward, own.rotation, own.kernel_time, own.together)),
        )
        for own in found.layers
        if own.kernel
    ]
    norms = sum(own.backward for own in found.layers if not own.kernel)
    rest = found.total - sum(own.together for own in found.layers)
    for name, value in (("backward from layers without a kernel", norms), ("all else", rest), ("total", found.total)):
        cells.append((name, *[""] * 7, f"{value:.4f}"))
    return cells


def markdown(found: Profile) -> str:
    """The table for a page."""
    lines = [f"| {' | '.join(row)} |" for row in (HEADINGS, *rows(found))]
    return "\n".join([lines[0], "|---|---|" + "---:|" * (len(HEADINGS) - 2), *lines[1:], ""])


def comparison(before: Profile, after: Profile) -> str:
    """A table for a page: every layer that has a kernel, what is left, and the total, then and now.

    Rotations count with the kernels: the first kernels did them inside.
    """
    first = {own.layer: own for own in before.layers}
    heads = ("layer", "kernel", "T", "O", "J", "backward before", "now", "kernel before", "now", "both before", "now")
    cells = [
        (
            *(now.layer, _change(then.kernel, now.kernel), str(now.positions), str(now.rows), str(now.columns)),
            *(f"{value:.4f}" for value in (then.backward, now.backward)),
            *(f"{own.rotation + own.kernel_time:.4f}" for own in (then, now)),
            *(f"{own.together:.4f}" for own in (then, now)),
        )
        for now in after.layers
        if now.kernel and (then := first.get(now.layer))
    ]
    sums = [sum(own.together for own in found.layers if own.kernel) for found in (before, after)]
    rest = [found.total - own for found, own in zip((before, after), sums, strict=True)]
    cells.append(("all else, norms too", *[""] * 8, *(f"{value:.4f}" for value in rest)))
    cells.append(("total", *[""] * 8, f"{before.total:.4f}", f"{after.total:.4f}"))
    lines = [f"| {' | '.join(row)} |" for row in (heads, *cells)]
    return "\n".join([lines[0], "|---|---|" + "---:|" * (len(heads) - 2), *lines[1:], ""])


def _change(before: str, after: str) -> str:
    return after if before == after else f"{before} → {after}"


def as_profile(content: dict[str, Any]) -> Profile:
    """A profile from JSON."""
    return Profile([LayerTime(**layer) for layer in content["layers"]], content["total"])


def main() -> None:
    """Profile the networks that are named, show tables and write ``results/profile.json``.

    What the file has of other networks, and of earlier kernels under ``before``, stays.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("networks", nargs="*", metavar="NETWORK", help=f"{', '.join(NETWORKS)}; all without a name")
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--note", default="", help="what readers should know, such as other work at the time")
    parser.add_argument("--output", type=Path, default=RESULTS / "profile.json")
    options = parser.parse_args()
    console, kept = Console(width=140), {}
    if options.output.exists():
        kept = json.loads(options.output.read_text(encoding="utf-8"))
    found = kept.get("networks", {})
    for name in options.networks or NETWORKS:
        made = profile(NETWORKS[name], options.classes, Setup(options.threads, 1))
        console.print(f"{name}, K = {options.classes}, threads: {options.threads}; ms an example and label")
        console.print(table(HEADINGS, rows(made), left=2))
        found[name] = asdict(made)
        where = environment() | {"note": options.note}
        content = kept | {"environment": where, "classes": options.classes, "networks": found}
        with atomic_write(options.output) as scratch:
            scratch.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
