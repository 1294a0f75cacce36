"""Self-checks of the oracles and of the cases."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.testing import assert_close
from transformers.pytorch_utils import Conv1D

from cases import ATTENTION_CASES, CONV_CASES, EMBEDDING_CASES, LAYER_CASES, MODEL_CASES, RECURRENT_CASES, Case, Folded
from oracles import (
    Convolution,
    Inputs,
    OracleBlock,
    SeparateAttention,
    SeparateBag,
    SeparateRecurrence,
    Transposed,
    block_jacobian,
    canonical_use,
    covariances,
    dense_fisher,
    dense_influence,
    ekfac_influence,
    ekfac_inverse,
    example_jacobians,
    example_logits,
    expected_second_moments,
    label_gradients,
    label_probabilities,
    logit_kernel,
    module_uses,
    patches,
    recurrence_map,
    rotation_matrix,
    separate_attention,
    separate_bags,
    separate_recurrences,
)

ALL_CASES = {case.name: case for case in (*LAYER_CASES, *MODEL_CASES)}
each_case = pytest.mark.parametrize("case", ALL_CASES.values(), ids=str)
few_cases = pytest.mark.parametrize(
    "name", ["linear_tokens", "conv2d_groups", "attention_bias_kv", "tied", "class_token"]
)


def run(model: nn.Module, inputs: Inputs) -> Tensor:
    """Logits of the whole batch at once, in the model's dtype."""
    dtype = next(model.parameters()).dtype

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    if isinstance(inputs, Tensor):
        return model(cast(inputs))
    output = model(**{key: cast(value) for key, value in inputs.items()})
    return getattr(output, "logits", output)


def random_basis(*shape: int, seed: int = 0) -> Tensor:
    """Random orthogonal matrices ``[..., n, n]`` from a shape ``(..., n)``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(*shape, shape[-1], generator=generator, dtype=torch.float64))[0]


def random_gradients(*shape: int) -> Tensor:
    """Standard normal float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


# Cases -------------------------------------------------------------------------------------------------------------


def test_case_names_are_unique() -> None:
    assert len(ALL_CASES) == len(LAYER_CASES) + len(MODEL_CASES)


@each_case
def test_case_is_deterministic_and_examples_are_independent(case: Case) -> None:
    model, again = case.make(), case.make()
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))
    inputs = case.sample(4)
    logits = example_logits(model, inputs)
    assert logits.shape == (4, case.num_classes)
    with torch.no_grad():
        assert_close(run(copy.deepcopy(model).double(), inputs), logits)
        assert_close(run(model, inputs).double(), logits, rtol=1e-4, atol=1e-5)


@each_case
def test_blocks_partition_the_trainable_parameters(case: Case) -> None:
    model = case.make()
    trainable = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    jacobians = example_jacobians(model, case.sample(2))
    assert set(jacobians) == set(trainable)
    covered = [block_jacobian(jacobians, block) for block in case.blocks]
    size = sum(part[0, 0].numel() for part in covered) + sum(trainable[name] for name in case.other)
    assert size == sum(trainable.values())
    assert all(part.isfinite().all() for part in jacobians.values())
    assert all(part.abs().max() > 1e-9 for part in covered)


@each_case
def test_jacobian_is_a_sum_over_positions(case: Case) -> None:
    """``sum_t db_t a_t^T`` over all uses of a module is the Jacobian of its weight, and of its bias with ``a = 1``."""
    model, inputs = separate_bags(separate_attention(separate_recurrences(case.make()))), case.sample(2)
    jacobians = example_jacobians(model, inputs)
    modules = {block.parameters[0].removesuffix(".weight") for block in case.blocks if block.kind == "kronecker"}
    for name, module in model.named_modules():
        if isinstance(module, SeparateAttention):
            modules |= {f"{name}.{part}" for part in ("q", "k", "v", "out")}
        if isinstance(module, SeparateBag):
            modules = (modules - {name}) | {f"{name}.table"}
        if isinstance(module, SeparateRecurrence):
            modules |= {f"{name}.{part}" for part, _ in module.named_children()}
    for name, module in model.named_modules():
        if name not in modules:
            continue
        names = tuple(key for key in (f"{name}.weight", f"{name}.bias") if key in jacobians)
        transposed = isinstance(module, nn.Embedding | Conv1D | Transposed)
        block = OracleBlock("kronecker", names, getattr(module, "groups", 1), transposed=transposed)
        total = torch.zeros(())
        for use in module_uses(model, inputs, name):
            a, db = canonical_use(use, module)
            if block.has_bias:
                a = torch.cat([a, torch.ones_like(a[..., :1])], dim=-1)
            total = total + torch.einsum("bkgto,bgtj->bkgoj", db, a)
        assert_close(total, block_jacobian(jacobians, block))


# Jacobians ---------------------------------------------------------------------------------------------------------


@few_cases
def test_jacobians_match_jacrev(name: str) -> None:
    case = ALL_CASES[name]
    model, inputs = case.make().double(), case.sample(2)
    jacobians = example_jacobians(model, inputs)
    parameters = dict(model.named_parameters())
    expected = jacrev(lambda values: functional_call(model, values, inputs.double()), chunk_size=1)(parameters)
    for key, value in jacobians.items():
        assert_close(value, expected[key])


@pytest.mark.parametrize("name", ["linear_tokens", "conv2d_same_even", "instancenorm1d", "embedding", "tied", "lstm"])
def test_jacobians_match_finite_differences(name: str) -> None:
    case = ALL_CASES[name]
    model, inputs = case.make().double(), case.sample(2)
    generator = torch.Generator().manual_seed(2)
    direction = {key: torch.randn(p.shape, generator=generator, dtype=p.dtype) for key, p in model.named_parameters()}
    expected = sum(
        (value * direction[key]).flatten(2).sum(2) for key, value in example_jacobians(model, inputs).items()
    )
    step, shifted = 1e-5, []
    for sign in (1.0, -1.0):
        moved = copy.deepcopy(model)
        with torch.no_grad():
            for key, parameter in moved.named_parameters():
                parameter.add_(direction[key], alpha=sign * step)
        shifted.append(example_logits(moved, inputs))
    assert_close((shifted[0] - shifted[1]) / (2 * step), expected, rtol=1e-6, atol=1e-8)


def test_oracle_leaves_the_model_as_it_was() -> None:
    model = ALL_CASES["frozen_weight"].make().train()
    example_jacobians(model, ALL_CASES["frozen_weight"].sample(2), ["0.weight"])
    assert model.training
    assert not model.get_parameter("0.weight").requires_grad
    assert all(p.dtype == torch.float32 and p.grad is None for p in model.parameters())


@pytest.mark.parametrize("beta", [0.0, 0.3, 2.0])
def test_label_gradients_are_those_of_the_loss(beta: float) -> None:
    """``beta g_y`` is the gradient of ``-log softmax(beta f)_y``; at zero the labels are uniform."""
    jacobian, logits = random_gradients(2, 3, 5), random_gradients(2, 3).requires_grad_()
    p = label_probabilities(logits, beta).detach()
    gradients = label_gradients(jacobian, p)
    for label in range(3):
        loss = -torch.log_softmax(beta * logits, dim=1)[:, label].sum()
        (by_logits,) = torch.autograd.grad(loss, logits)
        assert_close(beta * gradients[:, label], torch.einsum("bk,bkp->bp", by_logits, jacobian))
    if beta == 0.0:
        assert_close(p, torch.full_like(p, 1 / 3))


# Bases, moments and influence --------------------------------------------------------------------------------------


def test_rotation_is_two_sided_product() -> None:
    """``vec(Q_S^T G Q_A) = kron(Q_S, Q_A)^T vec(G)`` in every group."""
    q_in, q_out, gradients = random_basis(2, 4), random_basis(2, 3, seed=1), random_gradients(5, 2, 2, 3, 4)
    rotated = gradients.flatten(2) @ rotation_matrix((2, 3, 4), q_in, q_out)
    assert_close(rotated.reshape(gradients.shape), q_out.mT @ gradients @ q_in)


def test_sua_rotation_acts_on_channels_at_each_offset() -> None:
    channels, offsets = 3, 4
    q_in, q_out = random_basis(1, channels), random_basis(1, 2, seed=1)
    gradients = random_gradients(5, 2, 1, 2, channels * offsets + 1)
    rotation = rotation_matrix((1, 2, channels * offsets + 1), q_in, q_out, offsets, has_bias=True)
    rotated = (gradients.flatten(2) @ rotation).reshape(gradients.shape)
    left = q_out.mT @ gradients
    kernel = left[..., :-1].unflatten(-1, (channels, offsets))
    expected = torch.stack([kernel[..., offset] @ q_in for offset in range(offsets)], dim=-1).flatten(-2)
    assert_close(rotated, torch.cat([expected, left[..., -1:]], dim=-1))


def test_bases_of_wrong_size_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        rotation_matrix((1, 2, 7), random_basis(1, 3), None, offsets=2)


def test_influence_is_the_weighted_sum_of_squares() -> None:
    q_in, q_out, gradients = random_basis(2, 4), random_basis(2, 3, seed=1), random_gradients(5, 2, 2, 3, 4)
    moments = random_gradients(2, 3, 4) ** 2
    expected = ((q_out.mT @ gradients @ q_in) ** 2 / (moments + 0.1)).sum((2, 3, 4))
    assert_close(ekfac_influence(gradients, q_in, q_out, moments, 0.1), expected)
    diagonal, moments = random_gradients(5, 2, 6), random_gradients(6) ** 2
    assert_close(ekfac_influence(diagonal, None, None, moments, 0.1), (diagonal**2 / (moments + 0.1)).sum(2))


def test_influence_is_a_quadratic_form_of_the_logit_kernel() -> None:
    jacobian, p = random_gradients(5, 3, 1, 2, 4), torch.softmax(random_gradients(5, 3), dim=1)
    inverse = ekfac_inverse(random_gradients(1, 2, 4) ** 2, 0.1, random_basis(1, 4), random_basis(1, 2))
    residuals = p[:, None] - torch.eye(3)
    expected = torch.einsum("byk,bkl,byl->by", residuals, logit_kernel(jacobian, inverse), residuals)
    assert_close(dense_influence(label_gradients(jacobian, p), inverse), expected)


def test_expected_influence_counts_the_curved_directions() -> None:
    """With the exact Fisher and no damping the training mean of the expected influence is the Fisher's rank."""
    case = ALL_CASES["linear"]
    model, inputs = case.make(), case.sample(20)
    p = label_probabilities(example_logits(model, inputs), 0.7)
    gradients = label_gradients(block_jacobian(example_jacobians(model, inputs), case.blocks[-1]), p)
    fisher = dense_fisher(gradients, p)
    influence = dense_influence(gradients, torch.linalg.pinv(fisher, hermitian=True, rtol=1e-10))
    rank = 2 * 6  # (classes - 1) * (inputs + bias)
    assert_close((p * influence).sum(1).mean().item(), float(rank))


def test_ekfac_is_exact_for_one_example_and_one_position() -> None:
    """There the Fisher is a Kronecker product, and the eigenvectors of the covariances are its own."""
    case = ALL_CASES["linear"]
    model, inputs = case.make(), case.sample(1)
    p = label_probabilities(example_logits(model, inputs), 1.0)
    gradients = label_gradients(block_jacobian(example_jacobians(model, inputs), case.blocks[0]), p)
    q_in, q_out = (torch.linalg.eigh(covariance)[1] for covariance in covariances(model, inputs, "0"))
    moments = expected_second_moments(gradients, p, q_in, q_out)
    fisher = dense_fisher(gradients, p)
    inverse = torch.linalg.inv(fisher + 0.01 * torch.eye(len(fisher), dtype=fisher.dtype))
    assert_close(ekfac_inverse(moments, 0.01, q_in, q_out), inverse)
    assert_close(ekfac_influence(gradients, q_in, q_out, moments, 0.01), dense_influence(gradients, inverse))


def test_second_moments_are_the_diagonal_of_the_rotated_fisher() -> None:
    gradients, q_in, q_out = random_gradients(5, 3, 1, 2, 4), random_basis(1, 4), random_basis(1, 2)
    labels = torch.eye(3, dtype=torch.float64)[torch.tensor([0, 2, 1, 1, 0])]
    rotation = rotation_matrix((1, 2, 4), q_in, q_out)
    expected = torch.diagonal(rotation.T @ dense_fisher(gradients, labels) @ rotation)
    assert_close(expected_second_moments(gradients, labels, q_in, q_out).flatten(), expected)


# Covariances -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CONV_CASES, ids=str)
def test_patches_times_kernel_is_the_convolution(case: Case) -> None:
    model, x = case.make().double(), case.sample(2).double()
    module = model.layer if isinstance(model, Folded) else model[0]
    assert isinstance(module, Convolution)
    x = x.flatten(0, 1) if isinstance(model, Folded) else x
    kernel = module.weight.reshape(module.groups, module.out_channels // module.groups, -1)
    product = torch.einsum("bgtj,goj->bgot", patches(x, module), kernel).flatten(1, 2)
    bias = 0.0 if module.bias is None else module.bias[:, None]
    assert_close(product + bias, module(x).flatten(2))


def test_covariances_of_a_convolution() -> None:
    case = ALL_CASES["conv2d_groups"]
    model, inputs = case.make(), case.sample(3)
    a_sum, s_sum = covariances(model, inputs, "0", beta=0.5)
    assert a_sum.shape == (2, 9, 9)
    assert s_sum.shape == (2, 3, 3)
    assert_close(a_sum[:, -1, -1], torch.full((2,), 3 * 4.0, dtype=torch.float64))
    image = inputs.double().reshape(3, 2, 2, 9)
    assert_close(covariances(model, inputs, "0", sua=True)[0], torch.einsum("bgcp,bgdp->gcd", image, image))
    each = [torch.eye(3, dtype=torch.float64)[label].expand(3, 3) for label in range(3)]
    p = label_probabilities(example_logits(model, inputs), 0.5)
    parts = [covariances(model, inputs, "0", beta=0.5, label_weights=p * one_hot)[1] for one_hot in each]
    assert_close(sum(parts), s_sum)


@pytest.mark.parametrize("case", ATTENTION_CASES, ids=str)
def test_separate_attention_is_the_same_model(case: Case) -> None:
    model, inputs = case.make(), case.sample(2)
    separate = separate_attention(model)
    assert_close(example_logits(separate, inputs), example_logits(model, inputs))
    packed, parts = example_jacobians(model, inputs), example_jacobians(separate, inputs)
    prefix = next(name for name, module in model.named_modules() if isinstance(module, nn.MultiheadAttention))
    for block, part in zip(case.blocks, ("q", "k", "v", "out"), strict=False):
        names = (f"{prefix}.{part}.weight", f"{prefix}.{part}.bias")[: len(block.parameters)]
        assert_close(block_jacobian(parts, OracleBlock("kronecker", names)), block_jacobian(packed, block))


@pytest.mark.parametrize("case", [case for case in EMBEDDING_CASES if "bag" in case.name], ids=str)
def test_separate_bags_are_the_same_model(case: Case) -> None:
    model, inputs = case.make(), case.sample(4)
    separate = separate_bags(model)
    assert_close(example_logits(separate, inputs), example_logits(model, inputs))
    packed, parts = example_jacobians(model, inputs), example_jacobians(separate, inputs)
    (name,) = (name for name, module in model.named_modules() if isinstance(module, nn.EmbeddingBag))
    assert_close(parts[f"{name}.table.weight"], packed[f"{name}.weight"])


@pytest.mark.parametrize("case", RECURRENT_CASES, ids=str)
def test_separate_recurrences_are_the_same_model(case: Case) -> None:
    model, inputs = case.make(), case.sample(2)
    separate = separate_recurrences(model)
    assert_close(example_logits(separate, inputs), example_logits(model, inputs))
    packed, parts = example_jacobians(model, inputs), example_jacobians(separate, inputs)
    for block in case.blocks[:-1] if "frozen" not in case.name else ():
        name, _ = recurrence_map(block)
        names = tuple(key for key in (f"{name}.weight", f"{name}.bias") if key in parts)
        assert_close(block_jacobian(parts, OracleBlock("kronecker", names)), block_jacobian(packed, block))
