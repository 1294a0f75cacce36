"""One process scores many inputs in batches of random size, with errors in between.

Its memory must stay flat after the warm-up, and every result must have the bits of a fresh process: a child that is
forked from a process that has only loaded the fit. ``make soak``, or ``python tests/faults/soak.py --inputs 3000``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ifcomp import IFComp

FEATURES, CLASSES, LARGEST_BATCH = 32, 10, 2048

#: Share of the inputs before memory is measured, and the growth in bytes that is allowed after it.
WARM_UP, GROWTH = 0.2, 16 * 2**20

#: Inputs that are refused.
WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "shape": lambda x: x[:, :-1],
    "axes": lambda x: x[None],
    "NaN": lambda x: x.index_fill(1, torch.tensor([3]), torch.nan),
    "infinity": lambda x: x.index_fill(1, torch.tensor([0]), torch.inf),
    "dtype": lambda x: x.double(),
    "integers": lambda x: x.long(),
    "empty": lambda x: x[:0],
}

VERBS: tuple[Callable[[IFComp, Tensor], Tensor], ...] = (
    lambda ifc, x: ifc.influence(x),
    lambda ifc, x: ifc.predict_proba(x),
    lambda ifc, x: ifc.bounded_complexity(x),
    lambda ifc, x: torch.tensor(ifc.score([x], progress=False).frame.to_numpy()),
)


def network() -> nn.Module:
    """Return a classifier with a normalisation layer."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 48), nn.LayerNorm(48), nn.ReLU(), nn.Linear(48, CLASSES)).eval()


def answer_afresh(connection: Connection, ifc: IFComp) -> None:
    """Answer every request in a child of this process, which itself computes nothing."""
    context = multiprocessing.get_context("fork")
    for verb, x in iter(connection.recv, None):
        child = context.Process(
            target=lambda verb=verb, x=x: connection.send(VERBS[verb](ifc, torch.from_numpy(x)).numpy())
        )
        child.start()
        child.join()


def resident_bytes() -> int:
    """Return the memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def soak(ifc: IFComp, inputs: int, fresh: Connection, seed: int = 0) -> dict[str, Any]:
    """Score the inputs and return what was found."""
    generator, done, batches, errors, before, peak = torch.Generator().manual_seed(seed), 0, 0, 0, 0, 0
    while done < inputs:
        size = int(torch.randint(1, LARGEST_BATCH + 1, (), generator=generator))
        x, verb = torch.randn(size, FEATURES, generator=generator), batches % len(VERBS)
        name, damage = list(WRONG.items())[batches % len(WRONG)]
        try:
            VERBS[verb](ifc, damage(x))
            raise SystemExit(f"inputs with another {name} were scored")
        except Exception:  # an error of the library, or of the model
            errors += 1
        result = VERBS[verb](ifc, x)
        fresh.send((verb, x.numpy()))
        expected = torch.from_numpy(fresh.recv())
        assert torch.equal(result.nan_to_num(7.0), expected.nan_to_num(7.0)), (verb, size, done)
        done, batches = done + size, batches + 1
        if done >= WARM_UP * inputs:
            before, peak = before or resident_bytes(), max(peak, resident_bytes())
    return {"inputs": done, "batches": batches, "errors": errors, "after the warm-up": before, "largest": peak}


def main() -> None:
    """Fit, save, load, score, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=200_000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(400, FEATURES, generator=generator), torch.arange(400) % CLASSES
    with tempfile.TemporaryDirectory() as folder:
        IFComp(network()).fit([(x, y)], progress=False).save(Path(folder) / "run")
        ifc = IFComp.load(Path(folder) / "run", network())
    mine, other = multiprocessing.Pipe()
    context = multiprocessing.get_context("fork")
    process = context.Process(target=answer_afresh, args=(other, ifc))
    process.start()
    start = time.monotonic()
    found = soak(ifc, arguments.inputs, mine)
    mine.send(None)
    process.join()
    growth = found["largest"] - found["after the warm-up"]
    sys.stdout.write(f"{found | {'growth': growth, 'seconds': round(time.monotonic() - start)}}\n")
    assert growth < GROWTH, growth


if __name__ == "__main__":
    main()
