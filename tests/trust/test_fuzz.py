"""Fuzz targets on a few inputs: damaged seeds, arbitrary bytes, and inputs that failed before."""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fuzz.drawing import Draw
from fuzz.targets import TARGETS
from ifcomp import IFComp
from ifcomp.errors import FingerprintError, IfcompError, ModelError

#: Number of inputs of slow targets; the others get 60. `python -m fuzz` uses thousands.
INPUTS = {"report": 5, "influence": 10, "factors-content": 30}


@cache
def seeds(name: str) -> list[bytes]:
    return list(TARGETS[name].seeds())


def damaged(seed: bytes, places: list[tuple[int, bytes]]) -> bytes:
    """Replace bytes at the given places."""
    for place, content in places:
        at = place % (len(seed) + 1)
        seed = seed[:at] + content + seed[at + len(content) :]
    return seed


def once(name: str, data: bytes, folder: Path) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            TARGETS[name].run(data, folder)
    except IfcompError:
        pass


@pytest.mark.parametrize("name", TARGETS)
def test_targets_raise_only_errors_of_the_library(name: str, tmp_path: Path) -> None:
    places = st.lists(st.tuples(st.integers(0, 2**16), st.binary(max_size=8)), max_size=4)

    @settings(
        max_examples=INPUTS.get(name, 60), deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
    )
    @given(st.one_of(st.builds(damaged, st.sampled_from(seeds(name)), places), st.binary(max_size=200)))
    def check(data: bytes) -> None:
        once(name, data, tmp_path)

    check()


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_are_valid(name: str, tmp_path: Path) -> None:
    """At least one seed of each target that reads files is accepted."""
    assert seeds(name)
    if name in ("factors", "weights", "npz", "parquet", "csv", "decisions", "folder", "report", "influence"):
        successes = []
        for seed in seeds(name):
            try:
                TARGETS[name].run(seed, tmp_path)
                successes.append(seed)
            except IfcompError:
                pass
        assert successes


def test_the_same_bytes_give_the_same_decisions() -> None:
    data = bytes(range(256))
    first, second = Draw(data), Draw(data)
    assert [first.json() for _ in range(20)] == [second.json() for _ in range(20)]
    assert Draw(b"").choice(("a", "b")) == "a"


# Failures of networks found by fuzzing; those of files are in test_hostile_files.py -------------------------------


class Scaled(nn.Module):
    """Multiplication by a scalar parameter without axes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(4, 3), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale


class Branching(Scaled):
    """A network that `vmap` cannot run, so examples are evaluated one by one."""

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        return logits if bool(logits.isfinite().all()) else torch.zeros_like(logits)


@pytest.mark.parametrize("kind", [Scaled, Branching])
def test_scalar_parameters_are_covered(kind: type[Scaled]) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(6, 4)
    ifc = IFComp(model, damping=0.5, fisher="exact", layers=["scale"]).fit([x], progress=False)
    probability = model(x).softmax(1).detach().double()
    logits = model.inner(x).detach().double()
    slopes = (logits * probability).sum(1, keepdim=True) - logits  # d(-log p_y)/d(scale)
    curvature = (probability * slopes.square()).sum(1).mean()
    torch.testing.assert_close(ifc.influence(x), slopes.square() / (curvature + 0.5), rtol=1e-5, atol=1e-7)


def test_models_without_values_are_refused() -> None:
    with pytest.raises(ModelError, match="meta device"):
        IFComp(nn.Linear(4, 3, device="meta"))


def test_factors_of_another_precision_are_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3), torch.randn(6, 4)
    factors = IFComp(model.double()).fit([x.double()], progress=False).factors
    assert factors is not None
    with pytest.raises(FingerprintError, match=r"not torch\.float32"):
        IFComp.from_factors(model.float(), factors)


def test_negative_seeds_draw_probes() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3), torch.randn(6, 4)
    ifc = IFComp(model, seed=-1).fit([x], progress=False)
    assert ifc.parametric_complexity(x, probes=1).isfinite().all()
