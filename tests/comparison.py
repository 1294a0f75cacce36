"""Influence and second moments from the dense oracle with the library's factors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch.testing import assert_close

from cases import Batch, Case
from ifcomp import IFComp
from ifcomp.blocks.block import Block
from ifcomp.blocks.kronecker import KroneckerBlock
from ifcomp.layers.recorder import Recorder
from oracles import (
    Inputs,
    OracleBlock,
    block_jacobian,
    ekfac_influence,
    ekfac_inverse,
    example_jacobians,
    example_logits,
    expected_second_moments,
    label_gradients,
    label_probabilities,
    logit_kernel,
)

Accumulate = Callable[[OracleBlock, Block, Tensor], Tensor]


def fitted(case: Case, dtype: torch.dtype = torch.float64, size: int = 7, **options: object) -> IFComp:
    """`IFComp` fitted with the exact Fisher on a few examples of the case."""
    model = case.make().to(dtype)
    options = {"fisher": "exact", "damping": 1e-3, **options}
    return IFComp(model, **options).fit([as_type(case.sample(size, seed=1), dtype)])


def as_type(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """Floating-point inputs in another precision."""
    if isinstance(inputs, dict):
        return {name: as_type(value, dtype) for name, value in inputs.items()}
    return inputs.to(dtype) if inputs.is_floating_point() else inputs


def oracle_blocks(case: Case) -> list[OracleBlock]:
    """Blocks of the case; each of its other parameters is a diagonal block."""
    return [*case.blocks, *(OracleBlock("diagonal", (name,)) for name in case.other)]


def library_block(ifc: IFComp, block: OracleBlock) -> Block:
    """The library's block of the same parameters (and rows)."""
    assert ifc._recorder is not None
    return recorded_block(ifc._recorder, block)


def recorded_block(recorder: Recorder, block: OracleBlock) -> Block:
    """The recorder's block of the same parameters (and rows)."""
    first = block.rows.start if block.rows is not None else 0
    inventory = recorder.inventory
    candidates = [layer.block for layer in inventory.layers if getattr(layer, "first_row", 0) == first]
    matches = [match for match in (*candidates, *inventory.others) if match.parameters == block.parameters]
    assert len(matches) == 1, f"{block} is not a block of the library"
    return matches[0]


def basis_arguments(ifc: IFComp, block: Block) -> dict[str, object]:
    """A block's basis as the oracle's keyword arguments."""
    basis = ifc.factors.blocks[block.name].basis
    return {
        "input_basis": None if basis is None else basis.inputs,
        "output_basis": None if basis is None else basis.outputs,
        "offsets": block.shape.offsets if isinstance(block, KroneckerBlock) else 1,
        "has_bias": block.shape.has_bias if isinstance(block, KroneckerBlock) else False,
    }


def oracle_influence(
    ifc: IFComp, model: nn.Module, blocks: list[OracleBlock], inputs: Inputs, damping: float
) -> Tensor:
    """Influence [B, K] from dense matrices and the library's factors, float64."""
    model = copy.deepcopy(model).double()
    inputs = as_type(inputs, torch.float64)
    probability = label_probabilities(example_logits(model, inputs), ifc.beta)
    jacobians = example_jacobians(model, inputs)
    total = torch.zeros_like(probability)
    for block in blocks:
        own = library_block(ifc, block)
        gradients = label_gradients(block_jacobian(jacobians, block), probability)
        moments = ifc.factors.blocks[own.name].second_moments
        arguments = basis_arguments(ifc, own)
        total += ekfac_influence(
            gradients, arguments.pop("input_basis"), arguments.pop("output_basis"), moments, damping, **arguments
        )
    return total


def oracle_kernel(ifc: IFComp, model: nn.Module, blocks: list[OracleBlock], inputs: Inputs, damping: float) -> Tensor:
    """Logit kernel [B, K, K] from dense matrices and the library's factors, float64."""
    jacobians = example_jacobians(copy.deepcopy(model).double(), as_type(inputs, torch.float64))
    kernels = []
    for block in blocks:
        own = library_block(ifc, block)
        inverse = ekfac_inverse(ifc.factors.blocks[own.name].second_moments, damping, **basis_arguments(ifc, own))
        kernels.append(logit_kernel(block_jacobian(jacobians, block), inverse))
    return torch.stack(kernels).sum(0)


@dataclass(frozen=True)
class Dense:
    """Logits and Jacobians of examples from the oracle.

    Attributes:
        inputs: The examples.
        logits: [B, K].
        jacobians: [B, K, ...] by parameter.
    """

    inputs: Inputs
    logits: Tensor
    jacobians: dict[str, Tensor]

    def probability(self, beta: float) -> Tensor:
        """``p`` at inverse temperature beta, [B, K]."""
        return label_probabilities(self.logits, beta)

    def gradients(self, block: OracleBlock, beta: float) -> Tensor:
        """Gradient of a block for every label, [B, K, ...]."""
        return label_gradients(block_jacobian(self.jacobians, block), self.probability(beta))


def dense(case: Case, size: int = 7, seed: int = 1) -> Dense:
    """Oracle results for the examples that `fitted` fits on; computed once for all tests."""
    return _dense(case.make, case.batch, size, seed)


@cache
def _dense(make: Callable[[], nn.Module], batch: Batch, size: int, seed: int) -> Dense:
    model, inputs = make().double(), as_type(batch(size, torch.Generator().manual_seed(seed)), torch.float64)
    return Dense(inputs, example_logits(model, inputs), example_jacobians(model, inputs))


def dense_moments(
    ifc: IFComp, case: Case, examples: Dense, label_weights: Tensor | None = None
) -> dict[str, tuple[Tensor, Tensor]]:
    """Second moments of every block by its name: the library's, and the oracle's in the library's basis."""
    weights = examples.probability(ifc.beta) if label_weights is None else label_weights
    moments = {}
    for block in oracle_blocks(case):
        own = library_block(ifc, block)
        expected = expected_second_moments(examples.gradients(block, ifc.beta), weights, **basis_arguments(ifc, own))
        moments[own.name] = (ifc.factors.blocks[own.name].second_moments, expected)
    assert moments.keys() == ifc.factors.blocks.keys()
    return moments


def assert_same(actual: Tensor, expected: Tensor, rtol: float = 1e-9, floor: float = 1e-13) -> None:
    """Assert equality; ``floor`` is the absolute tolerance relative to the largest entry, for entries that cancel."""
    assert_close(actual, expected, rtol=rtol, atol=floor * float(expected.abs().max()))


def labelled(inputs: Inputs, labels: Tensor) -> dict[str, Tensor] | tuple[Tensor, Tensor]:
    """A labelled batch in the form that the library accepts."""
    return {**inputs, "labels": labels} if isinstance(inputs, dict) else (inputs, labels)
