"""Both passes of the fit against dense oracles: covariances, eigenbases, second moments, label samples and merging."""

import math
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
import torch
from ifcomp.curvature.passes import fit_covariances, fit_second_moments
from scipy import stats
from torch import Tensor, nn

from cases import (
    ATTENTION_CASES,
    CONV_CASES,
    EMBEDDING_CASES,
    LAYER_CASES,
    LINEAR_CASES,
    MODEL_CASES,
    NORM_CASES,
    USE_CASES,
    Case,
)
from comparison import (
    assert_same,
    basis_arguments,
    dense,
    dense_moments,
    fitted,
    labelled,
    library_block,
    oracle_blocks,
)
from ifcomp import IFComp
from ifcomp.blocks.block import Basis
from ifcomp.curvature import labels as label_module
from ifcomp.curvature.eigen import eigenbases, eigenvectors
from ifcomp.curvature.factors import Covariance, Covariances, Factors, FitSettings
from ifcomp.curvature.labels import sample_labels, squared_residuals
from ifcomp.data.batches import Batch, as_batch
from ifcomp.errors import MergeError, NonFiniteError, SettingError
from ifcomp.predictor import fit_together
from oracles import (
    Convolution,
    Inputs,
    OracleBlock,
    covariances,
    embedding_covariance,
    expected_second_moments,
    rotation_matrix,
    separate_attention,
)

ALL_CASES = {case.name: case for case in (*LAYER_CASES, *MODEL_CASES)}
ALL_CASES["weight_norm"] = replace(  # the weight is parametrised, which leaves the bias as a block of the Linear
    ALL_CASES["weight_norm"],
    blocks=(OracleBlock("kronecker", ("0.bias",)), *ALL_CASES["weight_norm"].blocks),
    other=ALL_CASES["weight_norm"].other[1:],
)
KRONECKER_CASES = [case for name, case in ALL_CASES.items() if name not in {case.name for case in NORM_CASES}]
FEW_CASES = [
    ALL_CASES[name]
    for name in ("linear", "linear_tokens", "conv2d_groups", "batchnorm2d", "embedding_padding", "attention", "tied")
]
BETAS = [1.0, 0.3, 0.0]
SIZE = 7

#: Rounding leaves of a second moment that vanishes the square of what it leaves of a gradient.
MOMENT_FLOOR = 1e-20


def training_batch(case: Case) -> Batch:
    """The examples of `dense`, for the passes."""
    return as_batch(dense(case, SIZE).inputs)


def opened(case: Case, **options: object) -> IFComp:
    """An `IFComp` that knows the training examples of a case, so that its session can go over any data."""
    labels = torch.arange(SIZE) % case.num_classes
    return IFComp(case.make().double(), **options).fit([labelled(dense(case, SIZE).inputs, labels)])


def covariances_of(ifc: IFComp, batches: Iterable[Batch]) -> Covariances:
    """The first pass."""
    return fit_covariances(ifc._session, batches, [ifc.settings])[0]


def moments_of(ifc: IFComp, batches: Iterable[Batch], basis: dict[str, Basis]) -> Factors:
    """The second pass."""
    return fit_second_moments(ifc._session, batches, [ifc.settings], [basis])[0]


def module_name(block: OracleBlock) -> str:
    """The module of a Kronecker block in the model whose attention has separate projections."""
    owner = block.parameters[0].rpartition(".")[0]
    if block.rows is not None:
        return f"{owner}.{'qkv'[block.rows.start // (block.rows.stop - block.rows.start)]}"
    return owner.removesuffix("_proj") if owner.endswith(".out_proj") else owner


def oracle_covariance(
    model: nn.Module, inputs: Inputs, block: OracleBlock, beta: float, sua: bool, label_weights: Tensor | None = None
) -> tuple[Tensor | None, Tensor]:
    """Input and output covariance of a block as the library defines them; no input covariance for an Embedding.

    Where only the bias is trained, the input is the appended 1 alone. Offsets are shared where there are several.
    """
    model, name = separate_attention(model), module_name(block)
    module = model.get_submodule(name)
    options = {"beta": beta, "label_weights": label_weights}
    if isinstance(module, nn.Embedding):
        return None, embedding_covariance(model, inputs, name, **options)
    shared = sua and isinstance(module, Convolution) and math.prod(module.kernel_size) > 1
    inner, outer = covariances(model, inputs, name, sua=shared, **options)
    return (inner[:, -1:, -1:] if block.parameters[0].endswith("bias") else inner), outer


def importance(p: Tensor) -> tuple[Tensor, Tensor]:
    """What labels are drawn with, and the weight that makes the expectation of a draw that over p, [B, K] each."""
    residuals = p.unsqueeze(1) - torch.eye(p.shape[1], dtype=p.dtype)  # [B, label, K]
    norms = residuals.square().sum(2)
    drawn_with = p * norms / (p * norms).sum(1, keepdim=True)
    return drawn_with, p / drawn_with


def sampled_weights(case: Case, settings: FitSettings, pass_index: int) -> Tensor:
    """How often each label was drawn for each example in a pass, times its weight over the number of draws, [B, K]."""
    drawn_with, weight = importance(dense(case, SIZE).probability(settings.beta))
    drawn = [sample_labels(drawn_with, settings.seed, pass_index, 0, draw) for draw in range(settings.label_samples)]
    return torch.stack([nn.functional.one_hot(labels, weight.shape[1]).double() for labels in drawn]).mean(0) * weight


# Pass 1 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("case", KRONECKER_CASES, ids=str)
def test_covariances_equal_the_oracle(case: Case, beta: float) -> None:
    check_covariances(case, beta, sua=False)


@pytest.mark.parametrize("case", [*CONV_CASES, ALL_CASES["conv_twice"], ALL_CASES["lenet"]], ids=str)
def test_covariances_over_channels_equal_the_oracle(case: Case) -> None:
    check_covariances(case, 0.3, sua=True)


def check_covariances(case: Case, beta: float, sua: bool) -> None:
    ifc = opened(case, beta=beta, fisher="exact", sua=sua)
    found = covariances_of(ifc, [training_batch(case)])
    assert found.count == SIZE
    blocks = [block for block in case.blocks if block.kind == "kronecker"]
    assert len(found.blocks) == len(blocks)
    for block in blocks:
        inner, outer = oracle_covariance(ifc.model, dense(case, SIZE).inputs, block, beta, sua)
        own = found.blocks[library_block(ifc, block).name]
        assert (own.inputs is None) == (inner is None)
        if inner is not None:
            assert_same(own.inputs, inner)
        assert_same(own.outputs, outer)


def test_oracle_of_embeddings_leaves_out_the_padding_alone() -> None:
    """Without a padding index it is the oracle of every other layer, with one it has less in every direction."""
    for name in ("embedding", "embedding_padding"):
        model, inputs = ALL_CASES[name].make(), dense(ALL_CASES[name], SIZE).inputs
        everywhere, own = covariances(model, inputs, "0")[1], embedding_covariance(model, inputs, "0")
        if name == "embedding":
            assert_same(own, everywhere)
        else:
            left_out = torch.linalg.eigvalsh(everywhere - own)
            assert (left_out > -1e-12 * everywhere.max()).all()
            assert left_out.max() > 1e-2 * everywhere.max()


@pytest.mark.parametrize("case", [*LINEAR_CASES, *EMBEDDING_CASES, ALL_CASES["conv2d_groups"]], ids=str)
def test_covariances_of_sampled_and_given_labels_equal_the_oracle(case: Case) -> None:
    inputs, given = dense(case, SIZE).inputs, torch.arange(SIZE) % case.num_classes
    sampled = FitSettings(beta=0.7, label_samples=2, seed=5)
    one_hot = nn.functional.one_hot(given, case.num_classes).double()
    for settings, weights in (
        (sampled, sampled_weights(case, sampled, pass_index=0)),
        (FitSettings(beta=0.7, fisher="empirical"), one_hot),
    ):
        ifc = opened(case)
        found = fit_covariances(ifc._session, [as_batch(labelled(inputs, given))], [settings])[0]
        for block in case.blocks:
            _, outer = oracle_covariance(ifc.model, inputs, block, 0.7, False, weights)
            assert_same(found.blocks[library_block(ifc, block).name].outputs, outer)


# Eigenbasis --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sua", [False, True])
@pytest.mark.parametrize(
    "case", [*LINEAR_CASES, *CONV_CASES, *EMBEDDING_CASES, *ATTENTION_CASES, *USE_CASES, ALL_CASES["lenet"]], ids=str
)
def test_basis_is_orthonormal_and_diagonalises_the_covariance(case: Case, sua: bool) -> None:
    ifc = fitted(case, sua=sua)
    for block in case.blocks:
        if block.kind == "diagonal":
            continue
        basis = ifc.factors.blocks[library_block(ifc, block).name].basis
        expected = oracle_covariance(ifc.model, dense(case, SIZE).inputs, block, 1.0, sua)
        for vectors, covariance in zip((basis.inputs, basis.outputs), expected, strict=True):
            assert (vectors is None) == (covariance is None)
            if covariance is None:
                continue
            size = vectors.shape[-1]
            assert_same(vectors.mT @ vectors, torch.eye(size, dtype=torch.float64).expand_as(vectors), floor=1e-13)
            rotated = vectors.mT @ covariance @ vectors
            diagonal = rotated.diagonal(dim1=-2, dim2=-1)
            assert_same(rotated, torch.diag_embed(diagonal), floor=1e-12)
            assert (diagonal.diff(dim=-1) >= -1e-12 * diagonal.max()).all(), "smallest eigenvalue first"


# Pass 2 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("case", ALL_CASES.values(), ids=str)
def test_second_moments_equal_the_oracle(case: Case, beta: float) -> None:
    check_moments(fitted(case, beta=beta), case)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("case", [*CONV_CASES, ALL_CASES["conv_twice"], ALL_CASES["lenet"]], ids=str)
def test_second_moments_with_shared_offsets_equal_the_oracle(case: Case, beta: float) -> None:
    check_moments(fitted(case, beta=beta, sua=True), case)


@pytest.mark.parametrize("case", ALL_CASES.values(), ids=str)
def test_second_moments_of_given_labels_equal_the_oracle(case: Case) -> None:
    labels = torch.arange(SIZE) % case.num_classes
    data = [labelled(dense(case, SIZE).inputs, labels)]
    ifc = IFComp(case.make().double(), beta=0.3, fisher="empirical").fit(data)
    check_moments(ifc, case, nn.functional.one_hot(labels, case.num_classes).double())


@pytest.mark.parametrize("label_samples", [1, 3])
@pytest.mark.parametrize("case", ALL_CASES.values(), ids=str)
def test_second_moments_of_sampled_labels_equal_the_oracle(case: Case, label_samples: int) -> None:
    ifc = fitted(case, fisher="sampled", label_samples=label_samples, seed=3, beta=0.3)
    check_moments(ifc, case, sampled_weights(case, ifc.settings, pass_index=1))


def check_moments(ifc: IFComp, case: Case, label_weights: Tensor | None = None) -> None:
    assert (ifc.factors.count, ifc.factors.num_classes) == (SIZE, case.num_classes)
    for found, expected in dense_moments(ifc, case, dense(case, SIZE), label_weights).values():
        assert_same(found, expected, floor=MOMENT_FLOOR)
        assert (found >= 0).all()


@pytest.mark.parametrize("case", FEW_CASES, ids=str)
def test_passes_draw_different_labels(case: Case) -> None:
    """Each pass has its own draws, and each is the function of the pass that `sample_labels` says it is."""
    settings = FitSettings(beta=0.3, label_samples=2, seed=3)
    first, second = (sampled_weights(case, settings, pass_index) for pass_index in (0, 1))
    assert not torch.equal(first, second)
    ifc = fitted(case, fisher="sampled", label_samples=2, seed=3, beta=0.3)
    moments = dense_moments(ifc, case, dense(case, SIZE), first).values()
    assert all(float((found - expected).abs().max() / expected.max()) > 1e-3 for found, expected in moments)


@pytest.mark.parametrize("case", FEW_CASES, ids=str)
def test_sampled_fisher_converges_to_the_exact_one(case: Case) -> None:
    """In one basis, the mean over many draws is within a few standard errors of the expectation, in every direction."""
    draws, examples = 400, dense(case, SIZE)
    exact = fitted(case)
    basis = {name: block.basis for name, block in exact.factors.blocks.items() if block.basis is not None}
    ifc = opened(case, label_samples=draws, seed=1)
    found = moments_of(ifc, [training_batch(case)], basis)
    p = examples.probability(1.0)
    for block in oracle_blocks(case):
        own, gradients = library_block(exact, block), examples.gradients(block, 1.0)
        rotation = rotation_matrix(gradients.shape[2:], **basis_arguments(exact, own))
        squares = (gradients.flatten(2) @ rotation).square()
        mean = torch.einsum("by,byp->bp", p, squares)
        drawn_with, weight = importance(p)
        draw = squares * weight.unsqueeze(2)
        variance = torch.einsum("by,byp->bp", drawn_with, (draw - mean.unsqueeze(1)).square())
        error = variance.sum(0).div(draws).sqrt() / SIZE
        deviation = found.blocks[own.name].second_moments.flatten() - mean.mean(0)
        assert (deviation.abs() <= 4.5 * error + 1e-14 * mean.max()).all()
        assert deviation.abs().max() > 1e-6 * mean.max(), "a sample is not the expectation"


# Label samples -----------------------------------------------------------------------------------------------------


def random_probability(size: int, classes: int, seed: int = 0) -> Tensor:
    """Rows of a distribution that is far from uniform, float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.softmax(1.5 * torch.randn(size, classes, generator=generator, dtype=torch.float64), 1)


@pytest.mark.parametrize("batch_size", [1, 3, 7])
def test_label_samples_depend_on_the_position_alone(batch_size: int) -> None:
    p = random_probability(100, 5)
    for pass_index, draw in ((0, 0), (1, 0), (0, 1), (1, 2)):
        parts = [
            sample_labels(p[first : first + batch_size], 4, pass_index, first, draw)
            for first in range(0, 100, batch_size)
        ]
        assert torch.equal(torch.cat(parts), sample_labels(p, 4, pass_index, 0, draw))


@pytest.mark.parametrize("batch_size", [1, 3, 4])
@pytest.mark.parametrize("case", FEW_CASES, ids=str)
def test_sampled_fit_does_not_depend_on_batches(case: Case, batch_size: int) -> None:
    options = {"fisher": "sampled", "label_samples": 2, "beta": 0.3}
    check_same_fit(fitted(case, **options), refitted(case, batch_size, **options))


@pytest.mark.parametrize("case", FEW_CASES, ids=str)
def test_sampled_fit_does_not_depend_on_pieces(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """One batch that is split because it would not fit in memory."""
    whole = fitted(case, fisher="sampled")
    monkeypatch.setattr("ifcomp.layers.session.PIECE_BYTES", 1)
    check_same_fit(whole, fitted(case, fisher="sampled"))


def refitted(case: Case, batch_size: int, **options: object) -> IFComp:
    """Like `fitted`, in batches."""
    batches = list(training_batch(case).split(batch_size))
    data = [batch.kwargs or batch.args[0] for batch in batches]
    return IFComp(case.make().double(), **options).fit(data)


def check_same_fit(one: IFComp, other: IFComp) -> None:
    """Signs of eigenvectors and bases of degenerate spaces are free, so the curvature matrices are compared."""
    for name, block in one.factors.blocks.items():
        own = next(block for block in one._session.blocks if block.name == name)
        matrices = []
        for ifc in (one, other):
            moments = ifc.factors.blocks[name].second_moments
            rotation = rotation_matrix(block.second_moments.shape, **basis_arguments(ifc, own))
            matrices.append(rotation @ torch.diag(moments.flatten()) @ rotation.T)
        assert_same(*matrices, floor=1e-10)


@pytest.mark.parametrize("seed", [0, 1, 123456789, 2**63 + 11])
@pytest.mark.parametrize(("pass_index", "draw"), [(0, 0), (1, 0), (0, 3)])
def test_label_frequencies_match_the_distribution(seed: int, pass_index: int, draw: int) -> None:
    p, size = random_probability(1, 6)[0], 20_000
    labels = sample_labels(p.expand(size, -1), seed, pass_index, 0, draw)
    counts = np.bincount(labels.numpy(), minlength=6)
    assert stats.chisquare(counts, size * p.numpy()).pvalue > 1e-3


@pytest.mark.parametrize(
    ("other_seed", "other_pass", "other_draw", "shift"),
    [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 1, 1, 0), (0, 0, 0, 1), (0, 0, 0, 64), (2**32, 0, 0, 0)],
)
def test_label_samples_are_independent(other_seed: int, other_pass: int, other_draw: int, shift: int) -> None:
    """Of those with another seed, pass or draw, and of their neighbours."""
    p = random_probability(1, 4)[0].expand(20_000, -1)
    one, other = sample_labels(p, 0, 0, 0, 0), sample_labels(p, other_seed, other_pass, shift, other_draw)
    table = np.zeros((4, 4))
    np.add.at(table, (one.numpy(), other.numpy()), 1)
    assert stats.chi2_contingency(table).pvalue > 1e-3


def test_swapped_pass_and_draw_differ() -> None:
    p = random_probability(200, 4)
    assert not torch.equal(sample_labels(p, 0, 1, 0, 2), sample_labels(p, 0, 2, 0, 1))


IMPOSSIBLE = [
    [0.0, 1.0, 0.0],
    [1.0, 0.0, 0.0],
    [0.0, 0.0, 1.0],
    [0.0, 0.5, 0.5],
    [0.5, 0.0, 0.5],
    [0.5, 0.5, 0.0],
    [0.1, 0.9, 0.0],
    [0.3, 0.7 - 1e-16, 0.0],
    [1e-320, 1.0, 0.0],
]


@pytest.mark.parametrize("row", IMPOSSIBLE, ids=str)
def test_impossible_labels_are_never_drawn(row: list[float]) -> None:
    p = torch.tensor(row, dtype=torch.float64).expand(5000, -1)
    labels = sample_labels(p, 0, 0, 0, 0)
    assert (p.gather(1, labels.unsqueeze(1)) > 0).all()


@pytest.mark.parametrize("bits", [0, 2**64 - 1], ids=["smallest", "largest"])
@pytest.mark.parametrize("row", IMPOSSIBLE, ids=str)
def test_impossible_labels_are_not_drawn_at_the_ends(
    row: list[float], bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The smallest and largest uniform numbers there are."""
    monkeypatch.setattr(label_module, "_mix", lambda values: np.full(np.shape(values), bits, np.uint64))
    p = torch.tensor([row] * 2, dtype=torch.float64)
    labels = sample_labels(p, 0, 0, 0, 0)
    assert (p.gather(1, labels.unsqueeze(1)) > 0).all()


# Merging -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
@pytest.mark.parametrize("case", FEW_CASES, ids=str)
def test_merged_shards_are_the_fit_on_all(case: Case, fisher: str) -> None:
    labels = torch.arange(SIZE) % case.num_classes
    batch = as_batch(labelled(dense(case, SIZE).inputs, labels))
    ifc = opened(case, fisher=fisher)
    whole = covariances_of(ifc, [batch])
    shards = [batch.select(rows) for rows in (slice(0, 1), slice(1, 5), slice(5, SIZE))]
    first, second, third = (covariances_of(ifc, [shard]) for shard in shards)
    merged = first.merge(second).merge(third)
    assert merged.count == whole.count == SIZE
    for name, covariance in whole.blocks.items():
        assert_same(merged.blocks[name].outputs, covariance.outputs, rtol=1e-10)
        if covariance.inputs is not None:
            assert_same(merged.blocks[name].inputs, covariance.inputs, rtol=1e-10)

    basis = eigenbases([merged])[0]
    expected = moments_of(ifc, [batch], basis)
    one, two, three = (moments_of(ifc, [shard], basis) for shard in shards)
    for together in (one.merge(two).merge(three), one.merge(two.merge(three)), three.merge(one).merge(two)):
        assert together.count == SIZE
        for name, block in expected.blocks.items():
            assert_same(together.blocks[name].second_moments, block.second_moments, rtol=1e-10, floor=MOMENT_FLOOR)


def test_merge_refuses_other_settings() -> None:
    factors = fitted(ALL_CASES["linear"]).factors
    for change in ({"beta": 0.5}, {"fisher": "sampled"}, {"label_samples": 2}, {"seed": 1}):
        other = replace(factors, settings=replace(factors.settings, **change))
        with pytest.raises(MergeError, match="settings"):
            factors.merge(other)
    with pytest.raises(MergeError):
        factors.merge(replace(factors, num_classes=4))


@pytest.mark.parametrize("side", ["inputs", "outputs"])
def test_merge_refuses_other_bases(side: str) -> None:
    factors = fitted(ALL_CASES["linear"]).factors
    block = factors.blocks["0"]
    turned = replace(block, basis=replace(block.basis, **{side: getattr(block.basis, side).flip(-1)}))
    with pytest.raises(MergeError, match="eigenbases of block '0' differ"):
        factors.merge(replace(factors, blocks={**factors.blocks, "0": turned}))
    with pytest.raises(MergeError, match="eigenbases of block '0' differ"):
        factors.merge(replace(factors, blocks={**factors.blocks, "0": replace(block, basis=None)}))


def test_merge_refuses_other_blocks() -> None:
    ifc = fitted(ALL_CASES["linear"])
    fewer = {name: block for name, block in ifc.factors.blocks.items() if name != "3"}
    with pytest.raises(MergeError, match="3 is in one of them only"):
        ifc.factors.merge(replace(ifc.factors, blocks=fewer))
    found = covariances_of(opened(ALL_CASES["linear"]), [training_batch(ALL_CASES["linear"])])
    only = Covariances({"0": found.blocks["0"]}, found.count)
    for one, other in ((found, only), (only, found)):
        with pytest.raises(MergeError, match="3 is in one of them only"):
            one.merge(other)


def test_merge_refuses_covariances_of_other_shapes() -> None:
    """A convolution of one channel, with and without shared offsets: [1, 1, 1] would broadcast to [1, 9, 9]."""
    case = ALL_CASES["conv3d_replicate"]
    one, other = (covariances_of(opened(case, sua=sua), [training_batch(case)]) for sua in (True, False))
    with pytest.raises(MergeError):
        one.merge(other)


def test_merge_refuses_covariances_of_other_kinds() -> None:
    """A one-hot block has no input covariance; dropping that of the other would give it the wrong basis."""
    outputs = torch.eye(2).unsqueeze(0)
    with pytest.raises(MergeError):
        Covariances({"0": Covariance(None, outputs)}, 1).merge(Covariances({"0": Covariance(outputs, outputs)}, 1))


# Eigendecomposition ------------------------------------------------------------------------------------------------


def spectrum(*eigenvalues: float) -> Tensor:
    """A random symmetric matrix [1, C, C] with these eigenvalues."""
    generator = torch.Generator().manual_seed(0)
    size = len(eigenvalues)
    vectors = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]
    return (vectors @ torch.diag(torch.tensor(eigenvalues, dtype=torch.float64)) @ vectors.T).unsqueeze(0)


@pytest.mark.parametrize(
    "matrices",
    [
        spectrum(0.0, 0.0, 0.0, 2.0),
        spectrum(1.0, 1.0, 1.0, 1.0),
        spectrum(1e-300, 1e-12, 1.0, 1e12),
        torch.zeros(1, 3, 3, dtype=torch.float64),
        torch.zeros(1, 3, 3),
        torch.ones(1, 1, 1),
        torch.cat([spectrum(0.0, 1.0), torch.zeros(1, 2, 2, dtype=torch.float64)]),
        torch.full((1, 5, 5), 1e30),
        torch.zeros(2, 0, 0),
    ],
    ids=["rank 1", "degenerate", "wide", "zero", "zero single", "one", "groups", "large single", "empty"],
)
def test_rank_deficient_matrices_have_eigenvectors(matrices: Tensor) -> None:
    vectors = eigenvectors(matrices, "a layer")
    assert vectors.dtype == matrices.dtype
    assert vectors.shape == matrices.shape
    eps = torch.finfo(matrices.dtype).eps
    torch.testing.assert_close(vectors.mT @ vectors, torch.eye(matrices.shape[-1]).to(vectors).expand_as(vectors))
    rotated = vectors.double().mT @ matrices.double() @ vectors.double()
    off_diagonal = rotated - torch.diag_embed(rotated.diagonal(dim1=-2, dim2=-1))
    largest = float(matrices.abs().max()) if matrices.numel() else 0.0
    assert not off_diagonal.numel() or float(off_diagonal.abs().max()) <= 50 * eps * largest


@pytest.mark.parametrize("entry", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", ["inputs", "outputs"])
def test_non_finite_covariance_names_its_layer(side: str, entry: float) -> None:
    sound = Covariance(torch.eye(3).unsqueeze(0), torch.eye(2).unsqueeze(0))
    broken = getattr(sound, side).clone()
    broken[0, 0, 1] = entry
    found = Covariances({"body.0": sound, "body.7.fc": replace(sound, **{side: broken})}, 4)
    with pytest.raises(NonFiniteError, match=rf"{side[:-1]}.* of layer 'body\.7\.fc'"):
        eigenbases([found])


class Failing:
    """`torch.linalg.eigh` that does not converge for the first calls, and notes what it is given."""

    def __init__(self, failures: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Takes the place of the original."""
        self.given: list[Tensor] = []
        self._failures, self._original = failures, torch.linalg.eigh
        monkeypatch.setattr(torch.linalg, "eigh", self)

    def __call__(self, matrix: Tensor) -> object:
        """Fails, or gives the original's answer."""
        self.given.append(matrix.clone())
        if len(self.given) <= self._failures:
            raise torch.linalg.LinAlgError("linalg.eigh: The algorithm failed to converge")
        return self._original(matrix)


@pytest.mark.parametrize("failures", [1, 2, 3])
def test_failing_decomposition_is_retried_with_jitter(failures: int, monkeypatch: pytest.MonkeyPatch) -> None:
    eigh = Failing(failures, monkeypatch)
    matrix = spectrum(1.0, 2.0, 5.0, 40.0)
    vectors = eigenvectors(matrix, "a layer")
    assert len(eigh.given) == failures + 1
    assert torch.equal(eigh.given[0], matrix)
    added = [given - matrix for given in eigh.given]
    sizes = [float(jitter.diagonal(dim1=-2, dim2=-1).mean()) for jitter in added]
    assert sizes == sorted(set(sizes)), "each retry adds more"
    assert 0 < sizes[-1] <= 1e-5 * 12.0, "but little beside the mean of the diagonal"
    for jitter in added:
        assert_same(jitter, torch.diag_embed(jitter.diagonal(dim1=-2, dim2=-1)), floor=1e-12)
    rotated = vectors.mT @ matrix @ vectors
    assert_same(rotated, torch.diag_embed(torch.tensor([[1.0, 2.0, 5.0, 40.0]], dtype=torch.float64)), floor=1e-13)


def test_decomposition_that_never_converges_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    eigh = Failing(10**6, monkeypatch)
    found = Covariances({"body.fc": Covariance(None, spectrum(1.0, 2.0))}, 4)
    with pytest.raises(NonFiniteError, match=r"layer 'body\.fc' does not converge"):
        eigenbases([found])
    assert len(eigh.given) > 1


def test_single_precision_basis_is_decomposed_in_double(monkeypatch: pytest.MonkeyPatch) -> None:
    eigh = Failing(0, monkeypatch)
    assert eigenvectors(spectrum(1.0, 2.0, 3.0).float(), "a layer").dtype == torch.float32
    assert [given.dtype for given in eigh.given] == [torch.float64]


def test_expected_moments_are_what_a_float32_fit_approaches() -> None:
    """The covariances are summed in float32 there, and so is the rest: the oracle is met to single precision."""
    for case in FEW_CASES:
        ifc = fitted(case, torch.float32)
        examples = dense(case, SIZE)
        for block in oracle_blocks(case):
            own = library_block(ifc, block)
            arguments = basis_arguments(ifc, own)
            expected = expected_second_moments(examples.gradients(block, 1.0), examples.probability(1.0), **arguments)
            found = ifc.factors.blocks[own.name].second_moments
            assert found.dtype == torch.float32
            assert_same(found.double(), expected, rtol=1e-3, floor=1e-7)


# Confident models ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("margin", [9.0, 20.0, 60.0])
def test_one_sampled_label_is_enough_for_a_confident_model(margin: float) -> None:
    """Labels drawn from p itself are nearly always the model's own, whose gradient is nearly zero."""
    x = torch.randn(400, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model = nn.Linear(4, 3).double()
    with torch.no_grad():
        model.bias.copy_(torch.tensor([margin, 0.0, 0.0]))
    sampled, exact = (IFComp(model, fisher=fisher).fit([x]) for fisher in ("sampled", "exact"))
    traces = [ifc.factors.blocks[""].second_moments.sum() for ifc in (sampled, exact)]
    torch.testing.assert_close(traces[0], traces[1], rtol=1e-9, atol=0.0)  # every draw has the expected size
    assert sampled.score([x]).frame["surprise"].mean() < 3
    torch.testing.assert_close(sampled.influence(x[:9]), exact.influence(x[:9]), rtol=0.7, atol=0.0)


def test_draws_of_confident_rows_are_not_lost_to_rounding() -> None:
    p = torch.tensor([[1.0, 1e-30, 3e-30], [1.0, 0.0, 0.0], [0.5, 0.5, 0.0]], dtype=torch.float64)
    sizes = squared_residuals(p)
    torch.testing.assert_close(
        sizes[0], torch.tensor([1.6e-59 + 1e-59, 2.0, 2.0], dtype=torch.float64), rtol=1e-12, atol=0
    )
    torch.testing.assert_close(sizes[1], torch.tensor([0.0, 2.0, 2.0], dtype=torch.float64))
    torch.testing.assert_close(sizes[2], torch.tensor([0.5, 0.5, 1.5], dtype=torch.float64))


# Several fits in one ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", FEW_CASES, ids=str)
def test_fits_made_together_equal_fits_made_alone(case: Case) -> None:
    model, data = case.make().double(), [dense(case, SIZE).inputs]
    options = [{"beta": 1.0}, {"beta": 0.2, "fisher": "sampled", "seed": 4}, {"beta": 0.0}]
    together = [IFComp(model, **{"fisher": "exact", **own}) for own in options]
    fit_together(together, data)
    for found, own in zip(together, options, strict=True):
        alone = IFComp(model, **{"fisher": "exact", **own}).fit(data)
        assert found.factors.settings == alone.factors.settings
        for name, block in alone.factors.blocks.items():
            torch.testing.assert_close(found.factors.blocks[name].second_moments, block.second_moments, rtol=0, atol=0)


def test_fits_made_together_share_the_forward_passes() -> None:
    calls = []
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    handle = model.register_forward_hook(lambda *_: calls.append(1))
    IFComp(model).fit([x])
    alone = len(calls)
    fit_together([IFComp(model, beta) for beta in (0.1, 0.5, 1.0)], [x])
    handle.remove()
    assert len(calls) == 2 * alone


def test_only_predictors_of_one_model_are_fitted_together() -> None:
    one, other = nn.Linear(4, 3), nn.Linear(4, 3)
    with pytest.raises(SettingError, match="same model"):
        fit_together([IFComp(one), IFComp(other)], [torch.randn(5, 4)])
    with pytest.raises(SettingError, match="layers="):
        fit_together([IFComp(one), IFComp(one, layers="last")], [torch.randn(5, 4)])
