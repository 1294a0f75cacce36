"""Models to test with, as data: one tiny case for each kind of layer and use, and a few small whole models.

A case says how to make its model and a batch, and what blocks its parameters form. Models are the same at every call,
in eval mode, with random running statistics and affine parameters. Inputs are float32 (or integer, or boolean), so that
a case runs in float32 and float64 on the same values.

To add a layer kind, add a `Case` to `LAYER_CASES`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from transformers.pytorch_utils import Conv1D

from oracles import Inputs, OracleBlock

Batch = Callable[[int, torch.Generator], Inputs]


@dataclass(frozen=True)
class Case:
    """A model, its inputs and the blocks that its parameters form.

    Attributes:
        name: Unique, usable as a pytest id.
        make: Gives a new copy of the model; two calls give equal models.
        batch: From a batch size and a generator, a tensor ``[B, ...]`` or a dict of such for keyword arguments.
        num_classes: Number of logits.
        blocks: The Kronecker blocks of weight layers and the diagonal blocks of norm layers.
        other: Trainable parameters that belong to neither: bare and tied ones, those of layers with their own forward.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: Batch
    num_classes: int
    blocks: tuple[OracleBlock, ...]
    other: tuple[str, ...] = ()

    def sample(self, size: int, seed: int = 0) -> Inputs:
        """A batch of ``size`` examples that depends on the seed alone."""
        return self.batch(size, torch.Generator().manual_seed(seed))

    def __str__(self) -> str:
        """The name, for test ids."""
        return self.name


# Making models -----------------------------------------------------------------------------------------------------


class Apply(nn.Module):
    """A function without parameters as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        """Keeps the function."""
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """The function's value."""
        return self.function(x)


def mean(*dims: int) -> Apply:
    """Mean over the given axes."""
    return Apply(lambda x: x.mean(dims))


def different_columns(x: Tensor) -> Tensor:
    """All but the first column of the first two channels, all but the last of the others."""
    return torch.cat([x[:, :2, :, 1:], x[:, 2:, :, :-1]], 1)


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> Callable[[], nn.Module]:
    """A factory that builds under a seed, in eval mode, with parameters and running statistics off their defaults."""

    def make() -> nn.Module:
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(seed)
            model = build()
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.3 if parameter.dim() < 2 else 0.1)
            for name, buffer in model.named_buffers():
                if name.endswith("running_mean"):
                    buffer.normal_(std=0.5)
                elif name.endswith("running_var"):
                    buffer.uniform_(0.5, 2.0)
        return model.eval()

    return make


def frozen(build: Callable[[], nn.Module], *names: str) -> Callable[[], nn.Module]:
    """A build whose named parameters do not require gradients."""

    def make() -> nn.Module:
        model = build()
        for name in names:
            model.get_parameter(name).requires_grad_(False)
        return model

    return make


def bag_model(mode: str, padding: int | None) -> nn.Module:
    """Bags of tokens reduced by sum, mean or maximum."""
    return nn.Sequential(nn.EmbeddingBag(4, 3, mode=mode, padding_idx=padding), nn.Tanh(), nn.Linear(3, 3))


class WeightedBag(nn.Module):
    """A bag of tokens with a weight per token."""

    def __init__(self) -> None:
        """A table and a head."""
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(4, 3, mode="sum"), nn.Linear(3, 3)

    def forward(self, tokens: Tensor, weights: Tensor) -> Tensor:
        """Logits."""
        return self.head(torch.tanh(self.bag(tokens, per_sample_weights=weights)))


def conv1d_model() -> nn.Module:
    """The linear layer of GPT-2 on tokens, once with one output per input."""
    return nn.Sequential(Conv1D(5, 4), nn.Tanh(), Conv1D(5, 5), mean(1), nn.Linear(5, 3))


# Making batches ----------------------------------------------------------------------------------------------------


def normal(*shape: int) -> Batch:
    """Standard normal ``[B, *shape]``."""
    return lambda size, generator: torch.randn(size, *shape, generator=generator)


def tokens(length: int, vocabulary: int) -> Batch:
    """Uniform token indices ``[B, length]``; repeated ones are certain where ``length > vocabulary``."""
    return lambda size, generator: torch.randint(vocabulary, (size, length), generator=generator)


def fields(**parts: Batch) -> Batch:
    """A dict with a batch of each part."""
    return lambda size, generator: {name: part(size, generator) for name, part in parts.items()}


def padding(length: int) -> Batch:
    """Boolean ``[B, length]``, true after a random number of at least one valid positions."""

    def batch(size: int, generator: torch.Generator) -> Tensor:
        lengths = torch.randint(1, length + 1, (size, 1), generator=generator)
        return torch.arange(length) >= lengths

    return batch


def lengths(longest: int) -> Batch:
    """Lengths ``[B]`` from 1 to ``longest``."""
    return lambda size, generator: torch.randint(1, longest + 1, (size,), generator=generator)


def text(length: int, vocabulary: int) -> Batch:
    """``input_ids`` ``[B, length]`` that end in padding index 0, and their ``attention_mask``."""

    def batch(size: int, generator: torch.Generator) -> dict[str, Tensor]:
        valid = ~padding(length)(size, generator)
        ids = torch.randint(1, vocabulary, (size, length), generator=generator)
        return {"input_ids": ids * valid, "attention_mask": valid.long()}

    return batch


# Naming blocks -----------------------------------------------------------------------------------------------------


def weight(name: str, *, bias: bool = True, groups: int = 1) -> OracleBlock:
    """Block of a Linear or convolution."""
    return OracleBlock("kronecker", (f"{name}.weight", f"{name}.bias")[: 1 + bias], groups=groups)


def table(name: str) -> OracleBlock:
    """Block of an Embedding."""
    return OracleBlock("kronecker", (f"{name}.weight",), transposed=True)


def norm(name: str, *, bias: bool = True) -> OracleBlock:
    """Block of a norm layer."""
    return OracleBlock("diagonal", (f"{name}.weight", f"{name}.bias")[: 1 + bias])


def attention(name: str, width: int, *, bias: bool = True, separate: bool = False) -> tuple[OracleBlock, ...]:
    """Blocks of the query, key, value and output projections of an `nn.MultiheadAttention`."""
    weights = [f"{name}.{part}_proj_weight" for part in "qkv"] if separate else [f"{name}.in_proj_weight"] * 3
    rows = [slice(i * width, (i + 1) * width) for i in range(3)]
    biases = (f"{name}.in_proj_bias",) if bias else ()
    inner = (OracleBlock("kronecker", (w, *biases), rows=r) for w, r in zip(weights, rows, strict=True))
    return (*inner, weight(f"{name}.out_proj", bias=bias))


def recurrence(name: str, *, bias: bool = True, joint: bool = True) -> tuple[OracleBlock, ...]:
    """Blocks of one layer and direction of a recurrent module; ``name`` ends in ``l0`` or the like.

    The projections of an LSTM and an RNN are ``joint``. Those of a GRU have different output gradients.
    """
    owner, _, suffix = name.rpartition(".")
    kinds = ("weight", "bias")[: 1 + bias]
    parts = (("ih", "hh"),) if joint else (("ih",), ("hh",))
    return tuple(
        OracleBlock("kronecker", tuple(f"{owner}.{kind}_{part}_{suffix}" for kind in kinds for part in joined))
        for joined in parts
    )


def encoder_layer(name: str, width: int) -> tuple[OracleBlock, ...]:
    """Blocks of an `nn.TransformerEncoderLayer`; ``name`` ends in a dot, or is empty."""
    linear = [weight(f"{name}linear{i}") for i in (1, 2)]
    return (*attention(f"{name}self_attn", width), *linear, *(norm(f"{name}norm{i}") for i in (1, 2)))


# Models that are not a stack ---------------------------------------------------------------------------------------


class SequenceFirst(nn.Module):
    """Linear on ``[T, B, F]`` inside, batch first outside."""

    def __init__(self) -> None:
        """Makes the layers."""
        super().__init__()
        self.fc = nn.Linear(4, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Logits from ``[B, T, 4]``."""
        return self.head(torch.tanh(self.fc(x.transpose(0, 1))).mean(0))


class Folded(nn.Module):
    """A layer that sees the positions of an example as rows of a larger batch."""

    def __init__(self, layer: nn.Module, features: int, used: slice = slice(None)) -> None:
        """Makes the head for a layer with the given number of outputs; ``used`` are the pixels that it reads."""
        super().__init__()
        self.layer = layer
        self.head = nn.Linear(features, 3)
        self.used = used

    def forward(self, x: Tensor) -> Tensor:
        """Logits from ``[B, T, ...]``."""
        h = torch.tanh(self.layer(x.flatten(0, 1)))
        return self.head(h.reshape(*x.shape[:2], h.shape[1], -1)[..., self.used].mean((1, 3)))


class Positions(nn.Module):
    """Token embedding plus a position embedding that is looked up once for the batch."""

    def __init__(self, leading: bool) -> None:
        """The index of the positions is ``[1, T]`` if ``leading``, else ``[T]``."""
        super().__init__()
        self.token = nn.Embedding(4, 3)
        self.position = nn.Embedding(7, 3)
        self.head = nn.Linear(3, 3)
        self.leading = leading

    def forward(self, x: Tensor) -> Tensor:
        """Logits from indices ``[B, T]``."""
        index = torch.arange(x.shape[1], device=x.device)
        position = self.position(index.unsqueeze(0) if self.leading else index)
        return self.head(torch.tanh(self.token(x) + position).mean(1))


class Attention(nn.Module):
    """One `nn.MultiheadAttention` of width 4 with two heads between the input and the head."""

    def __init__(self, *, causal: bool = False, weights: bool = False, **options: Any) -> None:
        """``causal`` masks later positions, ``weights`` asks for attention weights, the rest is the module's."""
        super().__init__()
        self.attn = nn.MultiheadAttention(4, 2, **options)
        self.head = nn.Linear(4, 3)
        self.causal = causal
        self.weights = weights

    def forward(
        self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None, padding: Tensor | None = None
    ) -> Tensor:
        """Logits from ``[B, T, F]`` each; the key defaults to the query, the value to the key."""
        if not self.attn.batch_first:
            query, key, value = (None if x is None else x.transpose(0, 1) for x in (query, key, value))
        key = query if key is None else key
        value = key if value is None else value
        positions = 1 if self.attn.batch_first else 0
        mask = None
        if self.causal:
            shape = (query.shape[positions], key.shape[positions])
            mask = torch.ones(shape, dtype=torch.bool, device=query.device).triu(1)
        output, _ = self.attn(query, key, value, key_padding_mask=padding, attn_mask=mask, need_weights=self.weights)
        return self.head(torch.tanh(output).mean(positions))


class Twice(nn.Module):
    """A layer that is used twice, with something between the uses."""

    def __init__(self, layer: nn.Module, between: nn.Module, head: nn.Module) -> None:
        """Keeps the parts."""
        super().__init__()
        self.layer = layer
        self.between = between
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        """``head(tanh(layer(between(layer(x)))))``."""
        return self.head(torch.tanh(self.layer(self.between(self.layer(x)))))


class PlainLinear(nn.Linear):
    """A Linear by another name."""


class Counting(nn.Module):
    """Counts its calls and examples in buffers: in place, and by a new tensor."""

    def __init__(self) -> None:
        """Two layers, a parameter without a rule and the counters."""
        super().__init__()
        self.first, self.scale, self.head = nn.Linear(4, 5), nn.Parameter(torch.ones(5)), nn.Linear(5, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("examples", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        self.calls += 1
        self.examples = self.examples + len(x)
        return self.head(torch.tanh(self.first(x)) * self.scale)


class Tied(nn.Module):
    """Two Linear that share a weight, each with its own bias."""

    def __init__(self) -> None:
        """Makes the layers and ties them."""
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Logits from ``[B, 4]``."""
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


class VisionTransformer(nn.Module):
    """Patches, a class token, positions, attention and MLP with layer scale, and a head on the class token."""

    def __init__(self, size: int = 4, channels: int = 1, width: int = 4, classes: int = 3) -> None:
        """For square images of ``size`` pixels, in patches of two."""
        super().__init__()
        self.patch = nn.Conv2d(channels, width, 2, stride=2)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.zeros(1, (size // 2) ** 2 + 1, width))
        self.norm1 = nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, 2, batch_first=True)
        self.scale1 = nn.Parameter(torch.ones(width))
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.scale2 = nn.Parameter(torch.ones(width))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits from ``[B, channels, size, size]``."""
        h = self.patch(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.token.expand(len(h), -1, -1), h], dim=1) + self.position
        normed = self.norm1(h)
        h = h + self.scale1 * self.attn(normed, normed, normed, need_weights=False)[0]
        h = h + self.scale2 * self.mlp(self.norm2(h))
        return self.head(h[:, 0])


class Recurrent(nn.Module):
    """A recurrent module with three inputs and four units, and a head on its last output."""

    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM, **options: Any) -> None:
        """Makes the layers; the options are the module's."""
        super().__init__()
        self.rnn = kind(3, 4, batch_first=True, **options)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Logits from ``[B, T, 3]``."""
        return self.head(self.rnn(x)[0][:, -1])


class FullyRead(nn.Module):
    """A recurrent module, and a head on everything that it returns: all outputs and all final states."""

    def __init__(self, kind: type[nn.RNNBase], *, learned: bool = False, **options: Any) -> None:
        """``learned`` makes the initial states parameters; the other options are the module's."""
        super().__init__()
        self.rnn = kind(3, 4, **options)
        rows = self.rnn.num_layers * (1 + self.rnn.bidirectional)
        states = 2 if kind is nn.LSTM else 1
        size = 4 * (1 + self.rnn.bidirectional + rows * states)
        self.initial = nn.ParameterList(nn.Parameter(torch.zeros(rows, 1, 4)) for _ in range(states if learned else 0))
        self.head = nn.Linear(size, 3)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Logits from ``[B, T, 3]``, packed if there are lengths ``[B]``."""
        states = [state.expand(-1, len(x), -1).contiguous() for state in self.initial] or None
        if isinstance(states, list):
            states = tuple(states) if len(states) > 1 else states[0]
        time = 1 if self.rnn.batch_first else 0
        sequences = x if time == 1 else x.transpose(0, 1)
        if lengths is not None:
            sequences = pack_padded_sequence(sequences, lengths.cpu(), time == 1, enforce_sorted=False)
        outputs, final = self.rnn(sequences, states)
        if lengths is not None:
            outputs = pad_packed_sequence(outputs, time == 1)[0]
        read = [torch.tanh(outputs).sum(time)]
        read += [state.transpose(0, 1).flatten(1) for state in (final if isinstance(final, tuple) else (final,))]
        return self.head(torch.cat(read, 1))


def weight_normalised() -> nn.Module:
    """A Linear whose weight is computed from a length and a direction."""
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 5))
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(5, 3))


def bert() -> nn.Module:
    """BERT for sequence classification, from a tiny configuration and without a download."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.BertConfig(
        vocab_size=12,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=12,
        max_position_embeddings=8,
        type_vocab_size=2,
        num_labels=3,
        initializer_range=0.4,
    )
    return transformers.BertForSequenceClassification(config)


def bert_blocks() -> tuple[OracleBlock, ...]:
    """Blocks of `bert`."""
    tables = [table(f"bert.embeddings.{kind}_embeddings") for kind in ("word", "position", "token_type")]
    blocks = [*tables, norm("bert.embeddings.LayerNorm")]
    for i in range(2):
        layer = f"bert.encoder.layer.{i}"
        blocks += [weight(f"{layer}.attention.self.{part}") for part in ("query", "key", "value")]
        blocks += [weight(f"{layer}.attention.output.dense"), norm(f"{layer}.attention.output.LayerNorm")]
        blocks += [weight(f"{layer}.intermediate.dense"), weight(f"{layer}.output.dense")]
        blocks += [norm(f"{layer}.output.LayerNorm")]
    return (*blocks, weight("bert.pooler.dense"), weight("classifier"))


def lenet() -> nn.Module:
    """Two convolutions with BatchNorm and pooling, two Linear; images of 8 by 8."""
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        *(nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.AvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(24, 8), nn.ReLU(inplace=True), nn.Linear(8, 4)),
    )


# Families of cases -------------------------------------------------------------------------------------------------


def layer_case(
    name: str,
    layer: Callable[[], nn.Module],
    shape: tuple[int, ...],
    features: int,
    block: OracleBlock | None,
    *,
    activation: Callable[[], nn.Module] = nn.Tanh,
    pool: tuple[int, ...] = (),
    other: tuple[str, ...] = (),
    freeze: tuple[str, ...] = (),
) -> Case:
    """Layer ``0``, activation, mean over ``pool``, and Linear ``3`` from ``features`` to three classes."""

    def build() -> nn.Module:
        return nn.Sequential(layer(), activation(), mean(*pool) if pool else nn.Identity(), nn.Linear(features, 3))

    blocks = (weight("3"),) if block is None else (block, weight("3"))
    return Case(name, seeded(frozen(build, *freeze)), normal(*shape), 3, blocks, other)


def conv_case(name: str, layer: Callable[[], nn.Module], *shape: int, groups: int = 1, bias: bool = True) -> Case:
    """Convolution ``0``, tanh, and Linear ``3`` from all pixels to three classes."""

    def build() -> nn.Module:
        convolution = layer()
        features = convolution(torch.zeros(1, *shape)).numel()
        return nn.Sequential(convolution, nn.Tanh(), nn.Flatten(), nn.Linear(features, 3))

    return Case(name, seeded(build), normal(*shape), 3, (weight("0", bias=bias, groups=groups), weight("3")))


def norm_case(name: str, layer: Callable[[], nn.Module], *shape: int, features_last: bool, bias: bool = True) -> Case:
    """A norm layer ``0`` and the mean over positions."""
    positions = len(shape) - 1
    pool = tuple(range(1, 1 + positions)) if features_last else tuple(range(2, 2 + positions))
    features = shape[-1] if features_last else shape[0]
    return layer_case(name, layer, shape, features, norm("0", bias=bias), pool=pool)


def attention_case(
    name: str,
    batch: Batch,
    *,
    separate: bool = False,
    bias: bool = True,
    other: tuple[str, ...] = (),
    **options: Any,
) -> Case:
    """`Attention` with the given options."""
    blocks = (*attention("attn", 4, bias=bias, separate=separate), weight("head"))
    return Case(name, seeded(partial(Attention, bias=bias, **options)), batch, 3, blocks, other)


def transposed_case(name: str, layer: Callable[[], nn.Module], *shape: int, groups: int = 1, bias: bool = True) -> Case:
    """Transposed convolution ``0``, tanh, and Linear ``3`` from all pixels to three classes."""
    case = conv_case(name, layer, *shape, groups=groups, bias=bias)
    return replace(case, blocks=(replace(case.blocks[0], transposed=True), case.blocks[1]))


def recurrent_case(
    name: str,
    kind: type[nn.RNNBase],
    batch: Batch,
    suffixes: tuple[str, ...] = ("l0",),
    *,
    other: tuple[str, ...] = (),
    **options: Any,
) -> Case:
    """`FullyRead` with the given options; ``suffixes`` are those of its parameters."""
    bias, joint = options.get("bias", True), kind is not nn.GRU
    blocks = [block for suffix in suffixes for block in recurrence(f"rnn.{suffix}", bias=bias, joint=joint)]
    make = seeded(partial(FullyRead, kind, **options))
    return Case(name, make, batch, 3, (*blocks, weight("head")), other)


LINEAR_CASES = [
    layer_case("linear", lambda: nn.Linear(4, 5), (4,), 5, weight("0")),
    layer_case("linear_no_bias", lambda: nn.Linear(4, 5, bias=False), (4,), 5, weight("0", bias=False)),
    layer_case("linear_tokens", lambda: nn.Linear(4, 5), (6, 4), 5, weight("0"), pool=(1,)),
    layer_case("linear_grid", lambda: nn.Linear(4, 5), (2, 3, 4), 5, weight("0"), pool=(1, 2)),
    Case(
        "transformers_conv1d",
        seeded(conv1d_model),
        normal(6, 4),
        3,
        (*(replace(weight(name), transposed=True) for name in ("0", "2")), weight("4")),
    ),
    Case("linear_sequence_first", seeded(SequenceFirst), normal(6, 4), 3, (weight("fc"), weight("head"))),
    Case(
        "linear_folded",
        seeded(lambda: Folded(nn.Linear(4, 5), 5)),
        normal(6, 4),
        3,
        (weight("layer"), weight("head")),
    ),
]

CONV_CASES = [
    conv_case("conv1d", lambda: nn.Conv1d(2, 4, 3), 2, 6),
    conv_case("conv2d", lambda: nn.Conv2d(2, 4, 3), 2, 5, 4),
    conv_case("conv3d", lambda: nn.Conv3d(2, 3, 2), 2, 3, 3, 2),
    conv_case("conv2d_pointwise", lambda: nn.Conv2d(3, 4, 1), 3, 2, 3),
    conv_case("conv2d_rectangular", lambda: nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=(0, 2)), 2, 5, 3),
    conv_case("conv2d_stride", lambda: nn.Conv2d(2, 4, 3, stride=2, padding=1), 2, 6, 5),
    conv_case("conv2d_stride_leaves_pixels", lambda: nn.Conv2d(2, 4, 2, stride=3), 2, 6, 7),
    conv_case("conv2d_dilation", lambda: nn.Conv2d(2, 4, 2, dilation=(2, 3), padding=1), 2, 4, 5),
    conv_case("conv2d_groups", lambda: nn.Conv2d(4, 6, 2, groups=2), 4, 3, 3, groups=2),
    conv_case("conv1d_groups", lambda: nn.Conv1d(4, 6, 3, groups=2, padding=1, stride=2), 4, 5, groups=2),
    conv_case("conv2d_depthwise", lambda: nn.Conv2d(3, 3, 3, padding=1, groups=3), 3, 3, 4, groups=3),
    conv_case("conv2d_depthwise_multiplied", lambda: nn.Conv2d(3, 6, 2, groups=3), 3, 3, 3, groups=3),
    conv_case("conv2d_no_bias", lambda: nn.Conv2d(2, 4, 3, bias=False), 2, 4, 4, bias=False),
    conv_case("conv1d_same_odd", lambda: nn.Conv1d(2, 4, 3, padding="same"), 2, 5),
    conv_case("conv1d_same_even", lambda: nn.Conv1d(2, 4, 4, padding="same"), 2, 5),
    conv_case("conv2d_same_odd", lambda: nn.Conv2d(2, 4, 3, padding="same", dilation=2), 2, 4, 3),
    conv_case("conv2d_same_even", lambda: nn.Conv2d(2, 4, (2, 4), padding="same"), 2, 4, 3),
    conv_case("conv2d_valid", lambda: nn.Conv2d(2, 4, 2, padding="valid"), 2, 3, 3),
    *(
        conv_case(f"conv2d_{mode}", partial(nn.Conv2d, 2, 4, 3, padding=(1, 2), padding_mode=mode), 2, 3, 4)
        for mode in ("zeros", "reflect", "replicate", "circular")
    ),
    conv_case(
        "conv2d_same_even_reflect", lambda: nn.Conv2d(2, 4, (2, 3), padding="same", padding_mode="reflect"), 2, 3, 4
    ),
    conv_case("conv1d_circular", lambda: nn.Conv1d(2, 4, 3, padding=1, padding_mode="circular"), 2, 5),
    conv_case("conv3d_replicate", lambda: nn.Conv3d(1, 3, 2, padding=1, padding_mode="replicate"), 1, 3, 2, 2),
    Case(
        "conv2d_folded",
        seeded(lambda: Folded(nn.Conv2d(2, 4, 2), 4)),
        normal(3, 2, 3, 3),
        3,
        (weight("layer"), weight("head")),
    ),
    Case(
        "conv2d_folded_unused",
        seeded(lambda: Folded(nn.Conv2d(2, 4, 2), 4, slice(3))),
        normal(3, 2, 3, 4),
        3,
        (weight("layer"), weight("head")),
    ),
    Case(
        "conv2d_groups_unused",
        seeded(
            lambda: nn.Sequential(
                nn.Conv2d(4, 4, 2, groups=2), nn.Tanh(), Apply(different_columns), nn.Flatten(), nn.Linear(24, 3)
            )
        ),
        normal(4, 4, 4),
        3,
        (weight("0", groups=2), weight("4")),
    ),
]

TRANSPOSED_CASES = [
    transposed_case("conv_transpose1d", lambda: nn.ConvTranspose1d(2, 4, 3), 2, 4),
    transposed_case("conv_transpose2d", lambda: nn.ConvTranspose2d(2, 4, 3), 2, 3, 2),
    transposed_case("conv_transpose3d", lambda: nn.ConvTranspose3d(2, 3, 2, stride=2), 2, 2, 1, 2),
    transposed_case("conv_transpose2d_stride", lambda: nn.ConvTranspose2d(2, 3, 2, stride=(2, 3)), 2, 2, 3),
    transposed_case("conv_transpose2d_padding", lambda: nn.ConvTranspose2d(2, 3, 3, stride=2, padding=(1, 2)), 2, 3, 3),
    transposed_case("conv_transpose2d_crops", lambda: nn.ConvTranspose2d(2, 3, 2, stride=2, padding=2), 2, 4, 4),
    transposed_case(
        "conv_transpose2d_output_padding",
        lambda: nn.ConvTranspose2d(2, 3, (2, 3), stride=(3, 2), padding=1, output_padding=(2, 1)),
        *(2, 2, 3),
    ),
    transposed_case(
        "conv_transpose1d_dilation", lambda: nn.ConvTranspose1d(2, 3, 3, stride=2, dilation=3, output_padding=2), 2, 3
    ),
    transposed_case("conv_transpose2d_groups", lambda: nn.ConvTranspose2d(4, 6, 2, groups=2), 4, 2, 3, groups=2),
    transposed_case("conv_transpose2d_depthwise", lambda: nn.ConvTranspose2d(3, 3, 2, groups=3), 3, 2, 2, groups=3),
    transposed_case("conv_transpose2d_no_bias", lambda: nn.ConvTranspose2d(2, 3, 2, bias=False), 2, 2, 2, bias=False),
    Case(
        "conv_transpose2d_frozen_weight",
        seeded(
            frozen(
                lambda: nn.Sequential(nn.ConvTranspose2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(27, 3)),
                "0.weight",
            )
        ),
        normal(2, 2, 2),
        3,
        (OracleBlock("kronecker", ("0.bias",)), weight("3")),
    ),
    Case(
        "conv_transpose2d_folded",
        seeded(lambda: Folded(nn.ConvTranspose2d(2, 4, 2), 4)),
        normal(3, 2, 3, 3),
        3,
        (replace(weight("layer"), transposed=True), weight("head")),
    ),
]

_BOTH_LAYERS = ("l0", "l0_reverse", "l1", "l1_reverse")

RECURRENT_CASES = [
    Case("lstm", seeded(Recurrent), normal(5, 3), 3, (*recurrence("rnn.l0"), weight("head"))),
    Case(
        "lstm_frozen",
        seeded(frozen(Recurrent, "rnn.weight_ih_l0", "rnn.bias_hh_l0")),
        normal(5, 3),
        3,
        (OracleBlock("kronecker", ("rnn.weight_hh_l0", "rnn.bias_ih_l0")), weight("head")),
    ),
    Case(
        "lstm_frozen_weights",
        seeded(frozen(Recurrent, "rnn.weight_ih_l0", "rnn.weight_hh_l0")),
        normal(5, 3),
        3,
        (OracleBlock("kronecker", ("rnn.bias_ih_l0", "rnn.bias_hh_l0")), weight("head")),
    ),
    Case(
        "gru_frozen",
        seeded(frozen(partial(Recurrent, nn.GRU), "rnn.weight_hh_l0", "rnn.bias_ih_l0")),
        normal(5, 3),
        3,
        (*(OracleBlock("kronecker", (f"rnn.{name}_l0",)) for name in ("weight_ih", "bias_hh")), weight("head")),
    ),
    *(
        case
        for kind, name in ((nn.LSTM, "lstm"), (nn.GRU, "gru"), (nn.RNN, "rnn"))
        for case in (
            recurrent_case(f"{name}_sequence_first", kind, normal(4, 3)),
            recurrent_case(f"{name}_no_bias", kind, normal(4, 3), bias=False, batch_first=True),
            recurrent_case(
                f"{name}_two_layers", kind, normal(4, 3), ("l0", "l1"), num_layers=2, dropout=0.5, batch_first=True
            ),
            recurrent_case(
                f"{name}_both_directions", kind, normal(4, 3), _BOTH_LAYERS, num_layers=2, bidirectional=True
            ),
            recurrent_case(
                f"{name}_initial_states",
                kind,
                normal(4, 3),
                ("l0", "l0_reverse"),
                learned=True,
                bidirectional=True,
                batch_first=True,
                other=("initial.0", "initial.1")[: 1 + (kind is nn.LSTM)],
            ),
        )
    ),
    recurrent_case("rnn_relu", nn.RNN, normal(4, 3), nonlinearity="relu", batch_first=True),
]

#: Sequences of different lengths. Covariances of the first pass depend on the padding of the batch.
PACKED_CASES = [
    recurrent_case(f"{name}_packed{title}", kind, fields(x=normal(5, 3), lengths=lengths(5)), suffixes, **options)
    for kind, name in ((nn.LSTM, "lstm"), (nn.GRU, "gru"), (nn.RNN, "rnn"))
    for title, suffixes, options in (
        ("", ("l0",), {"batch_first": True}),
        ("_both_directions", _BOTH_LAYERS, {"num_layers": 2, "bidirectional": True}),
    )
]

NORM_CASES = [
    norm_case("batchnorm1d", lambda: nn.BatchNorm1d(4), 4, features_last=False),
    norm_case("batchnorm1d_positions", lambda: nn.BatchNorm1d(4), 4, 5, features_last=False),
    norm_case("batchnorm2d", lambda: nn.BatchNorm2d(4), 4, 3, 2, features_last=False),
    norm_case("batchnorm3d", lambda: nn.BatchNorm3d(4), 4, 2, 3, 2, features_last=False),
    norm_case("layernorm", lambda: nn.LayerNorm(4), 5, 4, features_last=True),
    norm_case("layernorm_vector", lambda: nn.LayerNorm(4), 4, features_last=True),
    norm_case("layernorm_two_axes", lambda: nn.LayerNorm((5, 4)), 5, 4, features_last=True),
    norm_case("layernorm_no_bias", lambda: nn.LayerNorm(4, bias=False), 5, 4, features_last=True, bias=False),
    norm_case("groupnorm", lambda: nn.GroupNorm(2, 4), 4, 3, 2, features_last=False),
    norm_case("instancenorm1d", lambda: nn.InstanceNorm1d(4, affine=True), 4, 5, features_last=False),
    norm_case(
        "instancenorm1d_running",
        lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
        *(4, 5),
        features_last=False,
    ),
    norm_case("instancenorm2d", lambda: nn.InstanceNorm2d(4, affine=True), 4, 3, 2, features_last=False),
    norm_case(
        "instancenorm2d_running",
        lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
        *(4, 3, 2),
        features_last=False,
    ),
    norm_case("rmsnorm", lambda: nn.RMSNorm(4, eps=1e-5), 5, 4, features_last=True, bias=False),
]

EMBEDDING_CASES = [
    Case(
        "embedding",
        seeded(lambda: nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4), nn.Tanh(), mean(1), nn.Linear(4, 3))),
        tokens(6, 4),
        3,
        (table("0"), weight("1"), weight("4")),
    ),
    Case(
        "embedding_padding",
        seeded(
            lambda: nn.Sequential(
                nn.Embedding(4, 3, padding_idx=1), nn.Linear(3, 4), nn.Tanh(), mean(1), nn.Linear(4, 3)
            )
        ),
        tokens(6, 4),
        3,
        (table("0"), weight("1"), weight("4")),
    ),
    *(
        Case(
            name,
            seeded(partial(Positions, leading)),
            tokens(5, 4),
            3,
            (table("token"), *([table("position")] if leading else []), weight("head")),
            () if leading else ("position.weight",),
        )
        for name, leading in (("embedding_positions_leading", True), ("embedding_positions_flat", False))
    ),
    *(
        Case(
            f"embedding_bag_{mode}{'_padding' if padded is not None else ''}",
            seeded(partial(bag_model, mode, padded)),
            tokens(6, 4),
            3,
            (table("0"), weight("2")),
        )
        for mode in ("sum", "mean", "max")
        for padded in (None, 1)
    ),
    Case(
        "embedding_bag_weights",
        seeded(WeightedBag),
        fields(tokens=tokens(6, 4), weights=normal(6)),
        3,
        (table("bag"), weight("head")),
    ),
]

ATTENTION_CASES = [
    attention_case("attention", normal(5, 4)),
    attention_case("attention_batch_first", normal(5, 4), batch_first=True),
    attention_case("attention_weights", normal(5, 4), batch_first=True, weights=True),
    attention_case("attention_memory", fields(query=normal(3, 4), key=normal(5, 4)), batch_first=True),
    attention_case("attention_three_inputs", fields(query=normal(3, 4), key=normal(5, 4), value=normal(5, 4))),
    attention_case(
        "attention_cross",
        fields(query=normal(3, 4), key=normal(5, 3), value=normal(5, 2)),
        separate=True,
        kdim=3,
        vdim=2,
    ),
    attention_case(
        "attention_cross_batch_first",
        fields(query=normal(3, 4), key=normal(5, 3), value=normal(5, 2)),
        separate=True,
        kdim=3,
        vdim=2,
        batch_first=True,
    ),
    attention_case("attention_padding", fields(query=normal(5, 4), padding=padding(5)), batch_first=True),
    attention_case("attention_padding_sequence_first", fields(query=normal(5, 4), padding=padding(5))),
    attention_case("attention_causal", normal(5, 4), causal=True, batch_first=True),
    attention_case(
        "attention_causal_padding", fields(query=normal(5, 4), padding=padding(5)), causal=True, batch_first=True
    ),
    attention_case("attention_no_bias", normal(5, 4), bias=False),
    attention_case("attention_bias_kv", normal(5, 4), add_bias_kv=True, other=("attn.bias_k", "attn.bias_v")),
    attention_case("attention_zero", normal(5, 4), add_zero_attn=True, batch_first=True),
    *(
        Case(
            name,
            seeded(
                lambda first=first: nn.Sequential(
                    nn.TransformerEncoderLayer(4, 2, 6, batch_first=True, norm_first=first), mean(1), nn.Linear(4, 3)
                )
            ),
            normal(5, 4),
            3,
            (*encoder_layer("0.", 4), weight("2")),
        )
        for name, first in (("encoder_layer", False), ("encoder_layer_norm_first", True))
    ),
]

USE_CASES = [
    Case(
        "linear_twice",
        seeded(lambda: Twice(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))),
        normal(4),
        3,
        (weight("layer"), weight("head")),
    ),
    Case(
        "conv_twice",
        seeded(
            lambda: Twice(nn.Conv2d(2, 2, 2, stride=2), nn.Tanh(), nn.Sequential(nn.Flatten(), nn.Linear(2 * 2, 3)))
        ),
        normal(2, 4, 8),
        3,
        (weight("layer"), weight("head.1")),
    ),
    Case(
        "conv_twice_unused",
        seeded(
            lambda: Twice(
                nn.Conv1d(2, 2, 2),
                Apply(lambda x: torch.tanh(x)[..., 2:]),
                nn.Sequential(nn.Flatten(), nn.Linear(6, 3)),
            )
        ),
        normal(2, 7),
        3,
        (weight("layer"), weight("head.1")),
    ),
    Case(
        "norm_twice",
        seeded(lambda: Twice(nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 3))),
        normal(4),
        3,
        (norm("layer"), weight("head")),
    ),
    layer_case(
        "relu_inplace_conv",
        lambda: nn.Conv2d(2, 4, 2),
        (2, 4, 4),
        4,
        weight("0"),
        activation=partial(nn.ReLU, inplace=True),
        pool=(2, 3),
    ),
    layer_case(
        "relu_inplace_linear", lambda: nn.Linear(4, 6), (4,), 6, weight("0"), activation=partial(nn.ReLU, inplace=True)
    ),
    layer_case(
        "relu_inplace_batchnorm",
        lambda: nn.BatchNorm2d(4),
        (4, 3, 3),
        4,
        norm("0"),
        activation=partial(nn.ReLU, inplace=True),
        pool=(2, 3),
    ),
    layer_case("linear_subclass", lambda: PlainLinear(4, 5), (4,), 5, weight("0")),
    layer_case("frozen_layer", lambda: nn.Linear(4, 5), (4,), 5, None, freeze=("0.weight", "0.bias")),
    layer_case(
        "frozen_weight",
        lambda: nn.Linear(4, 5),
        (4,),
        5,
        OracleBlock("kronecker", ("0.bias",)),
        freeze=("0.weight",),
    ),
    layer_case("frozen_bias", lambda: nn.Linear(4, 5), (4,), 5, weight("0", bias=False), freeze=("0.bias",)),
    Case("counting", seeded(Counting), normal(4), 3, (weight("first"), weight("head")), ("scale",)),
    Case("tied", seeded(Tied), normal(4), 3, (weight("head"),), ("first.weight", "first.bias", "second.bias")),
    Case(
        "class_token",
        seeded(VisionTransformer),
        normal(1, 4, 4),
        3,
        (
            weight("patch"),
            *attention("attn", 4),
            *(weight("mlp.0"), weight("mlp.2"), weight("head"), norm("norm1"), norm("norm2")),
        ),
        ("token", "position", "scale1", "scale2"),
    ),
]

#: A layer with an effective weight. Its blocks are not those of single parameters, so it is in no list.
WEIGHT_NORM = Case(
    "weight_norm",
    seeded(weight_normalised),
    normal(4),
    3,
    (OracleBlock("kronecker", ("0.bias",)), weight("2")),
    ("0.parametrizations.weight.original0", "0.parametrizations.weight.original1"),
)

LAYER_CASES: list[Case] = [
    *LINEAR_CASES,
    *CONV_CASES,
    *TRANSPOSED_CASES,
    *RECURRENT_CASES,
    *NORM_CASES,
    *EMBEDDING_CASES,
    *ATTENTION_CASES,
    *USE_CASES,
]

MODEL_CASES: list[Case] = [
    Case(
        "lenet",
        seeded(lenet),
        normal(1, 8, 8),
        4,
        (weight("0", bias=False), norm("1"), weight("4"), norm("5"), weight("9"), weight("11")),
    ),
    Case(
        "vision_transformer",
        seeded(partial(VisionTransformer, size=6, channels=2, width=6, classes=4)),
        normal(2, 6, 6),
        4,
        (
            weight("patch"),
            *attention("attn", 6),
            *(weight("mlp.0"), weight("mlp.2"), weight("head"), norm("norm1"), norm("norm2")),
        ),
        ("token", "position", "scale1", "scale2"),
    ),
    Case("bert", seeded(bert), text(6, 12), 3, bert_blocks()),
]

_REPRESENTATIVE = (
    "linear",
    "linear_tokens",
    "linear_sequence_first",
    "conv2d",
    "conv2d_groups",
    "conv2d_depthwise",
    "conv1d_same_even",
    "conv2d_reflect",
    "conv_transpose2d_output_padding",
    "lstm_both_directions",
    "gru_initial_states",
    "batchnorm2d",
    "layernorm",
    "embedding_padding",
    "attention_padding",
    "linear_twice",
    "frozen_weight",
    "tied",
    "lenet",
    "bert",
)

#: All cases by name.
CASES = {case.name: case for case in [*LAYER_CASES, *MODEL_CASES]}

#: One case for each block kind, kernel, layout and way of use.
REPRESENTATIVE_CASES = [case for case in CASES.values() if case.name in _REPRESENTATIVE]

#: One case for each block kind.
FEW_CASES = [
    CASES[name]
    for name in ("linear", "linear_tokens", "conv2d_groups", "batchnorm2d", "embedding_padding", "attention", "tied")
]

#: One case for each place of the batch axis, each block kind and each way of use.
BATCH_CASES = [
    CASES[name]
    for name in (
        *("linear_tokens", "linear_sequence_first", "linear_folded", "conv2d_groups", "conv2d_folded", "batchnorm2d"),
        *("layernorm_two_axes", "embedding_padding", "embedding_positions_leading", "embedding_positions_flat"),
        *("attention", "attention_causal_padding", "linear_twice", "tied", "lstm", "lenet", "vision_transformer"),
        "bert",
    )
]
