"""Both passes of the fit against dense oracles: covariances, eigenbases and second moments."""

import math

import pytest
import torch
from torch import Tensor, nn

from cases import CASES, FEW_CASES, NORM_CASES, REPRESENTATIVE_CASES, Case
from comparison import (
    assert_same,
    basis_arguments,
    dense,
    dense_moments,
    fitted,
    labelled,
    library_block,
    oracle_blocks,
    recorded_block,
)
from ifcomp import IFComp
from ifcomp.blocks.block import Basis
from ifcomp.curvature.factors import FitSettings
from ifcomp.curvature.labels import sample_labels
from ifcomp.data.batches import as_batch
from ifcomp.fitting import FitPasses
from ifcomp.layers.inventory import take_inventory
from ifcomp.layers.recorder import Recorder
from ifcomp.layers.registry import Selection
from ifcomp.layers.verification import verified_recorder
from oracles import (
    Convolution,
    Inputs,
    OracleBlock,
    SeparateBag,
    Transposed,
    covariances,
    embedding_covariance,
    expected_second_moments,
    recurrence_map,
    rotation_matrix,
    separate_attention,
    separate_bags,
    separate_recurrences,
)

KRONECKER_CASES = [case for case in CASES.values() if case not in NORM_CASES]

#: Convolutions with groups, every kind of padding, several rows per example and several calls, unused outputs.
SHARED_OFFSET_CASES = [
    CASES[name]
    for name in (
        *("conv2d_groups", "conv1d_same_even", "conv2d_reflect", "conv2d_folded", "conv_twice", "lenet"),
        *("conv_transpose2d_groups", "conv_transpose2d_output_padding", "conv_transpose2d_folded"),
        *("conv2d_groups_unused", "conv2d_folded_unused", "conv_twice_unused", "conv2d_stride_leaves_pixels"),
    )
]

SIZE = 7

#: A second moment that is zero in theory is the square of a rounding error.
MOMENT_FLOOR = 1e-20


def recorder_of(case: Case, *, sua: bool = False) -> Recorder:
    """The verified recorder of a case in double precision."""
    model = case.make().double()
    return verified_recorder(model, take_inventory(model, Selection(sua=sua)), as_batch(dense(case, SIZE).inputs))


def given_labels(case: Case) -> Tensor:
    """Labels of the training examples."""
    return torch.arange(SIZE) % case.num_classes


def one_hot(labels: Tensor, classes: int) -> Tensor:
    return nn.functional.one_hot(labels, classes).double()


# Oracles


def module_name(block: OracleBlock) -> str:
    """The module of a Kronecker block in the model with separate projections of attention and recurrent modules."""
    recurrent = recurrence_map(block)
    if recurrent is not None:
        return recurrent[0]
    owner = block.parameters[0].rpartition(".")[0]
    if block.rows is not None:
        return f"{owner}.{'qkv'[block.rows.start // (block.rows.stop - block.rows.start)]}"
    return owner.removesuffix("_proj") if owner.endswith(".out_proj") else owner


def oracle_covariance(
    model: nn.Module,
    inputs: Inputs,
    block: OracleBlock,
    beta: float,
    *,
    sua: bool = False,
    label_weights: Tensor | None = None,
) -> tuple[Tensor | None, Tensor]:
    """Input and output covariance of a block; an embedding has no input covariance.

    If only the bias is trained, the input is the appended 1.
    """
    columns, name = trained_columns(model, block), module_name(block)
    model = separate_bags(separate_attention(separate_recurrences(model)))
    name = f"{name}.table" if isinstance(model.get_submodule(name), SeparateBag) else name
    module = model.get_submodule(name)
    options = {"beta": beta, "label_weights": label_weights}
    if isinstance(module, nn.Embedding):
        return None, embedding_covariance(model, inputs, name, **options)
    shared = (sua or isinstance(module, Transposed)) and isinstance(module, Convolution)
    shared = shared and math.prod(module.kernel_size) > 1 and module.weight.requires_grad
    inner, outer = covariances(model, inputs, name, sua=shared, **options)
    return inner[:, columns][:, :, columns], outer


def trained_columns(model: nn.Module, block: OracleBlock) -> Tensor | slice:
    """Inputs of the trained parameters of a block among the inputs of its module."""
    recurrent = recurrence_map(block)
    if recurrent is None:
        return slice(-1, None) if block.parameters[0].endswith("bias") else slice(None)
    parameters = dict(model.named_parameters())
    names = [name for name in recurrent[1] if name in parameters]
    widths = [parameters[name][0].numel() for name in names]
    indices = torch.arange(sum(widths)).split(widths)
    return torch.cat([index for name, index in zip(names, indices, strict=True) if name in block.parameters])


def importance(p: Tensor) -> tuple[Tensor, Tensor]:
    """Sampling probability of every label, and the weight that makes a sample unbiased, [B, K] each."""
    residuals = p.unsqueeze(1) - torch.eye(p.shape[1], dtype=p.dtype)  # [B, label, K]
    norms = residuals.square().sum(2)
    sampling = p * norms / (p * norms).sum(1, keepdim=True)
    return sampling, p / sampling


def sampled_weights(case: Case, settings: FitSettings, pass_index: int) -> Tensor:
    """Weights of the labels that a pass draws: their number times their importance weight over all draws, [B, K]."""
    sampling, weight = importance(dense(case, SIZE).probability(settings.beta))
    draws = [sample_labels(sampling, settings.seed, pass_index, 0, draw) for draw in range(settings.label_samples)]
    return torch.stack([one_hot(labels, weight.shape[1]) for labels in draws]).mean(0) * weight


def test_the_oracle_of_embeddings_leaves_out_padding_only() -> None:
    """Without a padding index it equals the oracle of the other layers; with one it is smaller in every direction."""
    for name in ("embedding", "embedding_padding"):
        model, inputs = CASES[name].make(), dense(CASES[name], SIZE).inputs
        everywhere, unpadded = covariances(model, inputs, "0")[1], embedding_covariance(model, inputs, "0")
        if name == "embedding":
            assert_same(unpadded, everywhere)
        else:
            difference = torch.linalg.eigvalsh(everywhere - unpadded)
            assert (difference > -1e-12 * everywhere.max()).all()
            assert difference.max() > 1e-2 * everywhere.max()


# First pass


def check_covariances(
    case: Case, settings: FitSettings, *, sua: bool = False, label_weights: Tensor | None = None
) -> None:
    recorder, inputs = recorder_of(case, sua=sua), dense(case, SIZE).inputs
    batch = as_batch(labelled(inputs, given_labels(case)))
    sums, count = FitPasses(recorder, [settings]).covariances([batch])
    blocks = [block for block in case.blocks if block.kind == "kronecker"]
    assert count == SIZE
    assert len(sums.outputs[0]) == len(blocks)
    for block in blocks:
        inner, outer = oracle_covariance(
            recorder.model, inputs, block, settings.beta, sua=sua, label_weights=label_weights
        )
        name = recorded_block(recorder, block).name
        assert (name in sums.inputs) == (inner is not None)
        if inner is not None:
            assert_same(sums.inputs[name], inner)
        assert_same(sums.outputs[0][name], outer)


@pytest.mark.parametrize("case", KRONECKER_CASES, ids=str)
def test_covariances_equal_the_oracle(case: Case) -> None:
    check_covariances(case, FitSettings(fisher="exact"))


@pytest.mark.parametrize("case", SHARED_OFFSET_CASES, ids=str)
def test_covariances_of_channels_equal_the_oracle(case: Case) -> None:
    check_covariances(case, FitSettings(beta=0.3, fisher="exact"), sua=True)


@pytest.mark.parametrize("fisher", ["sampled", "empirical"])
@pytest.mark.parametrize("case", FEW_CASES, ids=str)
def test_covariances_of_other_labels_equal_the_oracle(case: Case, fisher: str) -> None:
    settings = FitSettings(beta=0.7, fisher=fisher, label_samples=2, seed=5)
    sampled = sampled_weights(case, settings, pass_index=0)
    weights = sampled if fisher == "sampled" else one_hot(given_labels(case), case.num_classes)
    check_covariances(case, settings, label_weights=weights)


@pytest.mark.parametrize("sua", [False, True], ids=["", "shared offsets"])
@pytest.mark.parametrize("case", FEW_CASES, ids=str)
def test_bases_diagonalise_the_covariances(case: Case, sua: bool) -> None:
    ifc = fitted(case, sua=sua)
    for block in case.blocks:
        if block.kind == "diagonal":
            continue
        basis = ifc.factors.blocks[library_block(ifc, block).name].basis
        matrices = oracle_covariance(ifc.model, dense(case, SIZE).inputs, block, 1.0, sua=sua)
        for vectors, covariance in zip((basis.inputs, basis.outputs), matrices, strict=True):
            assert (vectors is None) == (covariance is None)
            if covariance is not None:
                rotated = vectors.mT @ covariance @ vectors
                diagonal = rotated.diagonal(dim1=-2, dim2=-1)
                assert_same(rotated, torch.diag_embed(diagonal), floor=1e-12)
                assert (diagonal.diff(dim=-1) >= -1e-12 * diagonal.max()).all(), "the smallest eigenvalue is first"


# Second pass


def check_moments(ifc: IFComp, case: Case, label_weights: Tensor | None = None) -> None:
    assert (ifc.factors.count, ifc.factors.num_classes) == (SIZE, case.num_classes)
    for moments, expected in dense_moments(ifc, case, dense(case, SIZE), label_weights).values():
        assert_same(moments, expected, floor=MOMENT_FLOOR)
        assert (moments >= 0).all()


@pytest.mark.parametrize("case", CASES.values(), ids=str)
def test_second_moments_equal_the_oracle(case: Case) -> None:
    check_moments(fitted(case), case)


@pytest.mark.parametrize("beta", [0.3, 0.0])
@pytest.mark.parametrize("case", FEW_CASES, ids=str)
def test_second_moments_at_other_temperatures_equal_the_oracle(case: Case, beta: float) -> None:
    check_moments(fitted(case, beta=beta), case)


@pytest.mark.parametrize("case", SHARED_OFFSET_CASES, ids=str)
def test_second_moments_with_shared_offsets_equal_the_oracle(case: Case) -> None:
    check_moments(fitted(case, beta=0.3, sua=True), case)


@pytest.mark.parametrize("case", REPRESENTATIVE_CASES, ids=str)
def test_second_moments_of_given_labels_equal_the_oracle(case: Case) -> None:
    labels = given_labels(case)
    data = [labelled(dense(case, SIZE).inputs, labels)]
    ifc = IFComp(case.make().double(), beta=0.3, fisher="empirical").fit(data)
    check_moments(ifc, case, one_hot(labels, case.num_classes))


@pytest.mark.parametrize("case", REPRESENTATIVE_CASES, ids=str)
def test_second_moments_of_sampled_labels_equal_the_oracle(case: Case) -> None:
    ifc = fitted(case, fisher="sampled", label_samples=3, seed=3, beta=0.3)
    check_moments(ifc, case, sampled_weights(case, ifc.settings, pass_index=1))


@pytest.mark.parametrize("case", FEW_CASES, ids=str)
def test_second_moments_in_single_precision_approach_the_oracle(case: Case) -> None:
    ifc, examples = fitted(case, torch.float32), dense(case, SIZE)
    for block in oracle_blocks(case):
        match = library_block(ifc, block)
        gradients, arguments = examples.gradients(block, 1.0), basis_arguments(ifc, match)
        expected = expected_second_moments(gradients, examples.probability(1.0), **arguments)
        moments = ifc.factors.blocks[match.name].second_moments
        assert moments.dtype == torch.float32
        assert_same(moments.double(), expected, rtol=1e-3, floor=1e-7)


# Sampled labels


@pytest.mark.parametrize("case", FEW_CASES, ids=str)
def test_the_second_pass_does_not_reuse_the_labels_of_the_first(case: Case) -> None:
    settings = FitSettings(beta=0.3, label_samples=2, seed=3)
    first, second = (sampled_weights(case, settings, pass_index) for pass_index in (0, 1))
    assert not torch.equal(first, second)
    ifc = fitted(case, fisher="sampled", label_samples=2, seed=3, beta=0.3)
    moments = dense_moments(ifc, case, dense(case, SIZE), first).values()
    assert all(float((found - expected).abs().max() / expected.max()) > 1e-3 for found, expected in moments)


@pytest.mark.parametrize("case", FEW_CASES, ids=str)
def test_sampled_second_moments_converge_to_the_exact_ones(case: Case) -> None:
    """In one basis, the mean over many draws is within a few standard errors of the expectation in every direction."""
    draws, examples, exact = 400, dense(case, SIZE), fitted(case)
    bases: dict[str, Basis] = {
        name: block.basis for name, block in exact.factors.blocks.items() if block.basis is not None
    }
    passes = FitPasses(recorder_of(case), [FitSettings(label_samples=draws, seed=1)])
    sampled = passes.second_moments([as_batch(examples.inputs)], [bases])[0]
    p = examples.probability(1.0)
    sampling, weight = importance(p)
    for block in oracle_blocks(case):
        match, gradients = library_block(exact, block), examples.gradients(block, 1.0)
        rotation = rotation_matrix(gradients.shape[2:], **basis_arguments(exact, match))
        squares = (gradients.flatten(2) @ rotation).square()
        mean = torch.einsum("by,byp->bp", p, squares)
        deviations = squares * weight.unsqueeze(2) - mean.unsqueeze(1)
        variance = torch.einsum("by,byp->bp", sampling, deviations.square())
        error = variance.sum(0).div(draws).sqrt() / SIZE
        deviation = sampled.blocks[match.name].second_moments.flatten() - mean.mean(0)
        assert (deviation.abs() <= 4.5 * error + 1e-14 * mean.max()).all()
        assert deviation.abs().max() > 1e-6 * mean.max(), "a sample is not the expectation"


@pytest.mark.parametrize("margin", [9.0, 60.0])
def test_one_sampled_label_is_enough_for_a_confident_model(margin: float) -> None:
    """Labels drawn from p would nearly always be the predicted one, whose gradient is nearly zero."""
    x = torch.randn(400, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model = nn.Linear(4, 3).double()
    with torch.no_grad():
        model.bias.copy_(torch.tensor([margin, 0.0, 0.0]))
    sampled, exact = (IFComp(model, fisher=fisher).fit([x]) for fisher in ("sampled", "exact"))
    traces = [ifc.factors.blocks[""].second_moments.sum() for ifc in (sampled, exact)]
    torch.testing.assert_close(traces[0], traces[1], rtol=1e-9, atol=0.0)  # every draw has the expected size
    mean_influence = sampled.factors.effective_parameters(sampled.damping)
    assert sampled.score([x]).frame["expected_influence"].mean() < 3 * mean_influence
    torch.testing.assert_close(sampled.influence(x[:9]), exact.influence(x[:9]), rtol=0.7, atol=0.0)
