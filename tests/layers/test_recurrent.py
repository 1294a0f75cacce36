"""Recurrent modules and transposed convolutions: replaced forwards, packed sequences, and modules without a rule."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.testing import assert_close

from cases import FullyRead, Recurrent, seeded
from comparison import assert_same, oracle_influence
from ifcomp import IFComp
from ifcomp.layers.layer import TrackedModule
from ifcomp.layers.registry import Selection, find_rule
from oracles import OracleBlock

OPTIONS: list[dict[str, Any]] = [
    {},
    {"bias": False, "batch_first": True},
    {"num_layers": 2, "dropout": 0.5},
    {"num_layers": 2, "bidirectional": True},
    {"num_layers": 3, "bidirectional": True, "batch_first": True, "bias": False},
]

SIZE, LENGTH = 4, 6


class Emitted:
    """Collects the reports of a replaced forward."""

    def __init__(self) -> None:
        self.calls: dict[str, tuple[Tensor, Tensor]] = {}

    def __call__(self, parts: dict[str, slice | None], value: Tensor, output: Tensor) -> Tensor:
        (name,) = parts
        self.calls[name] = (value, output)
        return output


def modules(dtype: torch.dtype = torch.float64) -> list[Any]:
    kinds = [(nn.LSTM, {}), (nn.GRU, {}), (nn.RNN, {}), (nn.RNN, {"nonlinearity": "relu"})]
    return [
        pytest.param(
            lambda k=kind, o={**more, **options}: seeded(lambda: k(3, 4, **o))().to(dtype),
            id=f"{kind.__name__}-{i}-{len(more)}",
        )
        for kind, more in kinds
        for i, options in enumerate(OPTIONS)
    ]


def tracked(module: nn.Module) -> TrackedModule:
    rule, _ = find_rule(module)
    assert rule is not None
    found = rule("", module, Selection())
    assert found is not None
    assert found.forward is not None
    return found


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def states_of(module: nn.RNNBase) -> Any:
    shape = (module.num_layers * (1 + module.bidirectional), SIZE, 4)
    first = random(*shape, seed=1).requires_grad_(True)
    return (first, random(*shape, seed=2).requires_grad_(True)) if isinstance(module, nn.LSTM) else first


def flat(results: Any) -> list[Tensor]:
    """All tensors that a recurrent module returns, and the states that it is given."""
    if isinstance(results, PackedSequence):
        return [results.data]
    if isinstance(results, Tensor):
        return [results]
    return [tensor for result in results if result is not None for tensor in flat(result)]


def packed(module: nn.RNNBase, lengths: list[int], enforce_sorted: bool) -> PackedSequence:
    values = random(SIZE, LENGTH, 3).requires_grad_(True)
    values = values if module.batch_first else values.transpose(0, 1)
    return pack_padded_sequence(values, torch.tensor(lengths), module.batch_first, enforce_sorted)


def check_equal(module: nn.RNNBase, input: Tensor | PackedSequence, states: Any) -> tuple[Any, Any]:
    """Values, and gradients of all inputs, states and parameters, of the module and of its replacement."""
    results, replaced = module(input, states), tracked(module).forward(Emitted(), input, states)
    variables = [*module.parameters(), *flat([input, states])]
    gradients = []
    for outputs in (flat(results), flat(replaced)):
        weights = [random(*output.shape, seed=3 + i) for i, output in enumerate(outputs)]
        total = sum((output * weight).sum() for output, weight in zip(outputs, weights, strict=True))
        gradients.append(torch.autograd.grad(total, variables))
    for one, other in zip(flat(results), flat(replaced), strict=True):
        assert_close(one, other)
    for one, other in zip(*gradients, strict=True):
        assert_close(one, other)
    return results, replaced


@pytest.mark.parametrize("make", modules())
@pytest.mark.parametrize("with_states", [False, True])
def test_replaced_forward_equals_the_module(make: Any, with_states: bool) -> None:
    module = make()
    input = random(LENGTH, SIZE, 3) if not module.batch_first else random(SIZE, LENGTH, 3)
    check_equal(module, input.requires_grad_(True), states_of(module) if with_states else None)


@pytest.mark.parametrize(("lengths", "enforce_sorted"), [([6, 4, 4, 1], True), ([2, 6, 1, 5], False), ([3] * 4, False)])
@pytest.mark.parametrize("make", modules())
def test_replaced_forward_of_packed_sequences(make: Any, lengths: list[int], enforce_sorted: bool) -> None:
    module = make()
    input = packed(module, lengths, enforce_sorted)
    (expected, _), (output, _) = check_equal(module, input, states_of(module))
    assert torch.equal(output.batch_sizes, expected.batch_sizes)
    for name in ("sorted_indices", "unsorted_indices"):
        one, other = getattr(output, name), getattr(expected, name)
        assert one is other is None or torch.equal(one, other)


@pytest.mark.parametrize("make", modules())
def test_steps_after_the_end_have_no_output_gradient(make: Any) -> None:
    module, emitted, lengths = make(), Emitted(), [2, 6, 1, 5]
    replaced = tracked(module).forward(emitted, packed(module, lengths, enforce_sorted=False), states_of(module))
    total = sum(output.square().sum() for output in flat(replaced))
    for value, output in emitted.calls.values():
        gradient = torch.autograd.grad(total, output, retain_graph=True)[0]
        assert value.shape[:2] == gradient.shape[:2] == (SIZE, LENGTH)
        for example, length in enumerate(lengths):
            assert not gradient[example, length:].any()
            assert gradient[example, :length].any(-1).all() or (module.mode == "RNN_RELU")


def test_unbatched_input_is_demoted() -> None:
    class Unbatched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.GRU(3, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([self.head(self.rnn(row)[0][-1]) for row in x])

    ifc = IFComp(seeded(Unbatched)().double(), fisher="exact").fit([random(5, 4, 3)])
    assert {row.treatment for row in ifc.coverage.rows if row.name.startswith("rnn")} == {"diagonal"}


class SortedInside(nn.Module):
    """Sorts the batch by length, packs it and restores the order of the final states."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        order = lengths.argsort(descending=True, stable=True)
        final = self.rnn(pack_padded_sequence(x[order], lengths[order].cpu(), batch_first=True))[1][-1]
        return self.head(final[order.argsort()])


def test_batches_that_the_model_sorts() -> None:
    """The examples that are verified first are sorted already."""
    scales = torch.tensor([4.0] * 3 + [1.0] * 5, dtype=torch.float64)  # large inputs are verified first
    batch = {"x": random(8, 5, 3) * scales[:, None, None], "lengths": torch.tensor([5, 5, 5, 1, 3, 2, 4, 5])}
    ifc = IFComp(seeded(SortedInside)().double(), fisher="exact", damping=1e-3).fit([batch])
    alone = [ifc.influence({name: value[i : i + 1] for name, value in batch.items()}) for i in range(8)]
    assert_same(ifc.influence(batch), torch.cat(alone))


@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_projected_states_have_diagonal_blocks() -> None:
    module = nn.LSTM(3, 4, proj_size=2)
    rule, _ = find_rule(module)
    assert rule is not None
    assert rule("", module, Selection()) is None


def test_other_precisions_of_the_states() -> None:
    model = seeded(Recurrent)()
    x = random(5, 4, 3).float()
    ifc = IFComp(model).fit([x])
    recorder = ifc._recorder
    assert recorder is not None
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
        with recorder.attached():
            assert_close(model(x), expected, rtol=0.05, atol=0.05)
        assert ifc.influence(x).isfinite().all()


def test_parameters_beside_a_recurrent_module() -> None:
    """Initial states are parameters without a rule; the scores do not depend on the batch."""
    model = seeded(lambda: FullyRead(nn.LSTM, learned=True, batch_first=True))().double()
    x = random(5, 4, 3)
    ifc = IFComp(model, fisher="exact", damping=1e-3).fit([x])
    together = ifc.influence(x)
    assert_same(torch.cat([ifc.influence(row) for row in x.split(1)]), together)


def test_calls_with_an_output_size_are_demoted() -> None:
    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.ConvTranspose1d(2, 3, 3, stride=2), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layer(x, output_size=[2 * x.shape[2] + 2]).tanh().mean(2))

    ifc = IFComp(seeded(Sized)().double(), fisher="exact", damping=1e-3).fit([random(5, 2, 4)])
    blocks = [OracleBlock("diagonal", (f"layer.{name}",)) for name in ("weight", "bias")]
    blocks.append(OracleBlock("kronecker", ("head.weight", "head.bias")))
    x = random(4, 2, 4, seed=1)
    assert_close(ifc.influence(x), oracle_influence(ifc, ifc.model, blocks, x, 1e-3), rtol=1e-9, atol=0)


@pytest.mark.parametrize("stride", [1, 2])
def test_rounding_does_not_determine_the_basis_of_a_transposed_convolution(stride: int) -> None:
    """If the stride equals the kernel size, all offsets have the same input pixels."""
    x, size = random(7, 2, 3, 3), 3 * ((3 - 1) * stride + 2) ** 2
    model = seeded(
        lambda: nn.Sequential(nn.ConvTranspose2d(2, 3, 2, stride), nn.Tanh(), nn.Flatten(), nn.Linear(size, 3))
    )()
    double = IFComp(model.double(), fisher="exact", damping=1e-2).fit([x]).influence(x)
    single = IFComp(model.float(), fisher="exact", damping=1e-2).fit([x.float()]).influence(x.float())
    assert_same(single.double(), double, rtol=1e-4)
