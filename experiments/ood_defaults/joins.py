"""AUROC of the members of the OOD detector and of their joins.

Members are chosen on the networks of `CHOICE` and reported on those of `REPORT`, from the files that
`experiments.ood_defaults.members` wrote. Small networks on tables, texts and digits are trained here; they show what
happens if a member fails. p is the smoothed share of held-out inputs with a larger score, continued by an exponential
tail (`ifcomp.tasks.ood.tail_surprisal`). The join of the library is the logarithm of the weighted mean of 1 / p, with
the weights of `ifcomp.tasks.ood.member_weights`. Other joins of all three members are shown beside it.

    IFCOMP_CACHE=... python -m experiments.ood_defaults.joins
"""

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.audit_defaults.record import begin, continue_run
from experiments.ood_defaults.members import CHOICE, FIT_IMAGES, IMAGES, REFERENCE_IMAGES, REPORT, member_folder
from experiments.ood_defaults.run import SITUATIONS
from experiments.ood_defaults.situations import Situation
from ifcomp import IFComp
from ifcomp.curvature.reference import unit_rows
from ifcomp.errors import IfcompWarning
from ifcomp.evidence.neighbours import NEIGHBOURS, nearest_units
from ifcomp.tasks.ood import DEFAULT_MEMBERS, MEMBERS, join_scores, member_weights, ood_metrics, tail_surprisal
from ifcomp.tasks.simple_scores import energy, max_softmax

HERE = Path(__file__).parent
#: Scores [N] by name, of one set of inputs.
Scores = Mapping[str, np.ndarray]
JOINS = [join for size in (2, 3) for join in combinations(MEMBERS, size)]
SMALL = {name: (make, arguments, seeds) for name, (make, arguments, seeds) in SITUATIONS.items() if seeds}
SETTINGS = {"fit_images": FIT_IMAGES, "reference_images": REFERENCE_IMAGES, "images": IMAGES, "neighbours": NEIGHBOURS}


#: Other joins by name, as functions of the surprisals -log p, [members, N].
OTHER_JOINS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "sum of -log p": lambda surprisals: surprisals.sum(0),
    "largest -log p": lambda surprisals: surprisals.max(0),
}


def rank_surprisal(values: np.ndarray, held_out: np.ndarray) -> np.ndarray:
    """Return ``-log p`` without the exponential tail, [N]."""
    ordered = np.sort(held_out)
    middle = (np.searchsorted(ordered, values, "left") + np.searchsorted(ordered, values, "right")) / 2
    result: np.ndarray = -np.log((len(ordered) - middle + 0.5) / (len(ordered) + 1))
    return result


def aurocs(held_out: Scores, inside: Scores, outside: Mapping[str, Scores]) -> dict[str, dict[str, float]]:
    """Return the AUROC of every score and join, for every OOD set."""

    def scores(values: Scores) -> dict[str, np.ndarray]:
        softmax = held_out["max softmax"]
        joined = {
            " + ".join(join): join_scores(values, held_out, member_weights(held_out, softmax, join)) for join in JOINS
        }
        equal = dict.fromkeys(MEMBERS, 1.0)
        surprisals = np.array([tail_surprisal(values[name], held_out[name]) for name in MEMBERS])
        others = {f"all three, {name}": join(surprisals) for name, join in OTHER_JOINS.items()}
        others["all three, equal weights"] = join_scores(values, held_out, equal)
        ranks = [rank_surprisal(values[name], held_out[name]) for name in MEMBERS]
        others["all three, equal weights, without the tail"] = np.logaddexp.reduce(ranks, axis=0)
        return {**values, **joined, **others}

    ours = scores(inside)
    others = {kind: scores(values) for kind, values in outside.items()}
    return {
        name: {kind: ood_metrics(ours[name], values[name]).auroc for kind, values in others.items()} for name in ours
    }


def saved_members(name: str) -> dict[str, dict[str, np.ndarray]]:
    """Return the member scores of an image network by set."""
    reference = unit_rows(torch.from_numpy(np.load(member_folder(name) / "reference.npz")["features"]))
    sets = {}
    for path in sorted(member_folder(name).glob("*.npz")):
        if path.stem != "reference":
            arrays = np.load(path)
            queries = unit_rows(torch.from_numpy(arrays["features"]))
            sets[path.stem] = {
                "max softmax": max_softmax(arrays["logits"]),
                "complexity": arrays["complexity"],
                "energy": energy(arrays["logits"]),
                "neighbours": nearest_units(queries, reference, NEIGHBOURS).distances[:, -1].numpy(),
            }
    return sets


def network(name: str) -> dict[str, Any]:
    """Return the AUROC of all scores of an image network."""
    sets = saved_members(name)
    held_out = sets.pop("held out")
    weights = member_weights(held_out, held_out["max softmax"], tuple(MEMBERS))
    return {"auroc": aurocs(held_out, sets.pop("in"), sets), "weight of complexity": weights["complexity"]}


def small(make: Callable[..., Situation], arguments: tuple[Any, ...]) -> dict[str, Any]:
    """Return the AUROC of all scores of a small network. Every second held-out input is in-distribution data."""
    case = make(*arguments)
    ifc = IFComp(case.model).fit(list(case.train.split(100)), progress=False)
    with warnings.catch_warnings(action="ignore", category=IfcompWarning):  # few held-out inputs
        detector = ifc.ood_detector([case.held_out[::2]], score=tuple(MEMBERS), progress=False)

    def scores(inputs: torch.Tensor) -> dict[str, np.ndarray]:
        with torch.no_grad():
            logits = case.model(inputs)
        parts = {name: values.numpy() for name, values in detector.parts(inputs).items()}
        return {"max softmax": max_softmax(logits), **parts}

    outside = {kind: scores(inputs) for kind, inputs in case.ood.items()}
    return {"auroc": aurocs(scores(case.held_out[::2]), scores(case.held_out[1::2]), outside)}


def page(results: dict[str, Any]) -> str:
    """Format the tables as markdown, AUROC in percent."""
    titles = {name: f"**{name}**" if name == " + ".join(DEFAULT_MEMBERS) else name for name in _names(results)}
    parts = [
        "AUROC of OOD against in-distribution inputs in percent; the default is bold. The commands are `python -m "
        "experiments.ood_defaults.members` and `python -m experiments.ood_defaults.joins`; settings, date, hardware "
        "and all runs are in joins.json."
    ]
    for networks, purpose in ((CHOICE, "members are chosen on it"), (REPORT, "report")):
        for name in networks:
            if name in results:
                found = results[name]["auroc"]
                kinds = list(found["energy"])
                rows = [
                    [titles[score], *values.values(), np.mean(list(values.values()))] for score, values in found.items()
                ]
                parts.append(f"{name} ({purpose}):\n\n" + _table(["score", *kinds, "mean"], rows))
    runs_of = {name: [run["auroc"] for key, run in results.items() if key.startswith(name)] for name in SMALL}
    rows = [
        [titles[score], *(np.mean([list(run[score].values()) for run in runs]) for runs in runs_of.values() if runs)]
        for score in titles
    ]
    shown = [name for name, runs in runs_of.items() if runs]
    parts.append(
        "Small networks, means over kinds of OOD inputs and seeds:\n\n"
        + _table(["score", *shown, "mean"], [[*row, np.mean(row[1:])] for row in rows])
    )
    return "\n\n".join(parts) + "\n"


def _names(results: dict[str, Any]) -> list[str]:
    return list(next(iter(results.values()))["auroc"])


def _table(columns: list[str], rows: list[list[Any]]) -> str:
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    return "\n".join([*lines, *(f"| {row[0]} | {' | '.join(f'{100 * v:.2f}' for v in row[1:])} |" for row in rows)])


def main() -> None:
    """Run the missing units, then write the tables."""
    folder = begin(__doc__, HERE / "results")
    units: dict[str, Callable[[], Any]] = {
        f"{name} {seed}": partial(small, make, (*arguments, seed))
        for name, (make, arguments, seeds) in SMALL.items()
        for seed in range(seeds)
    }
    units |= {name: partial(network, name) for name in CHOICE | REPORT if (member_folder(name) / "complete").exists()}
    results = continue_run(folder / "joins.json", SETTINGS, units)
    (folder / "joins.md").write_text(page(results))


if __name__ == "__main__":
    main()
