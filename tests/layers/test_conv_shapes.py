"""Convolutions of random shapes: patches, second moments and influence equal the dense oracles."""

import math
import warnings
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from cases import Case, normal, seeded, weight
from comparison import assert_same, dense, dense_moments, fitted, oracle_blocks, oracle_influence
from ifcomp import IFComp
from ifcomp.blocks.block import Basis
from ifcomp.blocks.kronecker_inputs import KroneckerInputs
from ifcomp.layers.registry import Selection
from ifcomp.layers.rules.conv import conv, unfold
from oracles import Convolution, patches

TYPES = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Shape:
    """A convolution and the size of its inputs."""

    axes: int
    channels: int
    outputs: int
    spatial: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]

    def make(self) -> Convolution:
        """The module, with the default initialisation."""
        return TYPES[self.axes - 1](self.channels, self.outputs, **dict(self.options))

    def inputs(self, size: int) -> Tensor:
        """Random inputs ``[size, channels, *spatial]`` in float64."""
        generator = torch.Generator().manual_seed(0)
        return torch.randn(size, self.channels, *self.spatial, generator=generator, dtype=torch.float64)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Tiny convolutions with every option, and at least one output position."""
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
    """Padding before and after each axis."""
    if padding == "same":
        return [(span // 2, span - span // 2) for span in spans]
    if padding == "valid":
        return [(0, 0)] * len(spans)
    sides = (padding,) * len(spans) if isinstance(padding, int) else padding
    return [(side, side) for side in sides]


def unfolded(inputs: Tensor, module: Convolution) -> Tensor:
    """Patches [N, G, J, T] of inputs [N, G*C, *S]."""
    return unfold(inputs.unflatten(1, (module.groups, -1)), module)


def canonical_inputs(module: Convolution, inputs: Tensor, rows: int, *, sua: bool) -> KroneckerInputs:
    """Canonical inputs of the block of a convolution, for inputs [B*R, G*C, *S] with R rows per example."""
    tracked = conv("x", module, Selection(sua=sua))
    assert tracked is not None
    (layer,) = tracked.layers
    by_example = inputs.unflatten(0, (-1, rows))
    output_size = module(inputs[:rows]).numel()
    result = layer.inputs([by_example], [output_size], torch.float64)
    assert isinstance(result, KroneckerInputs)
    return result


drawn = settings(max_examples=60, deadline=None, derandomize=True)


@drawn
@given(shapes())
def test_patches_equal_the_oracle(shape: Shape) -> None:
    module, inputs = shape.make().double(), shape.inputs(2)
    result = unfolded(inputs, module)
    assert torch.equal(result, patches(inputs, module).mT)
    kernel = module.weight.detach().reshape(module.groups, -1, result.shape[2])
    bias = 0.0 if module.bias is None else module.bias.detach()[:, None]
    convolved = module(inputs).detach().flatten(2)
    torch.testing.assert_close((kernel @ result).flatten(1, 2) + bias, convolved, rtol=1e-12, atol=1e-12)


@drawn
@given(shapes(), st.sampled_from([1, 3]))
def test_canonical_inputs_are_patches(shape: Shape, rows: int) -> None:
    """With one and with several rows per example."""
    module, inputs = shape.make().double(), shape.inputs(6)
    by_example = patches(inputs, module).mT.unflatten(0, (-1, rows))  # [B, R, G, J, T]
    expected = by_example.permute(0, 2, 3, 1, 4).flatten(3)
    if module.bias is not None:
        expected = torch.cat([expected, torch.ones_like(expected[:, :, :1])], 2)
    canonical = canonical_inputs(module, inputs, rows, sua=False)
    assert canonical.positions == expected.shape[3]
    assert torch.equal(canonical.unfold(), expected)
    assert torch.equal(canonical.unfold(slice(1, 2)), expected[1:2])


@drawn
@given(shapes())
def test_shared_offsets_rotate_the_channels_of_patches(shape: Shape) -> None:
    module, inputs = shape.make().double(), shape.inputs(2)
    canonical = canonical_inputs(module, inputs, 1, sua=True)
    assume(canonical.shape.shares_offsets)
    channels = canonical.shape.basis_size
    basis = torch.randn(module.groups, channels, channels, dtype=torch.float64)
    by_channel = patches(inputs, module).unflatten(-1, (channels, -1))  # [N, G, T, C, offsets]
    expected = torch.einsum("ngtck,gcd->ngdkt", by_channel, basis).flatten(2, 3)
    if module.bias is not None:
        expected = torch.cat([expected, torch.ones_like(expected[:, :, :1])], 2)
    rotated = canonical.rotate(Basis(basis, torch.empty(0)))
    torch.testing.assert_close(rotated, expected, rtol=1e-12, atol=1e-12)


@drawn
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


def test_positions_that_see_only_padding_add_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 3, 2, dilation=2, padding=1, bias=False), nn.Flatten(), nn.Linear(3, 3))
    inputs = torch.randn(4, 2, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ifc = IFComp(model, sua=True).fit([inputs])
        alone = IFComp(model, layers=["2"]).fit([inputs])
    torch.testing.assert_close(ifc.influence(inputs), alone.influence(inputs))


def test_every_offset_of_a_kernel_is_read() -> None:
    """The value of an input entry is its position, so that all patches differ."""
    for kind, stride, dilation in product(range(3), (1, 2), (1, 2)):
        axes = kind + 1
        module = TYPES[kind](2, 1, 2, stride=stride, dilation=dilation, padding=1)
        inputs = 1.0 + torch.arange(2 * 4**axes, dtype=torch.float64).reshape(1, 2, *[4] * axes)
        assert torch.equal(unfolded(inputs, module), patches(inputs, module).mT)
