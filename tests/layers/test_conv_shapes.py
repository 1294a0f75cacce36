"""Convolutions of drawn shapes: patches, second moments and influence equal the dense oracles."""

import math
import warnings
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from ifcomp.influence.kernels import pair_matrix
from ifcomp.layers.block import KroneckerBlock
from ifcomp.layers.conv import conv, unfold
from torch import Tensor, nn

from cases import Case, normal, seeded, weight
from comparison import assert_same, dense, dense_moments, fitted, oracle_blocks, oracle_influence
from ifcomp import IFComp
from ifcomp.blocks.block import Basis
from ifcomp.layers.registry import Selection
from oracles import Convolution, patches

TYPES = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Shape:
    """A convolution and the size of its inputs; the representation is what a failing example shows."""

    axes: int
    channels: int
    outputs: int
    spatial: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]

    def make(self) -> Convolution:
        """The module, with torch's own initial values."""
        return TYPES[self.axes - 1](self.channels, self.outputs, **dict(self.options))

    def inputs(self, size: int) -> Tensor:
        """Random inputs ``[size, channels, *spatial]`` in float64."""
        generator = torch.Generator().manual_seed(0)
        return torch.randn(size, self.channels, *self.spatial, generator=generator, dtype=torch.float64)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Tiny convolutions of every option that has at least one output position."""
    axes = draw(st.integers(1, 3))
    largest = (7, 5, 3)[axes - 1]

    def per_axis(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(axes))

    groups = draw(st.integers(1, 3))
    channels, outputs = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))
    spatial, kernel, dilation = per_axis(1, largest), per_axis(1, 3), per_axis(1, 3)
    padding = draw(st.one_of(st.just("same"), st.just("valid"), st.integers(0, 2), st.just(per_axis(0, 2))))
    stride = (1,) * axes if padding == "same" else per_axis(1, 3)
    mode = draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
    spans = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    before_and_after = widths(padding, spans)
    for size, span, (before, after) in zip(spatial, spans, before_and_after, strict=True):
        assume(size + before + after > span)
        limit = {"reflect": size - 1, "circular": size}.get(mode, math.inf)
        assume(max(before, after) <= limit)
    options = {
        "kernel_size": kernel,
        "stride": stride,
        "dilation": dilation,
        "padding": padding,
        "padding_mode": mode,
        "groups": groups,
        "bias": draw(st.booleans()),
    }
    return Shape(axes, channels, outputs, spatial, tuple(options.items()))


def widths(padding: str | int | tuple[int, ...], spans: list[int]) -> list[tuple[int, int]]:
    """Padding before and after each axis, to draw only what torch accepts."""
    if padding == "same":
        return [(span // 2, span - span // 2) for span in spans]
    if padding == "valid":
        return [(0, 0)] * len(spans)
    sides = (padding,) * len(spans) if isinstance(padding, int) else padding
    return [(side, side) for side in sides]


def columns(inputs: Tensor, module: nn.Module) -> Tensor:
    """Unfolded inputs [N, G, J, T]."""
    view = unfold(inputs, module)
    positions = view.dim() - len(module.kernel_size)
    return view.flatten(positions).flatten(2, positions - 1)


many = settings(max_examples=60, deadline=None, derandomize=True)


@many
@given(shapes())
def test_patches_equal_the_oracle(shape: Shape) -> None:
    module, inputs = shape.make().double(), shape.inputs(2)
    found = columns(inputs, module)
    assert torch.equal(found, patches(inputs, module).mT)
    kernel = module.weight.detach().reshape(module.groups, -1, found.shape[2])
    bias = 0.0 if module.bias is None else module.bias.detach()[:, None]
    convolved = module(inputs).detach().flatten(2)
    torch.testing.assert_close((kernel @ found).flatten(1, 2) + bias, convolved, rtol=1e-12, atol=1e-12)


@many
@given(shapes())
def test_windows_are_patches(shape: Shape) -> None:
    module, inputs = shape.make().double(), shape.inputs(6)
    site = conv("x", module, Selection(sua=False))
    assert site is not None
    (block,) = site.blocks
    assert isinstance(block, KroneckerBlock)
    assert block.has_windows is (module.kernel_size[-1] > 1 and module.dilation[-1] == 1)
    assume(block.has_windows)
    for rows in (1, 3):
        own = block.windows(inputs.unflatten(0, (-1, rows)))
        assert all(part.is_contiguous() for part in own[:3])
        where = own.places[:, None, None] + own.runs[:, None] + torch.arange(own.length)
        expected = patches(inputs, module).unflatten(0, (-1, rows)).transpose(1, 2)  # [B, G, R, T, J]
        assert torch.equal(own.images[:, where.long()].flatten(2), expected.flatten(2, 3).flatten(0, 1))


@many
@given(shapes())
def test_rotated_windows_are_patches_with_rotated_channels(shape: Shape) -> None:
    module, inputs = shape.make().double(), shape.inputs(2)
    site = conv("x", module, Selection(sua=True))
    assert site is not None
    (block,) = site.blocks
    assume(isinstance(block, KroneckerBlock) and block.shared_offsets)
    assert isinstance(block, KroneckerBlock)
    basis = torch.randn(block.groups, block.channels, block.channels, dtype=torch.float64)
    by_channel = patches(inputs, module).unflatten(-1, (block.channels, -1))  # [N, G, T, C, offsets]
    expected = torch.einsum("ngtck,gcd->ngtkd", by_channel, basis).flatten(3)
    found = block.rotated_windows(inputs, basis).flatten(2, 1 + shape.axes).flatten(3)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@many
@given(shapes())
def test_pairs_leave_out_nothing_but_padding(shape: Shape) -> None:
    """Inputs are above zero, so that what is zero is padding; so they stay with a basis above zero."""
    module, inputs = shape.make().double(), shape.inputs(2).abs() + 0.1
    site = conv("x", module, Selection(sua=True))
    assert site is not None
    (block,) = site.blocks
    assume(isinstance(block, KroneckerBlock) and block.shared_offsets)
    assert isinstance(block, KroneckerBlock)
    seen = patches(inputs, module).unflatten(-1, (block.channels, -1))[0, 0, :, 0] > 0  # [T, offsets]
    assert torch.equal(block.inside(inputs.shape[2:]), seen)
    basis = Basis(torch.rand(block.groups, block.channels, block.channels, dtype=torch.float64), torch.empty(0))
    assert basis.inputs is not None
    windows = block.rotated_windows(inputs, basis.inputs).flatten(2, 1 + shape.axes).flatten(3)  # [N, G, T, J]
    if block.has_bias:
        windows = torch.cat([windows, torch.ones_like(windows[..., :1])], 3)
    recording: Any = SimpleNamespace(
        batch=2,
        positions=lambda _: len(seen),
        inside=lambda block: block.inside(inputs.shape[2:]),
        rotated_windows=lambda _block, _basis, examples, _width: windows[examples],
    )
    weights = torch.rand(block.groups, block.rows, block.columns, dtype=torch.float64)
    expected = torch.einsum("goj,ngtj,nguj->ngotu", weights, windows, windows)
    torch.testing.assert_close(pair_matrix(recording, block, basis, weights), expected, rtol=1e-12, atol=1e-12)


@many
@given(shapes(), st.booleans(), st.sampled_from([1.0, 0.3, 0.0]))
def test_influence_equals_the_oracle(shape: Shape, sua: bool, beta: float) -> None:
    def build() -> nn.Module:
        module = shape.make()
        features = module(torch.zeros(1, shape.channels, *shape.spatial)).numel()
        return nn.Sequential(module, nn.Tanh(), nn.Flatten(), nn.Linear(features, 3))

    options = dict(shape.options)
    convolution = weight("0", bias=options["bias"], groups=options["groups"])
    case = Case("drawn", seeded(build), normal(shape.channels, *shape.spatial), 3, (convolution, weight("3")))
    ifc, examples = fitted(case, beta=beta, sua=sua), dense(case)
    for moments, expected in dense_moments(ifc, case, examples).values():
        assert_same(moments, expected, floor=1e-20)
    inputs = shape.inputs(3)
    assert_same(ifc.influence(inputs), oracle_influence(ifc, ifc.model, oracle_blocks(case), inputs, 1e-3), floor=0.0)


@pytest.mark.parametrize(("channels", "groups", "found"), [(8, 1, True), (9, 1, False), (16, 2, True), (18, 2, False)])
def test_gradients_of_few_channels_are_formed_from_windows(channels: int, groups: int, found: bool) -> None:
    site = conv("x", nn.Conv2d(channels, groups, 3, groups=groups), Selection(sua=False))
    assert site is not None
    (block,) = site.blocks
    assert isinstance(block, KroneckerBlock)
    assert block.has_windows is found


def test_images_of_windows_have_their_signs() -> None:
    """The library reads memory, and knows nothing of a sign that is still to be changed."""
    module, inputs = nn.Conv1d(2, 1, 3), torch.randn(4, 1, 2, 5)
    site = conv("x", module, Selection(sua=False))
    assert site is not None
    (block,) = site.blocks
    assert isinstance(block, KroneckerBlock)
    images = block.windows(torch._neg_view(inputs)).images
    assert not images.is_neg()
    assert torch.equal(images, -inputs.flatten(1))


def test_positions_that_see_nothing_but_padding() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 3, 2, dilation=2, padding=1, bias=False), nn.Flatten(), nn.Linear(3, 3))
    inputs = torch.randn(4, 2, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ifc = IFComp(model, sua=True).fit([inputs])
        alone = IFComp(model, layers=["2"]).fit([inputs])
    torch.testing.assert_close(ifc.influence(inputs), alone.influence(inputs))


def test_every_offset_of_a_kernel_is_read() -> None:
    """Input entries that are their own position, so that no two patches can be mistaken for each other."""
    for kind, stride, dilation in product(range(3), (1, 2), (1, 2)):
        axes = kind + 1
        module = TYPES[kind](2, 1, 2, stride=stride, dilation=dilation, padding=1)
        inputs = 1.0 + torch.arange(2 * 4**axes, dtype=torch.float64).reshape(1, 2, *[4] * axes)
        assert torch.equal(columns(inputs, module), patches(inputs, module).mT)
