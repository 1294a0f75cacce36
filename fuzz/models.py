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
    """Modules of any kind: covered, or refused."""
    draw = Draw(data[:3])
    settings: dict[str, Any] = {"layers": draw.choice((None, None, "last", "*", "0*", "[", "", ("0", "1.*")))}
    settings |= {"sua": draw.choice(("auto", True, False)), "skip_uncovered": bool(draw.number(0, 1))}
    found = IFComp(networks.tree(data[3:]), **settings)
    assert 0 <= found.coverage.covered <= found.coverage.total
    str(found.coverage)


def influence(data: bytes, folder: Path) -> None:
    """Small networks: their influence is finite and not negative, and they are not changed; or they are refused."""
    draw, made = Draw(data[:3]), networks.network(data[3:])
    if made is None:
        return
    x, y = examples()[0].to(next(made.parameters()).dtype), examples()[1] % made[-1].out_features
    before = {name: value.clone() for name, value in made.state_dict().items()}
    settings: dict[str, Any] = {"fisher": draw.choice(("sampled", "exact", "empirical"))}
    settings |= {"beta": draw.choice((1.0, 0.0, 0.3)), "skip_uncovered": bool(draw.number(0, 1))}
    found = IFComp(made, **settings).fit([(x, y)], progress=False).influence(x)
    assert bool((torch.isfinite(found) & (found >= 0)).all()), found
    for name, value in made.state_dict().items():
        assert torch.equal(before[name].nan_to_num(), value.nan_to_num()), name
