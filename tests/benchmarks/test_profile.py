"""Where the time goes: parts of a whole, of the kernels that the library chose."""

import torch

from benchmarks.networks import LENET, RESNET20
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
