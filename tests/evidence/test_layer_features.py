"""Features of every kind of layer against plain forward hooks and loops, and their standardisation."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from cases import Twice, bert, lenet, seeded, text
from ifcomp.data.batches import as_batches
from ifcomp.evidence.features import INPUT, MAX_LAYERS, TOKENS, FeatureReader, RawFeatures, all_trainable
from ifcomp.layers.inventory import take_inventory
from ifcomp.layers.registry import Selection
from ifcomp.layers.verification import verified_recorder

Batches = Sequence[Any]


def reader_of(model: nn.Module, batches: Batches) -> FeatureReader:
    with all_trainable(model):
        first = next(as_batches(batches))
        inventory = take_inventory(model, Selection(skip_uncovered=True))
        return FeatureReader(verified_recorder(model, inventory, first), first)


def read(model: nn.Module, batches: Batches) -> tuple[dict[str, np.ndarray], list[RawFeatures]]:
    """Features of all examples by layer, and the microbatches they came in."""
    reader = reader_of(model, batches)
    with all_trainable(model):
        parts = list(reader.read(as_batches(batches)))
    return {name: np.concatenate([part.features[name] for part in parts]) for name in reader.names}, parts


def labelled(x: Any) -> list[Any]:
    """One batch with labels."""
    if isinstance(x, dict):
        return [{**x, "labels": torch.zeros(len(next(iter(x.values()))), dtype=torch.long)}]
    return [(x, torch.zeros(len(x), dtype=torch.long))]


def hooked_inputs(model: nn.Module, names: Sequence[str], *args: Any, **kwargs: Any) -> dict[str, list[np.ndarray]]:
    """Inputs of modules, by call."""
    found: dict[str, list[np.ndarray]] = {name: [] for name in names}
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, values, name=name: found[name].append(values[0].detach().double().numpy())
        )
        for name in names
    ]
    with torch.no_grad():
        model(*args, **kwargs)
    for hook in hooks:
        hook.remove()
    return found


def pooled(channels: np.ndarray, grid: int) -> np.ndarray:
    """Mean over a grid of overlapping cells, [N, C, *S] to [N, C * cells]."""
    axes = channels.shape[2:]
    cells = np.ndindex(*(min(grid, size) for size in axes))
    columns = []
    for cell in cells:
        window = [slice(None), slice(None)]
        for index, size in zip(cell, axes, strict=True):
            count = min(grid, size)
            window.append(slice(index * size // count, -(-(index + 1) * size // count)))
        part = channels[tuple(window)]
        columns.append(part.reshape(*part.shape[:2], -1).mean(-1))
    return np.stack(columns, -1).reshape(len(channels), -1)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make(build: Callable[[], nn.Module]) -> nn.Module:
    return seeded(build)().double()


def assert_close(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-12)


# Kinds of layers ----------------------------------------------------------------------------------------------------


def test_inputs_of_linear_layers_and_the_raw_input() -> None:
    model = make(lambda: nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 4), nn.Tanh(), nn.Linear(4, 3)))
    x = normal(9, 5)
    found, parts = read(model, labelled(x))
    inputs = hooked_inputs(model, ["2", "4"], x)
    assert list(found) == [INPUT, "2", "4"]  # the first layer has the raw input
    assert_close(found[INPUT], x.numpy())
    for name, (value,) in inputs.items():
        assert_close(found[name], value)
    logits = torch.cat([part.logits for part in parts])
    assert logits.dtype == torch.float64
    assert_close(logits.numpy(), model(x).detach().numpy())


@pytest.mark.parametrize("size", [(11, 6), (3, 9), (4, 4), (2, 1)])
def test_inputs_of_convolutions_are_pooled_to_a_grid_of_4_by_4(size: tuple[int, int]) -> None:
    """The raw image is pooled to 8 by 8, shorter axes are not pooled."""
    model = make(
        lambda: nn.Sequential(
            *(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 4, 1), nn.Flatten()),
            nn.Linear(4 * size[0] * size[1], 3),
        )
    )
    x = normal(6, 2, *size)
    found, _ = read(model, labelled(x))
    inputs = hooked_inputs(model, ["2", "4"], x)
    assert list(found) == [INPUT, "2", "4"]
    assert_close(found[INPUT], pooled(x.numpy(), 8))
    assert_close(found["2"], pooled(inputs["2"][0], 4))
    assert_close(found["4"], inputs["4"][0])


def test_sequences_and_volumes_are_pooled_along_all_their_axes() -> None:
    conv1d = make(lambda: nn.Sequential(nn.Tanh(), nn.Conv1d(2, 3, 3), nn.Flatten(), nn.Linear(27, 3)))
    x = normal(5, 2, 11)
    found, _ = read(conv1d, labelled(x))
    assert_close(found[INPUT], x.numpy().reshape(5, -1))
    assert_close(found["1"], pooled(np.tanh(x.numpy()), 4))
    conv3d = make(lambda: nn.Sequential(nn.Tanh(), nn.Conv3d(1, 2, 2), nn.Flatten(), nn.Linear(2 * 8 * 5 * 4, 3)))
    x = normal(5, 1, 9, 6, 5)
    found, _ = read(conv3d, labelled(x))
    assert_close(found[INPUT], pooled(x.numpy(), 8))
    assert_close(found["1"], pooled(np.tanh(x.numpy()), 4))


def test_inputs_of_transposed_convolutions_are_pooled() -> None:
    model = make(
        lambda: nn.Sequential(*(nn.Tanh(), nn.ConvTranspose2d(2, 3, 2, stride=2), nn.Flatten()), nn.Linear(3 * 100, 3))
    )
    x = normal(4, 2, 5, 5)
    found, _ = read(model, labelled(x))
    assert_close(found["1"], pooled(np.tanh(x.numpy()), 4))
    assert_close(found["3"], hooked_inputs(model, ["3"], x)["3"][0])


def test_batch_normalisation_is_applied_with_running_statistics() -> None:
    model = make(lenet)
    model.train()
    x = normal(8, 1, 8, 8)
    found, _ = read(model, labelled(x))
    assert model.training
    inputs = hooked_inputs(model.eval(), ["4", "9", "11"], x)
    assert list(found) == [INPUT, "4", "9", "11"]
    assert_close(found["4"], pooled(inputs["4"][0], 4))
    assert_close(found["9"], inputs["9"][0])
    assert_close(found["11"], inputs["11"][0])


class Tagger(nn.Module):
    """Tokens, a layer per position, and the mean over positions."""

    def __init__(self, padding: int | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4, padding_idx=padding)
        self.layer, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        hidden = torch.tanh(self.layer(torch.tanh(self.table(input_ids))))
        weights = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        return self.head((hidden * weights.unsqueeze(2)).sum(1) / weights.sum(1, keepdim=True))


def mean_of_kept(rows: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Mean over the kept positions of [B, T, D]."""
    return np.stack([values[mask].mean(0) for values, mask in zip(rows, kept, strict=True)])


def counts_of(tokens: np.ndarray, kept: np.ndarray, vocabulary: int) -> np.ndarray:
    """Number of kept occurrences of every token, [B, V]."""
    counts = np.zeros((len(tokens), vocabulary))
    for example, (row, mask) in enumerate(zip(tokens, kept, strict=True)):
        for token, is_kept in zip(row, mask, strict=True):
            counts[example, token] += is_kept
    return counts


def tokens_and_mask(count: int = 8, length: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, 6, (count, length), generator=generator)
    lengths = torch.randint(1, length + 1, (count, 1), generator=generator)
    mask = torch.arange(length) < lengths
    return tokens * mask, mask


def test_tokens_are_counted_and_averaged_over_unmasked_positions() -> None:
    """Token 0 pads the sequences, but the embedding has no padding index."""
    model, (tokens, mask) = make(Tagger), tokens_and_mask()
    found, _ = read(model, labelled({"input_ids": tokens, "attention_mask": mask.long()}))
    inputs = hooked_inputs(model, ["layer", "head"], tokens, mask.long())
    assert list(found) == [TOKENS, "layer", "head"]
    assert_close(found[TOKENS], counts_of(tokens.numpy(), mask.numpy(), 6))
    assert_close(found["layer"], mean_of_kept(inputs["layer"][0], mask.numpy()))
    assert_close(found["head"], inputs["head"][0])


def test_a_padding_index_marks_padding_without_a_mask() -> None:
    model, (tokens, mask) = make(lambda: Tagger(padding=0)), tokens_and_mask()
    found, _ = read(model, labelled(tokens))
    inputs = hooked_inputs(model, ["layer"], tokens)
    assert_close(found[TOKENS], counts_of(tokens.numpy(), mask.numpy(), 6))
    assert_close(found["layer"], mean_of_kept(inputs["layer"][0], mask.numpy()))


def test_an_example_that_is_all_padding_is_averaged_over_all_positions() -> None:
    model, (tokens, mask) = make(lambda: Tagger(padding=0)), tokens_and_mask()
    tokens[3], mask[3] = 0, True
    found, _ = read(model, labelled(tokens))
    assert_close(found["layer"], mean_of_kept(hooked_inputs(model, ["layer"], tokens)["layer"][0], mask.numpy()))
    assert not found[TOKENS][3].any()


def test_features_do_not_depend_on_the_padding_of_a_batch() -> None:
    model, (tokens, mask) = make(Tagger), tokens_and_mask()
    expected, _ = read(model, labelled({"input_ids": tokens, "attention_mask": mask.long()}))
    order = mask.sum(1).argsort()
    batches = []
    for part in order.split(3):
        length = int(mask[part].sum(1).max())
        batches += labelled({"input_ids": tokens[part, :length], "attention_mask": mask[part, :length].long()})
    found, _ = read(model, batches)
    for name, values in expected.items():
        assert_close(found[name], values[order.numpy()])


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 0])
def test_bags_of_tokens_are_counted(mode: str, padding: int | None) -> None:
    model, (tokens, mask) = (
        make(
            lambda: nn.Sequential(*(nn.EmbeddingBag(6, 3, mode=mode, padding_idx=padding), nn.Tanh(), nn.Linear(3, 3)))
        ),
        tokens_and_mask(),
    )
    found, _ = read(model, labelled(tokens))
    kept = mask.numpy() if padding == 0 else np.ones_like(mask.numpy())
    assert_close(found[TOKENS], counts_of(tokens.numpy(), kept, 6))
    assert_close(found["2"], hooked_inputs(model, ["2"], tokens)["2"][0])


class Positions(nn.Module):
    """Tokens and the embeddings of their positions, which are the same for all examples."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position, self.head = nn.Embedding(6, 3), nn.Embedding(9, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.token(x) + self.position(torch.arange(x.shape[1]).unsqueeze(0))).mean(1))


class Categories(nn.Module):
    """A table of two categorical columns with one embedding each."""

    def __init__(self) -> None:
        super().__init__()
        self.colour, self.shape, self.head = nn.Embedding(4, 3), nn.Embedding(5, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.colour(x[:, 0]) + self.shape(x[:, 1])))


def test_the_tokens_of_all_embeddings_are_counted_together() -> None:
    """Each column alone may predict little. As separate features they would outvote the layers."""
    columns = torch.stack([torch.arange(8) % 4, torch.arange(8) % 5], 1)
    found, _ = read(make(Categories), labelled(columns))
    assert list(found) == [TOKENS, "head"]
    assert_close(found[TOKENS], np.hstack([np.eye(4)[columns[:, 0]], np.eye(5)[columns[:, 1]]]))


def test_rows_that_all_examples_share_are_no_features() -> None:
    """The number of positions would otherwise be a property of the batch."""
    tokens, _ = tokens_and_mask()
    assert reader_of(make(Positions), labelled(tokens)).names == (TOKENS, "head")


class Tagged(nn.Module):
    """A recurrent module on padded sequences, and a layer per position."""

    def __init__(self, kind: type[nn.RNNBase], bidirectional: bool) -> None:
        super().__init__()
        self.rnn = kind(3, 4, batch_first=True, bidirectional=bidirectional)
        width = 4 * (1 + bidirectional)
        self.layer, self.head = nn.Linear(width, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        if lengths is None:
            outputs, steps = self.rnn(x)[0], torch.full((len(x), 1), x.shape[1])
        else:
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            outputs, steps = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0], lengths.unsqueeze(1)
        valid = torch.arange(outputs.shape[1]) < steps
        return self.head((torch.tanh(self.layer(outputs)) * valid.unsqueeze(2)).sum(1) / steps)


def previous_states(module: nn.RNNBase, sequence: np.ndarray, suffix: str) -> np.ndarray:
    """Hidden states before every step of one sequence [T, F], by the equations of the module."""
    parameters = {name: value.detach().numpy() for name, value in module.named_parameters()}
    weights = [parameters[f"weight_{part}_{suffix}"] for part in ("ih", "hh")]
    biases = [parameters[f"bias_{part}_{suffix}"] for part in ("ih", "hh")]

    def sigmoid(value: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-value))

    hidden, cell, before = np.zeros(4), np.zeros(4), []
    for x in sequence:
        before.append(hidden)
        given, recurrent = weights[0] @ x + biases[0], weights[1] @ hidden + biases[1]
        if isinstance(module, nn.LSTM):
            i, f, g, o = np.split(given + recurrent, 4)
            cell = sigmoid(f) * cell + sigmoid(i) * np.tanh(g)
            hidden = sigmoid(o) * np.tanh(cell)
        elif isinstance(module, nn.GRU):
            (r, z, n), (rh, zh, nh) = np.split(given, 3), np.split(recurrent, 3)
            update = sigmoid(z + zh)
            hidden = (1 - update) * np.tanh(n + sigmoid(r + rh) * nh) + update * hidden
        else:
            hidden = np.tanh(given + recurrent)
    return np.array(before)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_averaged_over_the_steps_of_each_sequence(
    kind: type[nn.RNNBase], bidirectional: bool, is_packed: bool
) -> None:
    model, x = make(lambda: Tagged(kind, bidirectional)), normal(6, 7, 3)
    lengths = torch.tensor([7, 2, 1, 5, 7, 3]) if is_packed else torch.full((6,), 7)
    x = x * (torch.arange(7) < lengths.unsqueeze(1)).unsqueeze(2)
    found, _ = read(model, labelled({"x": x, "lengths": lengths} if is_packed else x))
    for suffix in ("l0", "l0_reverse")[: 1 + bidirectional]:
        inputs, states = [], []
        for sequence, length in zip(x.numpy(), lengths.tolist(), strict=True):
            steps = sequence[:length][::-1] if "reverse" in suffix else sequence[:length]
            inputs.append(steps.mean(0))
            states.append(previous_states(model.rnn, steps, suffix).mean(0))
        if kind is nn.GRU:
            assert_close(found[f"rnn.ih_{suffix}"], np.array(inputs))
            assert_close(found[f"rnn.hh_{suffix}"], np.array(states))
        else:
            expected = np.column_stack([np.array(inputs), np.array(states), np.ones(6)])
            assert_close(found[f"rnn.{suffix}"], expected)
    outputs = hooked_inputs(model, ["layer"], **({"x": x, "lengths": lengths} if is_packed else {"x": x}))["layer"][0]
    kept = np.arange(7) < lengths.numpy()[:, None]
    assert_close(found["layer"], mean_of_kept(outputs, kept))


def test_a_layer_that_is_called_twice_is_averaged_over_its_calls() -> None:
    model = make(lambda: Twice(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)))
    x = normal(7, 4)
    assert "layer" not in read(model, labelled(x))[0]  # its first input is the raw input
    shifted = nn.Sequential(nn.Tanh(), model)
    found, _ = read(shifted, labelled(x))
    first, second = hooked_inputs(shifted, ["1.layer"], x)["1.layer"]
    assert_close(found["1.layer"], (first + second) / 2)


class TwoSizes(nn.Module):
    """A convolution on an image and on its half."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 1, 3, padding=1), nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        large = self.conv(torch.tanh(x))
        small = self.conv(nn.functional.avg_pool2d(large, 2))
        return self.head(small.flatten(1))


def test_calls_of_other_sizes_than_the_first_do_not_count() -> None:
    """A grid of 4 by 4, and one of 3 by 3."""
    model, x = make(TwoSizes), normal(5, 1, 6, 6)
    found, _ = read(model, labelled(x))
    assert_close(found["conv"], pooled(np.tanh(x.numpy()), 4))


# Choice of layers ---------------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """Three layers on views of the same hidden values, and two on parts of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 36)
        self.a, self.b, self.c = nn.Linear(36, 3), nn.Linear(36, 3), nn.Conv2d(4, 3, 3)
        self.row, self.column = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        images = self.c(hidden.view(-1, 4, 3, 3)).flatten(1)
        square = hidden[:, :16].view(-1, 4, 4)
        return self.a(hidden) + self.b(hidden) + images + self.row(square[:, 0]) + self.column(square[:, :, 0])


def test_an_input_that_several_layers_share_is_read_once() -> None:
    """Views of the same values are one input. Two parts that start at the same element are not."""
    model, x = make(Branches), normal(6, 4)
    found, _ = read(model, labelled(x))
    inputs = hooked_inputs(model, ["c", "row", "column"], x)
    assert sorted(found) == ["c", "column", INPUT, "row"]
    assert_close(found["row"], inputs["row"][0])
    assert_close(found["column"], inputs["column"][0])


@pytest.mark.parametrize("depth", [3, 13, 14, 30, 40])
def test_the_layers_are_spread_over_the_depth(depth: int) -> None:
    """The input of the first of the layers is the raw input, so one fewer has features."""
    model = make(lambda: nn.Sequential(*(part for _ in range(depth) for part in (nn.Linear(3, 3), nn.Tanh()))))
    names = reader_of(model, labelled(normal(4, 3))).names
    others = [2 * index for index in range(1, depth)]
    chosen = [int(name) for name in names[1:]]
    assert names[0] == INPUT
    assert len(chosen) == min(MAX_LAYERS, depth - 1)
    assert chosen == sorted(set(chosen))
    assert {chosen[0], chosen[-1]} == {others[0], others[-1]}
    assert set(chosen) <= set(others)
    gaps = np.diff(chosen) // 2
    assert gaps.max() - gaps.min() <= 1


class Ambiguous(nn.Module):
    """Layers with the names of the raw input and of the model's member."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.input, self.model = nn.Linear(4, 5), nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(torch.tanh(self.input(torch.tanh(self.first(x)))))


def test_layers_are_distinguished_from_the_raw_input_and_the_model() -> None:
    model, x = make(Ambiguous), normal(6, 4)
    found, _ = read(model, labelled(x))
    inputs = hooked_inputs(model, ["input", "model"], x)
    assert list(found) == [INPUT, "input (layer)", "model (layer)"]
    assert_close(found[INPUT], x.numpy())
    assert_close(found["input (layer)"], inputs["input"][0])
    assert_close(found["model (layer)"], inputs["model"][0])


def test_frozen_layers_are_read_and_stay_frozen() -> None:
    model = make(lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3)))
    x = normal(6, 4)
    expected, _ = read(model, labelled(x))
    model[0].requires_grad_(False)
    model[2].weight.requires_grad_(False)
    before = [parameter.requires_grad for parameter in model.parameters()]
    found, _ = read(model, labelled(x))
    assert [parameter.requires_grad for parameter in model.parameters()] == before
    assert list(found) == list(expected) == [INPUT, "2", "4"]
    for name, values in expected.items():
        assert_close(found[name], values)


def test_parameters_are_frozen_again_after_an_error() -> None:
    model = make(lambda: nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)))
    model[0].requires_grad_(False)

    def fail() -> None:
        with all_trainable(model):
            assert all(parameter.requires_grad for parameter in model.parameters())
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert [parameter.requires_grad for parameter in model.parameters()] == [False, False, True, True]


class TwoInputs(nn.Module):
    """A number per example, and a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar, self.vector = nn.Linear(1, 3), nn.Linear(4, 3)

    def forward(self, amount: Tensor, x: Tensor) -> Tensor:
        return self.scalar(amount.unsqueeze(1)) + self.vector(x)


def test_the_raw_input_joins_all_inputs_with_a_batch_axis() -> None:
    amount, x = normal(6), normal(6, 4, seed=1)
    found, _ = read(make(TwoInputs), labelled({"amount": amount, "x": x}))
    assert list(found) == [INPUT]
    assert_close(found[INPUT], np.column_stack([amount, x]))


# Whole models -------------------------------------------------------------------------------------------------------


def test_a_transformer_of_dict_batches_is_read_over_unmasked_tokens() -> None:
    model = make(bert)
    batch = text(6, 12)(7, torch.Generator().manual_seed(0))
    found, _ = read(model, labelled(batch))
    layer = "bert.encoder.layer"
    mask = batch["attention_mask"].numpy().astype(bool)
    counts = counts_of(batch["input_ids"].numpy(), mask, 12)
    assert_close(found[TOKENS][:, : counts.shape[1]], counts)
    names = [name for name in found if name != TOKENS]
    assert len(names) >= 6
    assert f"{layer}.0.attention.self.query" in names
    for name, (value,) in hooked_inputs(model, names, **batch).items():
        assert_close(found[name], mean_of_kept(value, mask) if value.ndim == 3 else value)
    assert not {f"{layer}.0.attention.self.{part}" for part in ("key", "value")} & set(found)  # as the query
    assert "bert.embeddings.position_embeddings" not in found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_models_in_half_precision_have_features_in_float32(dtype: torch.dtype) -> None:
    """Sums over positions are beyond the range of float16."""
    model = seeded(
        lambda: nn.Sequential(*(nn.ReLU(), nn.Linear(2, 3), nn.Tanh()), nn.Flatten(), nn.Linear(96, 3))
    )().to(dtype)
    x = (4000 + 100 * normal(5, 32, 2)).to(dtype)
    found, _ = read(model, labelled(x))
    assert all(values.dtype == np.float32 for values in found.values())
    np.testing.assert_allclose(found["1"], x.double().relu().mean(1), rtol=1e-6)
    np.testing.assert_allclose(found[INPUT], x.double().flatten(1), rtol=1e-7)


class Experts(nn.Module):
    """Each row runs through one of two layers, chosen by its first feature."""

    def __init__(self) -> None:
        super().__init__()
        self.even, self.odd, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.tanh(x).flatten(0, 1)
        first = rows[:, 0] > 0
        outputs = torch.zeros_like(rows)
        outputs[first], outputs[~first] = self.even(rows[first]), self.odd(rows[~first])
        return self.head(outputs.view_as(x).tanh().mean(1))


def test_layers_on_selected_rows_are_averaged_over_the_rows_of_each_example() -> None:
    """The number of rows differs between the examples of a batch."""
    model, x = make(Experts), normal(9, 5, 4)
    x[:, :2, 0] = torch.tensor([1.0, -1.0])  # both layers have a row of every example
    found, _ = read(model, labelled(x))
    rows = np.tanh(x.numpy())
    for name, chosen in (("even", rows[:, :, 0] > 0), ("odd", rows[:, :, 0] <= 0)):
        assert_close(found[name], mean_of_kept(rows, chosen))
