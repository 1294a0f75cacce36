"""Where the time goes: parts of a whole, of the kernels that the library chose."""

import json
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.networks import LENET, RESNET20
from benchmarks.page import page
from benchmarks.profile import Clocks, LayerTime, Profile, markdown, profile, rows
from benchmarks.suite import Setup
from benchmarks.suites.influence import fitted

SETUP = Setup(1, 1, tiny=True)


def test_layers_are_parts_of_the_whole() -> None:
    found = profile(LENET, 10, SETUP)
    sizes = {own.layer: (own.kernel, own.positions, own.rows, own.columns) for own in found.layers}
    assert sizes == {
        "conv1": ("direct", 784, 6, 26),
        "conv2": ("direct", 100, 16, 151),
        "fc1": ("pairs", 1, 120, 401),
        "fc2": ("pairs", 1, 84, 121),
        "fc3": ("pairs", 1, 10, 85),
    }
    assert 0 < sum(own.together for own in found.layers) < found.total
    assert all(own.rotation > 0 and own.kernel_time > 0 for own in found.layers)
    times = {own.layer: own.backward for own in found.layers}
    assert times.pop("conv1") == 0  # nothing before it needs a gradient
    assert all(value > 0 for value in times.values())


def test_norms_have_a_backward_and_no_kernel() -> None:
    found = profile(RESNET20, 10, SETUP)
    norms = [own for own in found.layers if not own.kernel]
    assert len(norms) == 19
    assert all(own.backward > 0 and own.kernel_time == own.rotation == 0 for own in norms)


def test_clocks_change_nothing_and_go_away() -> None:
    ifc, x = fitted(LENET, 10, SETUP, 3)
    before = ifc.influence(x)
    clocks = Clocks({id(own.basis.outputs): name for name, own in ifc.factors.blocks.items()})
    with clocks.running():
        assert torch.equal(ifc.influence(x), before)
    used = dict(clocks.kernel)
    ifc.influence(x)
    assert clocks.kernel == used


def test_rows_add_up() -> None:
    found = Profile([LayerTime("a", "direct", 4, 2, 3, 1.0, 2.0, 3.0), LayerTime("n", "", 0, 0, 0, 0.5, 0.0, 0.0)], 8.0)
    assert rows(found) == [
        ("a", "direct", "4", "2", "3", "1.0000", "2.0000", "3.0000", "6.0000"),
        ("backward from layers without a kernel", *[""] * 7, "0.5000"),
        ("all else", *[""] * 7, "1.5000"),
        ("total", *[""] * 7, "8.0000"),
    ]
    assert "| a | direct | 4 |" in markdown(found)


def test_the_page_shows_then_and_now(tmp_path: Path) -> None:
    then = Profile([LayerTime("a", "direct", 4, 2, 3, 1.0, 0.0, 5.0), LayerTime("n", "", 0, 0, 0, 0.5, 0.0, 0.0)], 8.0)
    now = Profile([LayerTime("a", "pairs", 4, 2, 3, 1.0, 0.5, 0.25), LayerTime("n", "", 0, 0, 0, 0.5, 0.0, 0.0)], 3.0)
    where = {"cpu": "x", "torch": "2", "date": "today", "commit": "c" * 40, "note": "A quiet night."}
    content = {
        "environment": where,
        "classes": 10,
        "networks": {"Net": asdict(now), "Other": asdict(now)},
        "before": {"commit": "b" * 40, "networks": {"Net": asdict(then)}},
    }
    (tmp_path / "profile.json").write_text(json.dumps(content))
    text = page(tmp_path)
    assert "x, torch 2, today, commit ccccccc. A quiet night." in text
    assert "commit bbbbbbb" in text
    assert "| a | direct → pairs | 4 | 2 | 3 | 1.0000 | 1.0000 | 5.0000 | 0.7500 | 6.0000 | 1.7500 |" in text
    assert "| all else, norms too |  |  |  |  |  |  |  |  | 2.0000 | 1.2500 |" in text
    assert "| total |  |  |  |  |  |  |  |  | 8.0000 | 3.0000 |" in text
    assert markdown(now) in text  # nothing to compare with
