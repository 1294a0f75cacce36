"""Models of others: the inventory of any modules, the influence of small networks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fuzz import networks
from fuzz.common import examples
from fuzz.drawing import Draw
from ifcomp import IFComp


def inventory(data: bytes, folder: Path) -> None:
    """Inspect arbitrary modules: they are covered or refused."""
    draw = Draw(data[:3])
    settings: dict[str, Any] = {"layers": draw.choice((None, None, "last", "*", "0*", "[", "", ("0", "1.*")))}
    settings |= {"sua": draw.choice(("auto", True, False)), "skip_uncovered": bool(draw.number(0, 1))}
    coverage = IFComp(networks.tree(data[3:]), **settings).coverage
    assert 0 <= coverage.covered <= coverage.total
    str(coverage)


def influence(data: bytes, folder: Path) -> None:
    """Score small networks: the influence is finite and non-negative and the model unchanged, or it is refused."""
    draw, network = Draw(data[:3]), networks.network(data[3:])
    if network is None:
        return
    x, y = examples()[0].to(next(network.parameters()).dtype), examples()[1] % network[-1].out_features
    before = {name: value.clone() for name, value in network.state_dict().items()}
    settings: dict[str, Any] = {"fisher": draw.choice(("sampled", "exact", "empirical"))}
    settings |= {"beta": draw.choice((1.0, 0.0, 0.3)), "skip_uncovered": bool(draw.number(0, 1))}
    result = IFComp(network, **settings).fit([(x, y)], progress=False).influence(x)
    assert bool((torch.isfinite(result) & (result >= 0)).all()), result
    for name, value in network.state_dict().items():
        assert torch.equal(before[name].nan_to_num(), value.nan_to_num()), name
