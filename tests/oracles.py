"""Slow, dense, float64 oracles for curvature and influence, written from the mathematics alone.

Nothing here is shared with the library. Every example runs alone as a batch of one, every label has its own gradient,
every rotation is an explicit Kronecker product and every inverse Fisher an explicit ``[P, P]`` matrix.

Symbols: ``B`` examples, ``K`` labels, ``Gr`` groups, ``O`` outputs and ``J`` inputs of a group (the last of them is the
bias, if there is one), ``P`` parameters of a block, ``T`` positions. Units are free of beta: the gradient for label
``y`` is ``g_y = J^T (p - e_y)`` with ``p = softmax(beta f)``.

The usual chain of calls::

    jacobians = example_jacobians(model, inputs)
    jacobian = block_jacobian(jacobians, OracleBlock("kronecker", ("fc.weight", "fc.bias")))
    p = label_probabilities(example_logits(model, inputs), beta)
    gradients = label_gradients(jacobian, p)
    moments = expected_second_moments(gradients, p, input_basis, output_basis)
    influence = ekfac_influence(gradients, input_basis, output_basis, moments, damping)
"""

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

Inputs = Tensor | dict[str, Tensor]
Transposed = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d | Transposed


@dataclass(frozen=True)
class OracleBlock:
    """The parameters that share one block of the block-diagonal Fisher.

    Attributes:
        kind: ``"kronecker"`` for a weight matrix with its bias, ``"diagonal"`` for any list of parameters.
        parameters: Names in the model. For a Kronecker block the weight, then the bias if it belongs to the block.
        groups: Number ``Gr`` of groups along the weight's rows.
        rows: Rows of a packed projection (``in_proj_weight``, ``in_proj_bias``) that are this block's. A parameter
            that has just as many rows is taken whole, which is the case for ``q_proj_weight`` and its kind.
        transposed: Whether the weight is stored as ``[Gr * J, O, ...]``, as those of an Embedding and of a transposed
            convolution are.
    """

    kind: Literal["kronecker", "diagonal"]
    parameters: tuple[str, ...]
    groups: int = 1
    rows: slice | None = None
    transposed: bool = False

    @property
    def has_bias(self) -> bool:
        """Whether the last column of the gradient matrix is that of a bias."""
        return self.kind == "kronecker" and len(self.parameters) == 2


@dataclass(frozen=True)
class ModuleUse:
    """One call of a module, in the shapes that it has when an example runs alone.

    Attributes:
        inputs: First argument of the call, ``[B, *input shape]``.
        output_jacobian: Derivative of the logits by the call's output, ``[B, K, *output shape]``.
    """

    inputs: Tensor
    output_jacobian: Tensor


# Running the model -------------------------------------------------------------------------------------------------


def example_logits(model: nn.Module, inputs: Inputs) -> Tensor:
    """Logits ``[B, K]`` in float64, each example run alone in eval mode."""
    model = _double(model)
    with torch.no_grad():
        return torch.stack([_run(model, example) for example in _examples(inputs)])


def label_probabilities(logits: Tensor, beta: float) -> Tensor:
    """``softmax(beta f)`` of logits ``[B, K]``; uniform for ``beta = 0``."""
    return torch.softmax(beta * logits, dim=-1)


def example_jacobians(model: nn.Module, inputs: Inputs, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Derivative of every logit by every parameter, one example and one logit at a time.

    Args:
        model: Any classifier. It is copied, and the copy is used in float64 and eval mode.
        inputs: ``[B, ...]``, or a dict of such tensors that are passed as keyword arguments.
        names: Parameters to differentiate by, frozen or not; all that require a gradient if not given.

    Returns:
        For each name a float64 tensor ``[B, K, *shape]``, zero where the model does not use the parameter.
    """
    if names is None:
        names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    names = list(names)
    model = _double(model)
    parameters = [model.get_parameter(name) for name in names]
    rows = [_logit_gradients(_run(model, example), parameters) for example in _examples(inputs)]
    return {name: torch.stack(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def module_uses(model: nn.Module, inputs: Inputs, module_name: str) -> list[ModuleUse]:
    """What goes into a module and how the logits depend on what comes out of it.

    Each call's output gets a zero tensor added to it, by which the logits are differentiated.

    Args:
        model: Any classifier; copied, float64, eval mode.
        inputs: As for `example_jacobians`.
        module_name: Dotted name of the module; its first positional argument is the input.

    Returns:
        One `ModuleUse` for each time that the forward pass calls the module.
    """
    model = _double(model)
    seen: list[Tensor] = []
    zeros: list[Tensor] = []

    def perturb(_: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor:
        seen.append(arguments[0].detach().clone())
        zeros.append(torch.zeros_like(output, requires_grad=True))
        return output + zeros[-1]

    model.get_submodule(module_name).register_forward_hook(perturb)
    rows = []
    for example in _examples(inputs):
        seen.clear()
        zeros.clear()
        logits = _run(model, example)
        rows.append([*zip(seen, _logit_gradients(logits, zeros), strict=True)])
    return [
        ModuleUse(torch.stack([entry for entry, _ in use]), torch.stack([jacobian for _, jacobian in use]))
        for use in zip(*rows, strict=True)
    ]


def _double(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).double().eval().requires_grad_(True)


def _examples(inputs: Inputs) -> list[Inputs]:
    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(torch.float64, copy=True) if tensor.is_floating_point() else tensor

    if isinstance(inputs, Tensor):
        return [cast(inputs[i : i + 1]) for i in range(len(inputs))]
    size = len(next(iter(inputs.values())))
    return [{key: cast(value[i : i + 1]) for key, value in inputs.items()} for i in range(size)]


def _run(model: nn.Module, example: Inputs) -> Tensor:
    output = model(**example) if isinstance(example, dict) else model(example)
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    return logits[0]


def _logit_gradients(logits: Tensor, variables: Sequence[Tensor]) -> list[Tensor]:
    """``[K, *shape]`` for each variable, from ``logits [K]``."""
    rows = [torch.autograd.grad(f, variables, retain_graph=True, materialize_grads=True) for f in logits]
    return [torch.stack(column) for column in zip(*rows, strict=True)]


# Blocks and gradients ----------------------------------------------------------------------------------------------


def block_jacobian(jacobians: dict[str, Tensor], block: OracleBlock) -> Tensor:
    """Jacobian of one block in its canonical layout.

    Args:
        jacobians: From `example_jacobians`; entries ``[B, K, *shape]``.
        block: Which parameters, and how they form a matrix.

    Returns:
        ``[B, K, Gr, O, J]`` of a Kronecker block, with the bias as last column; ``[B, K, P]`` of a diagonal one.
    """
    parts = [jacobians[name] for name in block.parameters]
    if block.kind == "diagonal":
        return torch.cat([part.flatten(2) for part in parts], dim=2)
    if block.rows is not None:
        size = block.rows.stop - block.rows.start
        parts = [part if part.shape[2] == size else part[:, :, block.rows] for part in parts]
    if block.transposed:
        parts[0] = parts[0].unflatten(2, (block.groups, -1)).transpose(3, 4).flatten(2, 3)
    batch, labels, rows = parts[0].shape[:3]
    return torch.cat([part.reshape(batch, labels, block.groups, rows // block.groups, -1) for part in parts], dim=-1)


def label_gradients(jacobian: Tensor, probabilities: Tensor) -> Tensor:
    """Gradient of the loss for every label, ``g_y = sum_k (p_k - [k = y]) J_k``.

    Args:
        jacobian: ``[B, K, ...]``, of a block, a parameter or a module's output.
        probabilities: ``p``, ``[B, K]``.

    Returns:
        ``[B, K, ...]``, the second axis now being the label.
    """
    residuals = probabilities.unsqueeze(1) - torch.eye(probabilities.shape[1], dtype=probabilities.dtype)
    return torch.einsum("byk,bk...->by...", residuals, jacobian)


# Fisher, EKFAC and influence ---------------------------------------------------------------------------------------


def dense_fisher(gradients: Tensor, label_weights: Tensor) -> Tensor:
    """Fisher ``[P, P]`` of one block: mean over examples of ``sum_y w_y g_y g_y^T``.

    Args:
        gradients: ``[B, K, ...]`` from `label_gradients`; the trailing axes are flattened to ``P``.
        label_weights: ``w``, ``[B, K]``: the probabilities for the exact Fisher, one-hot for given labels.
    """
    flat = gradients.flatten(2)
    return torch.einsum("by,byp,byq->pq", label_weights, flat, flat) / len(flat)


def dense_influence(gradients: Tensor, inverse: Tensor) -> Tensor:
    """``g_y^T inverse g_y`` for every label, ``[B, K]``, from gradients ``[B, K, ...]`` and a matrix ``[P, P]``."""
    flat = gradients.flatten(2)
    return torch.einsum("byp,pq,byq->by", flat, inverse, flat)


def logit_kernel(jacobian: Tensor, inverse: Tensor) -> Tensor:
    """``M = J inverse J^T``, ``[B, K, K]``, from a block's Jacobian ``[B, K, ...]`` and a matrix ``[P, P]``."""
    flat = jacobian.flatten(2)
    return torch.einsum("bkp,pq,blq->bkl", flat, inverse, flat)


def rotation_matrix(
    shape: Iterable[int],
    input_basis: Tensor | None,
    output_basis: Tensor | None,
    offsets: int = 1,
    has_bias: bool = False,
) -> Tensor:
    """Eigenbasis of one block as a dense orthogonal matrix, ``kron(Q_S, Q_A)`` of each group on the diagonal.

    With row-major ``vec``, ``vec(Q_S^T G Q_A) = kron(Q_S, Q_A)^T vec(G)``.

    Args:
        shape: ``(Gr, O, J)`` of a Kronecker block or ``(P,)`` of a diagonal one.
        input_basis: ``Q_A [Gr, J, J]``; or for SUA ``[Gr, C, C]``, which becomes ``kron(Q_C, I_offsets)`` and a 1 on
            the diagonal for the bias; or None for the identity.
        output_basis: ``Q_S [Gr, O, O]``, or None for the identity.
        offsets: Kernel positions of a SUA convolution, ``j = c * offsets + offset``.
        has_bias: Whether the last column of a SUA convolution is that of a bias.

    Returns:
        ``[P, P]`` in float64 whose columns are eigenvectors, ``P`` being the product of ``shape``.
    """
    shape = tuple(shape)
    groups, rows, columns = shape if len(shape) == 3 else (1, 1, *shape)
    blocks = []
    for group in range(groups):
        q_out = _identity(rows) if output_basis is None else output_basis[group].double().contiguous()
        q_in = _identity(columns) if input_basis is None else input_basis[group].double().contiguous()
        if len(q_in) != columns:
            q_in = torch.kron(q_in, _identity(offsets))
            q_in = torch.block_diag(q_in, _identity(1)) if has_bias else q_in
        if (len(q_out), len(q_in)) != (rows, columns):
            raise ValueError(f"bases of size {len(q_out)} and {len(q_in)} do not fit a gradient of shape {shape}")
        blocks.append(torch.kron(q_out, q_in))
    return torch.block_diag(*blocks)


def expected_second_moments(
    gradients: Tensor,
    label_weights: Tensor,
    input_basis: Tensor | None = None,
    output_basis: Tensor | None = None,
    offsets: int = 1,
    has_bias: bool = False,
) -> Tensor:
    """``Lambda``: mean over examples of ``sum_y w_y (Q_S^T G_y Q_A)^2``.

    Args:
        gradients: ``[B, K, Gr, O, J]`` or ``[B, K, P]`` from `label_gradients`.
        label_weights: ``w``, ``[B, K]``: the probabilities for the exact expectation, one-hot for given labels.
        input_basis: As for `rotation_matrix`.
        output_basis: As for `rotation_matrix`.
        offsets: As for `rotation_matrix`.
        has_bias: As for `rotation_matrix`.

    Returns:
        ``[Gr, O, J]`` or ``[P]``.
    """
    shape = gradients.shape[2:]
    rotated = gradients.flatten(2) @ rotation_matrix(shape, input_basis, output_basis, offsets, has_bias)
    return (label_weights.unsqueeze(-1) * rotated**2).sum(dim=1).mean(dim=0).reshape(shape)


def ekfac_inverse(
    second_moments: Tensor,
    damping: float,
    input_basis: Tensor | None = None,
    output_basis: Tensor | None = None,
    offsets: int = 1,
    has_bias: bool = False,
) -> Tensor:
    """``Q diag(1 / (Lambda + damping)) Q^T`` as a dense ``[P, P]``; arguments as for `ekfac_influence`."""
    rotation = rotation_matrix(second_moments.shape, input_basis, output_basis, offsets, has_bias)
    return rotation @ torch.diag(1.0 / (second_moments.double().flatten() + damping)) @ rotation.T


def ekfac_influence(
    gradients: Tensor,
    input_basis: Tensor | None,
    output_basis: Tensor | None,
    second_moments: Tensor,
    damping: float,
    offsets: int = 1,
    has_bias: bool = False,
) -> Tensor:
    """Influence of one block for every label, ``sum_ij (Q_S^T G Q_A)_ij^2 / (Lambda_ij + damping)``.

    Args:
        gradients: ``[B, K, Gr, O, J]`` or ``[B, K, P]`` from `label_gradients`.
        input_basis: As for `rotation_matrix`; None for a diagonal block.
        output_basis: As for `rotation_matrix`; None for a diagonal block.
        second_moments: ``Lambda``, ``[Gr, O, J]`` or ``[P]``.
        damping: Added to every second moment.
        offsets: As for `rotation_matrix`.
        has_bias: As for `rotation_matrix`.

    Returns:
        ``[B, K]``. Sum over blocks for the influence in the whole model.
    """
    inverse = ekfac_inverse(second_moments, damping, input_basis, output_basis, offsets, has_bias)
    return dense_influence(gradients, inverse)


def _identity(size: int) -> Tensor:
    return torch.eye(size, dtype=torch.float64)


# Covariances of the first pass -------------------------------------------------------------------------------------


def patches(x: Tensor, module: Convolution) -> Tensor:
    """Input patches of a convolution, by convolving each channel with one-hot kernels.

    Args:
        x: ``[B, Gr * C, *spatial]``.
        module: Any stride, dilation, groups, padding and padding mode.

    Returns:
        ``[B, Gr, T, J]`` with ``j = c * offsets + offset`` as in the flattened kernel, and without a bias column.
    """
    batch, channels = x.shape[:2]
    offsets = math.prod(module.kernel_size)
    if isinstance(module, Transposed):
        taken = _transposed_patches(x.reshape(batch * channels, 1, *x.shape[2:]), module)
        return taken.reshape(batch, module.groups, channels // module.groups * offsets, -1).transpose(2, 3)
    padding = [side for pair in reversed(_padding(module)) for side in pair]
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    padded = functional.pad(x, padding, mode=mode)
    one_hot = torch.eye(offsets, dtype=x.dtype).reshape(offsets, 1, *module.kernel_size)
    convolve = (functional.conv1d, functional.conv2d, functional.conv3d)[len(module.kernel_size) - 1]
    single = padded.reshape(batch * channels, 1, *padded.shape[2:])
    taken = convolve(single, one_hot, stride=module.stride, dilation=module.dilation)
    return taken.reshape(batch, module.groups, channels // module.groups * offsets, -1).transpose(2, 3)


def _transposed_patches(single: Tensor, module: Transposed) -> Tensor:
    """Single channels ``[N, 1, *spatial]``, transposed convolved with each one-hot kernel, ``[N, offsets, ...]``."""
    axes, offsets = len(module.kernel_size), math.prod(module.kernel_size)
    convolve = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)[axes - 1]
    one_hot = torch.eye(offsets, dtype=single.dtype).reshape(1, offsets, *module.kernel_size)
    options = {name: getattr(module, name) for name in ("stride", "padding", "output_padding", "dilation")}
    return convolve(single, one_hot, **options)


def canonical_use(use: ModuleUse, module: nn.Module) -> tuple[Tensor, Tensor]:
    """Inputs and output derivatives of a call, such that the weight's Jacobian is ``sum_t db_t a_t^T``.

    Args:
        use: From `module_uses`.
        module: The Linear or Conv1D (any leading axes), convolution or Embedding that was called. The inputs of an
            Embedding are one-hot, and zero where the index is its ``padding_idx``, which gets no gradient.

    Returns:
        ``a [B, Gr, T, J]`` without a bias column and ``db [B, K, Gr, T, O]``.
    """
    db = use.output_jacobian
    if isinstance(module, nn.Linear):
        a = use.inputs.reshape(len(use.inputs), 1, -1, module.in_features)
        return a, db.reshape(*db.shape[:2], 1, -1, module.out_features)
    if isinstance(module, nn.Embedding):
        a = functional.one_hot(use.inputs.reshape(len(use.inputs), 1, -1), module.num_embeddings).double()
        if module.padding_idx is not None:
            a[..., module.padding_idx] = 0.0
        return a, db.reshape(*db.shape[:2], 1, -1, module.embedding_dim)
    if isinstance(module, Conv1D):
        in_features, out_features = module.weight.shape
        a = use.inputs.reshape(len(use.inputs), 1, -1, in_features)
        return a, db.reshape(*db.shape[:2], 1, -1, out_features)
    if not isinstance(module, Convolution):
        raise TypeError(f"{type(module).__name__} given; Linear, Conv1D, Conv1d, Conv2d, Conv3d, Embedding are known")
    a = torch.stack([patches(image, module) for image in use.inputs])  # [B, N, Gr, T, J]
    split = db.reshape(*db.shape[:3], module.groups, module.out_channels // module.groups, -1)  # [B, K, N, Gr, O, T]
    return a.transpose(1, 2).flatten(2, 3), split.permute(0, 1, 3, 2, 5, 4).flatten(3, 4)


def covariances(
    model: nn.Module,
    inputs: Inputs,
    module_name: str,
    *,
    beta: float = 1.0,
    label_weights: Tensor | None = None,
    sua: bool = False,
) -> tuple[Tensor, Tensor]:
    """Covariances of a module of `canonical_use`, summed over examples, positions and all calls of the module.

    Inputs count at positions whose output changes the logits, separately for each group.

    Args:
        model: Any classifier.
        inputs: As for `example_jacobians`.
        module_name: Dotted name of the module. A 1 is appended to its inputs if it has a bias that is not frozen.
        beta: Inverse temperature of ``p``.
        label_weights: ``[B, K]``, one-hot for given labels; ``p`` if not given.
        sua: For a convolution, sum ``x x^T`` over the pixels of the input before padding that are in the patch of such
            a position, channels only.

    Returns:
        Input ``[Gr, J, J]`` (``[Gr, C, C]`` for SUA) and output ``[Gr, O, O]``.
    """
    module = model.get_submodule(module_name)
    bias = getattr(module, "bias", None)
    probabilities = label_probabilities(example_logits(model, inputs), beta)
    weights = probabilities if label_weights is None else label_weights.double()
    in_sum, out_sum = [], []
    for use in module_uses(model, inputs, module_name):
        a, db = canonical_use(use, module)
        sizes = db.abs().amax((1, 4))  # [B, Gr, T]
        counts = sizes > 1e-13 * sizes.amax((1, 2), keepdim=True)
        if sua:
            a, counts = _pixels(use.inputs, module), _pixels_in_patches(use.inputs, module, counts)
        elif bias is not None and bias.requires_grad:
            a = torch.cat([a, torch.ones_like(a[..., :1])], dim=-1)
        b = label_gradients(db, probabilities)
        a = a * counts.unsqueeze(-1)
        in_sum.append(torch.einsum("bgti,bgtj->gij", a, a))
        out_sum.append(torch.einsum("by,bygti,bygtj->gij", weights, b, b))
    return sum(in_sum[1:], in_sum[0]), sum(out_sum[1:], out_sum[0])


def embedding_covariance(
    model: nn.Module,
    inputs: Inputs,
    module_name: str,
    *,
    beta: float = 1.0,
    label_weights: Tensor | None = None,
) -> Tensor:
    """Output covariance ``[1, O, O]`` of an Embedding over the positions that have a gradient.

    `covariances` also counts what comes out at the ``padding_idx``, where the table gets no gradient.

    Args:
        model: Any classifier.
        inputs: As for `example_jacobians`.
        module_name: Dotted name of the Embedding.
        beta: Inverse temperature of ``p``.
        label_weights: As for `covariances`.
    """
    module = model.get_submodule(module_name)
    probabilities = label_probabilities(example_logits(model, inputs), beta)
    weights = probabilities if label_weights is None else label_weights.double()
    total = torch.zeros(1, module.embedding_dim, module.embedding_dim, dtype=torch.float64)
    for use in module_uses(model, inputs, module_name):
        a, db = canonical_use(use, module)
        looked_up = a.sum(-1)  # [B, 1, T], zero at the padding index
        b = label_gradients(db, probabilities)
        total += torch.einsum("by,bgt,bygti,bygtj->gij", weights, looked_up, b, b)
    return total


def _pixels(x: Tensor, module: nn.Module) -> Tensor:
    """``[B, Gr, T, C]`` from a convolution's raw input ``[B, N, Gr * C, *spatial]``."""
    if not isinstance(module, Convolution):
        raise TypeError(f"SUA is for convolutions, not for {type(module).__name__}")
    split = x.reshape(*x.shape[:2], module.groups, module.in_channels // module.groups, -1)
    return split.permute(0, 2, 1, 4, 3).flatten(2, 3)


def _pixels_in_patches(x: Tensor, module: Convolution, counts: Tensor) -> Tensor:
    """Whether pixels are in the patch of a position that counts, ``[B, Gr, T']`` for ``counts [B, Gr, T]``.

    The number of a pixel is written into an image, and the patches of that image are read at the positions.
    """
    spatial = x.shape[3:]
    pixels, offsets = math.prod(spatial), math.prod(module.kernel_size)
    numbers = torch.arange(1, pixels + 1, dtype=torch.float64).reshape(1, 1, *spatial)  # 0 is padding
    image = numbers.expand(1, module.in_channels, *spatial).contiguous()
    seen = patches(image, module)[0, 0, :, :offsets].long()  # [T, offsets]
    batch, images = x.shape[:2]
    found = torch.zeros(batch, module.groups, images, pixels + 1, dtype=torch.bool)
    for b, g, position in counts.nonzero().tolist():
        found[b, g, position // len(seen), seen[position % len(seen)]] = True
    return found[..., 1:].flatten(2)


def _padding(module: Convolution) -> list[tuple[int, int]]:
    """Padding before and after each spatial axis; ``"same"`` puts an odd one at the end."""
    if module.padding == "valid":
        return [(0, 0)] * len(module.kernel_size)
    if module.padding == "same":
        totals = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    return [(int(side), int(side)) for side in module.padding]


# Attention as separate projections ---------------------------------------------------------------------------------


class SeparateAttention(nn.Module):
    """Attention with its projections as four Linear modules, computed from the definition.

    `covariances` and `module_uses` can so reach the projections that `nn.MultiheadAttention` packs: ``q``, ``k``, ``v``
    and ``out``. There is no dropout, and no attention weights are returned.
    """

    def __init__(self, packed: nn.MultiheadAttention) -> None:
        """Copies the parameters of ``packed``."""
        super().__init__()
        self.heads = packed.num_heads
        self.batch_first = packed.batch_first
        self.zero = packed.add_zero_attn
        self.in_proj_bias = None  # nn.TransformerEncoderLayer asks for it, and then takes its ordinary path
        if packed.in_proj_weight is None:
            weights = (packed.q_proj_weight, packed.k_proj_weight, packed.v_proj_weight)
        else:
            weights = packed.in_proj_weight.chunk(3)
        biases = (None, None, None) if packed.in_proj_bias is None else packed.in_proj_bias.chunk(3)
        self.q, self.k, self.v = (_linear(weight, bias) for weight, bias in zip(weights, biases, strict=True))
        self.out = _linear(packed.out_proj.weight, packed.out_proj.bias)
        self.bias_k, self.bias_v = packed.bias_k, packed.bias_v

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Like `nn.MultiheadAttention` with batched inputs; masks are boolean or additive, and ``attn_mask [L, S]``."""
        if not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        batch = len(query)
        q, k, v = self.q(query), self.k(key), self.v(value)
        mask = q.new_zeros(batch, self.heads, q.shape[1], k.shape[1])
        if key_padding_mask is not None:
            mask = mask + _additive(key_padding_mask, q.dtype)[:, None, None, :]
        if attn_mask is not None:
            mask = mask + _additive(attn_mask, q.dtype)
        if self.bias_k is not None:
            k = torch.cat([k, self.bias_k.expand(batch, -1, -1)], dim=1)
            v = torch.cat([v, self.bias_v.expand(batch, -1, -1)], dim=1)
        if self.zero:
            k, v = (torch.cat([x, torch.zeros_like(x[:, :1])], dim=1) for x in (k, v))
        mask = functional.pad(mask, (0, k.shape[1] - mask.shape[-1]))
        q, k, v = (x.reshape(batch, x.shape[1], self.heads, -1).transpose(1, 2) for x in (q, k, v))
        attention = torch.softmax(q @ k.transpose(2, 3) / math.sqrt(q.shape[-1]) + mask, dim=-1)
        output = self.out((attention @ v).transpose(1, 2).flatten(2))
        return output if self.batch_first else output.transpose(0, 1), None


def separate_attention(model: nn.Module) -> nn.Module:
    """A copy of the model with a `SeparateAttention` in the place of each `nn.MultiheadAttention`."""
    model = copy.deepcopy(model)
    packed = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)]
    for name, module in packed:
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, SeparateAttention(module))
    return model


# Bags as embeddings ------------------------------------------------------------------------------------------------


class SeparateBag(nn.Module):
    """A bag of tokens as an Embedding, ``table``, and a reduction of one example at a time.

    Of tokens with the same largest value one gets the gradient of a maximum.
    """

    def __init__(self, bag: nn.EmbeddingBag) -> None:
        """Copies the table of ``bag``."""
        super().__init__()
        self.mode, self.padding = bag.mode, bag.padding_idx
        self.table = nn.Embedding(bag.num_embeddings, bag.embedding_dim, padding_idx=bag.padding_idx)
        self.table.weight = nn.Parameter(bag.weight.detach().clone())

    def forward(self, tokens: Tensor, offsets: None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Reduced embeddings [B, D] of tokens [B, T]."""
        vectors = self.table(tokens)
        if per_sample_weights is not None:
            vectors = vectors * per_sample_weights.unsqueeze(-1)
        return torch.stack([self._reduced(rows, kept) for rows, kept in zip(vectors, tokens, strict=True)])

    def _reduced(self, vectors: Tensor, tokens: Tensor) -> Tensor:
        kept = vectors if self.padding is None else vectors[tokens != self.padding]
        if not len(kept):
            return vectors.sum(0) * 0.0
        return {"sum": kept.sum(0), "mean": kept.mean(0), "max": kept.max(0).values}[self.mode]


def separate_bags(model: nn.Module) -> nn.Module:
    """A copy of the model with a `SeparateBag` in the place of each `nn.EmbeddingBag`."""
    model = copy.deepcopy(model)
    bags = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.EmbeddingBag)]
    for name, module in bags:
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, SeparateBag(module))
    return model


# Recurrent modules as linear maps ----------------------------------------------------------------------------------


class SeparateRecurrence(nn.Module):
    """A recurrent module without packing, computed step by step from the definition.

    The projections of an LSTM and an RNN are one Linear of ``[x, h, 1]``, named ``l0`` or the like: its weight is the
    two weights and the bias of the input projection, its bias that of the recurrent projection. Without a bias it is a
    Linear of ``[x, h]``. The projections of a GRU are two Linear, ``ih_l0`` and ``hh_l0``. Weights are never frozen.
    """

    def __init__(self, packed: nn.RNNBase) -> None:
        """Copies the parameters of ``packed``."""
        super().__init__()
        self.kind, self.batch_first, self.size = packed.mode, packed.batch_first, packed.hidden_size
        self.num_layers, self.bidirectional, self.proj_size = packed.num_layers, packed.bidirectional, 0
        self.bias = packed.bias
        ends = ("", "_reverse")[: 1 + packed.bidirectional]
        self.suffixes = [f"l{layer}{end}" for layer in range(packed.num_layers) for end in ends]
        for suffix in self.suffixes:
            weights = [getattr(packed, f"weight_{part}_{suffix}") for part in ("ih", "hh")]
            biases = [getattr(packed, f"bias_{part}_{suffix}") if packed.bias else None for part in ("ih", "hh")]
            if self.kind == "GRU":
                for part, weight, bias in zip(("ih", "hh"), weights, biases, strict=True):
                    setattr(self, f"{part}_{suffix}", _linear(weight.detach().requires_grad_(True), bias))
                continue
            columns = [*weights, *([biases[0].unsqueeze(1)] if packed.bias else [])]
            setattr(self, suffix, _linear(torch.cat(columns, 1).detach().requires_grad_(True), biases[1]))

    def forward(self, x: Tensor, states: Tensor | tuple[Tensor, ...] | None = None) -> tuple[Tensor, Any]:
        """Outputs and final states."""
        x = x.transpose(0, 1) if self.batch_first else x
        given = (states,) if isinstance(states, Tensor) else states
        if given is None:
            given = (x.new_zeros(len(self.suffixes), x.shape[1], self.size),) * (2 if self.kind == "LSTM" else 1)
        finals, rows = [], []
        for number, suffix in enumerate(self.suffixes):
            state, outputs = tuple(part[number] for part in given), {}
            steps = range(len(x))
            for step in reversed(steps) if suffix.endswith("reverse") else steps:
                state = self._step(suffix, x[step], *state)
                outputs[step] = state[0]
            rows.append(torch.stack([outputs[step] for step in steps]))
            finals.append(state)
            if len(rows) == 1 + self.bidirectional:
                x, rows = torch.cat(rows, 2), []
        final = tuple(torch.stack(part) for part in zip(*finals, strict=True))
        return x.transpose(0, 1) if self.batch_first else x, final if len(final) > 1 else final[0]

    def _step(self, suffix: str, x: Tensor, h: Tensor, *cell: Tensor) -> tuple[Tensor, ...]:
        if self.kind == "GRU":
            inner, outer = getattr(self, f"ih_{suffix}")(x), getattr(self, f"hh_{suffix}")(h)
            (xr, xz, xn), (hr, hz, hn) = inner.chunk(3, 1), outer.chunk(3, 1)
            update = torch.sigmoid(xz + hz)
            return ((1 - update) * torch.tanh(xn + torch.sigmoid(xr + hr) * hn) + update * h,)
        total = getattr(self, suffix)(torch.cat([x, h, *([torch.ones_like(x[:, :1])] if self.bias else [])], 1))
        if self.kind != "LSTM":
            return (torch.relu(total) if self.kind == "RNN_RELU" else torch.tanh(total),)
        i, f, g, o = total.chunk(4, 1)
        c = torch.sigmoid(f) * cell[0] + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c


def separate_recurrences(model: nn.Module) -> nn.Module:
    """A copy of the model with a `SeparateRecurrence` for each recurrent module without ``proj_size``."""
    model = copy.deepcopy(model)
    packed = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.RNNBase)]
    for name, module in packed:
        if not module.proj_size:
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, SeparateRecurrence(module))
    return model


def recurrence_map(block: OracleBlock) -> tuple[str, list[str]] | None:
    """The Linear of a `SeparateRecurrence` that applies the parameters of a block; None for other blocks.

    Returns:
        The name of the Linear, and the parameters of the recurrent module in the order of its inputs.
    """
    owner, _, first = block.parameters[0].rpartition(".")
    kind, _, rest = first.partition("_")
    part, _, suffix = rest.partition("_")
    if kind not in ("weight", "bias") or part not in ("ih", "hh"):
        return None
    parts = [part for part in ("ih", "hh") if any(f"_{part}_" in name for name in block.parameters)]
    name = suffix if len(parts) == 2 else f"{part}_{suffix}"
    return f"{owner}.{name}", [f"{owner}.{kind}_{part}_{suffix}" for kind in ("weight", "bias") for part in parts]


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    linear.weight = nn.Parameter(weight.detach().clone(), weight.requires_grad)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach().clone(), bias.requires_grad)
    return linear


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(mask, -math.inf)
