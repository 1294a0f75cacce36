"""Plain torch models of tokens and time series: recurrent networks, transformers, bags, a GPT with tied weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from experiments.zoo.entry import CLASSES, Entry, normal, pad_tokens, ragged_tokens

VOCABULARY = 60
WIDTH = 8


def _last(states: Tensor, lengths: Tensor) -> Tensor:
    return states[torch.arange(len(states)), lengths - 1]


class Recurrent(nn.Module):
    """A recurrent network over a time series; the last state is classified."""

    def __init__(self, kind: type[nn.RNNBase], **options: object) -> None:
        super().__init__()
        self.rnn = kind(4, 6, batch_first=True, **options)
        width = (options.get("proj_size") or 6) * (2 if options.get("bidirectional") else 1)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


class TimeFirst(nn.Module):
    """An LSTM that gets the time axis first."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(4, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x.transpose(0, 1))[1][0][-1])


class PackedLSTM(nn.Module):
    """A bidirectional LSTM over a PackedSequence of embedded tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.rnn = nn.LSTM(WIDTH, 6, batch_first=True, bidirectional=True)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        lengths = attention_mask.sum(1)
        packed = pack_padded_sequence(self.embed(input_ids), lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.rnn(packed)[1][0].transpose(0, 1).flatten(1))


class PackedLinear(nn.Module):
    """Applies a Linear to the data of a PackedSequence, whose rows belong to examples in no regular order."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.project = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 6)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        lengths = attention_mask.sum(1)
        packed = pack_padded_sequence(self.embed(input_ids), lengths, batch_first=True, enforce_sorted=False)
        packed = packed._replace(data=torch.tanh(self.project(packed.data)))
        states = pad_packed_sequence(packed, batch_first=True)[0]
        return self.head(states.sum(1) / lengths.unsqueeze(1))


class Unpadded(nn.Module):
    """Applies layers to the tokens of all examples in one row, without padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.project = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 6)
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        kept = attention_mask.bool()
        owner = kept.nonzero()[:, 0]
        states = self.norm(torch.tanh(self.project(self.embed(input_ids[kept]))))
        pooled = states.new_zeros(len(input_ids), 6).index_add(0, owner, states)
        return self.head(pooled / kept.sum(1, keepdim=True))


class CellLoop(nn.Module):
    """A loop over a recurrent cell."""

    def __init__(self, kind: type[nn.RNNCellBase]) -> None:
        super().__init__()
        self.cell, self.head = kind(4, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state[0] if isinstance(state, tuple) else state)


class Encoder(nn.Module):
    """``nn.TransformerEncoder`` over embedded tokens, with or without a padding mask."""

    def __init__(self, batch_first: bool, masked: bool, norm_first: bool = False, nested: bool = True) -> None:
        super().__init__()
        self.batch_first, self.masked = batch_first, masked
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.zeros(32, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=batch_first, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.position[: input_ids.shape[1]]
        hidden = None if not self.masked else ~attention_mask.bool()
        x = x if self.batch_first else x.transpose(0, 1)
        x = self.encoder(x, src_key_padding_mask=hidden)
        x = x if self.batch_first else x.transpose(0, 1)
        if not self.masked:
            return self.head(x.mean(1))
        x = x[:, : input_ids.shape[1]]
        weights = attention_mask[:, : x.shape[1], None].to(x)
        return self.head((x * weights).sum(1) / weights.sum(1))


class ScaledInPlace(nn.Module):
    """Attention with the batch second, whose queries are scaled in place, as in Longformer."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(4, 6) for _ in range(3))
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        q, k, v = self.query(x), self.key(x), self.value(x)
        q /= 6**0.5
        weights = torch.einsum("ibd,jbd->bij", q, k).softmax(-1)
        return self.head(torch.einsum("bij,jbd->bd", weights, v) / len(x))


class Seq2Seq(nn.Module):
    """``nn.Transformer`` with a learned query."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.query = nn.Linear(4, WIDTH), nn.Parameter(torch.randn(1, 1, WIDTH))
        self.transformer = nn.Transformer(WIDTH, 2, 1, 1, 16, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.transformer(self.project(x), self.query.expand(len(x), -1, -1))[:, 0])


class TiedGPT(nn.Module):
    """A causal transformer whose output layer is its embedding; the logits are those of three tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(32, WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.output.weight = self.embed.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.position(torch.arange(input_ids.shape[1]))
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        x = x + self.mlp(self.norm2(x))
        return _last(self.output(x), attention_mask.sum(1))[:, :CLASSES]


class Bag(nn.Module):
    """An EmbeddingBag and a perceptron (fastText)."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(VOCABULARY, WIDTH, mode=mode, padding_idx=0)
        self.head = nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, CLASSES))

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.bag(input_ids))


class OffsetBag(nn.Module):
    """An EmbeddingBag that gets all tokens in one row, with offsets."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(VOCABULARY, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        lengths = attention_mask.sum(1)
        offsets = lengths.cumsum(0) - lengths
        return self.head(torch.tanh(self.bag(input_ids[attention_mask.bool()], offsets)))


class TextCNN(nn.Module):
    """Convolutions over embedded tokens with a maximum over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.convs = nn.ModuleList(nn.Conv1d(WIDTH, 5, size) for size in (2, 3))
        self.head = nn.Linear(10, CLASSES)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids).transpose(1, 2)
        return self.head(torch.cat([torch.relu(conv(x)).amax(2) for conv in self.convs], 1))


class Mixer(nn.Module):
    """An MLP-Mixer over a time series: Linear layers on both axes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.channels = nn.Linear(7, 7), nn.Linear(4, 4)
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.tokens(x.transpose(1, 2))).transpose(1, 2)
        return self.head((x + torch.tanh(self.channels(self.norm(x)))).mean(1))


_SERIES: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: Recurrent(nn.LSTM),
    "LSTM, two layers, no bias": lambda: Recurrent(nn.LSTM, num_layers=2, bias=False),
    "LSTM, bidirectional": lambda: Recurrent(nn.LSTM, bidirectional=True),
    "LSTM, projected": lambda: Recurrent(nn.LSTM, proj_size=3),
    "LSTM, time first": TimeFirst,
    "GRU": lambda: Recurrent(nn.GRU),
    "GRU, two layers, bidirectional": lambda: Recurrent(nn.GRU, num_layers=2, bidirectional=True),
    "RNN": lambda: Recurrent(nn.RNN),
    "LSTMCell in a loop": lambda: CellLoop(nn.LSTMCell),
    "GRUCell in a loop": lambda: CellLoop(nn.GRUCell),
    "nn.Transformer": Seq2Seq,
    "attention, scaled in place": ScaledInPlace,
    "MLP-Mixer of a series": Mixer,
}
_TOKENS: dict[str, Callable[[], nn.Module]] = {
    "LSTM, packed, bidirectional": PackedLSTM,
    "Linear on a PackedSequence": PackedLinear,
    "tokens without padding": Unpadded,
    "TransformerEncoder, batch second, padding mask": lambda: Encoder(False, True),
    "TransformerEncoder, batch first, padding mask": lambda: Encoder(True, True),
    "TransformerEncoder, padding mask, no nested tensors": lambda: Encoder(True, True, nested=False),
    "TransformerEncoder, norm first, padding mask": lambda: Encoder(True, True, norm_first=True),
    "GPT, tied weights": TiedGPT,
    "EmbeddingBag with offsets": OffsetBag,
}

ENTRIES = [
    *(Entry(name, "torch", build, normal(7, 4)) for name, build in _SERIES.items()),
    *(Entry(name, "torch", build, ragged_tokens(), pad_tokens) for name, build in _TOKENS.items()),
    Entry("TransformerEncoder, batch second", "torch", lambda: Encoder(False, False), ragged_tokens(12)),
    Entry("TransformerEncoder, batch first", "torch", lambda: Encoder(True, False), ragged_tokens()),
    *(
        Entry(f"EmbeddingBag, {mode}", "torch", lambda mode=mode: Bag(mode), ragged_tokens(mask=False), pad_tokens)
        for mode in ("mean", "sum", "max")
    ),
    Entry("TextCNN", "torch", TextCNN, ragged_tokens(mask=False)),
]
