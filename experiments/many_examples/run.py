"""Measure peak memory and time of the verbs with a generated data set and a small MLP, one process per verb.

python -m experiments.many_examples.run
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.timing import environment
from ifcomp import IFComp
from ifcomp.io.files import atomic_write

RESULTS = Path(__file__).parent / "results.json"
COUNTS = (100_000, 1_000_000)
FEATURES, HIDDEN, CLASSES, BATCH = 16, 32, 10, 1_000


class Generated:
    """Re-iterable over batches ``(x, y)`` that are generated when they are read.

    Args:
        count: Number of examples.
        seed: Seed of the examples.
    """

    def __init__(self, count: int, seed: int = 0) -> None:
        self.count, self.seed = count, seed
        self.centres = 1.5 * torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return self.count // BATCH

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(len(self)):
            generator = torch.Generator().manual_seed(self.seed * 10**6 + number)
            y = torch.randint(0, CLASSES, (BATCH,), generator=generator)
            yield self.centres[y] + torch.randn(BATCH, FEATURES, generator=generator), y


def trained() -> nn.Sequential:
    """Return an MLP that is trained on 100 batches."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)
    )
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for x, y in Generated(100 * BATCH, seed=9):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.eval()


def fitted() -> IFComp:
    """Return a predictor that is fitted on ten batches."""
    return IFComp(trained()).fit(Generated(10 * BATCH), progress=False)


#: Preparation of every verb, and the verb.
VERBS: Mapping[str, tuple[Callable[[], IFComp], Callable[[IFComp, Generated], Any]]] = {
    "fit": (lambda: IFComp(trained()), lambda ifc, data: ifc.fit(data, progress=False)),
    "audit": (lambda: IFComp(trained()), lambda ifc, data: ifc.audit(data, progress=False)),
    "ood_detector": (fitted, lambda ifc, data: ifc.ood_detector(data, progress=False)),
    "calibrate": (fitted, lambda ifc, data: ifc.calibrate(data, progress=False)),
    "score": (fitted, lambda ifc, data: ifc.score(data, probes=2, progress=False)),
}


def measure(verb: str, count: int) -> dict[str, float]:
    """Run a verb in this process. Return peak bytes before and after it, and the seconds of the processor."""
    torch.set_num_threads(1)
    prepare, run = VERBS[verb]
    ifc = prepare()
    before, started, clock = _peak(), time.process_time(), time.perf_counter()
    kept = run(ifc, Generated(count))
    seconds, elapsed = time.process_time() - started, time.perf_counter() - clock
    del kept
    return {"peak_before": before, "peak": _peak(), "seconds": seconds, "elapsed": elapsed}


def _peak() -> int:
    """Return the peak resident set size of this process in bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    """Measure all verbs, or one verb in this process."""
    if len(sys.argv) == 3:
        sys.stdout.write(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
        return
    results: dict[str, Any] = {"date": date.today().isoformat(), "environment": environment(), "verbs": {}}
    for count in COUNTS:
        for verb in VERBS:
            command = [sys.executable, "-m", "experiments.many_examples.run", verb, str(count)]
            output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            results["verbs"].setdefault(verb, {})[str(count)] = json.loads(output)
            sys.stdout.write(f"{verb} {count} {output}\n")
            with atomic_write(RESULTS) as scratch:
                scratch.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
