"""Architectures of plain torch are exact, and the zoo records wrong results, crashes and interruptions."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.zoo.entry import CLASSES, Entry, normal, pad_tokens, ragged_tokens
from experiments.zoo.examine import Result, examine, fit
from experiments.zoo.page import write_page
from experiments.zoo.reference import BlockView, DenseGradients, Reference, uncovered
from experiments.zoo.run import read_results, run_entries
from experiments.zoo.sources import PLAIN, load_entries
from ifcomp.errors import ModelError

ENTRIES = {entry.name: entry for entry in load_entries(PLAIN)}

#: One architecture for each way to call a layer.
EXACT = (
    "MLP, weight_norm",
    "MLP, spectral_norm",
    "mixture of experts, routed",
    "layer called conditionally",
    "shared input",
    "CNN, standardised weights",
    "ConvTranspose2d",
    "Conv1d, transposed, frozen BatchNorm",
    "ViT, class token, LayerScale",
    "attention bias cached in eval mode",
    "LSTM, packed, bidirectional",
    "GRU, two layers, bidirectional",
    "tokens without padding",
    "attention, scaled in place",
    "TransformerEncoder, batch second",
    "TransformerEncoder, batch first, padding mask",
    "TransformerEncoder, norm first, padding mask",
    "EmbeddingBag with offsets",
    "GPT, tied weights",
)


@pytest.mark.parametrize("name", EXACT)
def test_an_architecture_is_exact(name: str) -> None:
    result = examine(ENTRIES[name])
    assert result.verdict == "exact", result


def test_names_are_unique() -> None:
    assert len(ENTRIES) == len(list(load_entries(PLAIN)))


class Doubled(torch.autograd.Function):
    """The identity with twice its gradient in batches of more than one example."""

    @staticmethod
    def forward(context: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: object, grad: Tensor) -> Tensor:
        return grad * (2.0 if len(grad) > 1 else 1.0)


class WrongInBatches(nn.Module):
    """A model whose gradients depend on the size of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(Doubled.apply(torch.tanh(self.first(x))))


class Padded(nn.Module):
    """A model of tokens that does not ignore padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(60, 4), nn.Linear(4, CLASSES)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(input_ids)).sum(1))


class Raises(nn.Module):
    """A model that runs a function instead of layers."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__()
        self.head, self.act = nn.Linear(6, CLASSES), act

    def forward(self, x: Tensor) -> Tensor:
        self.act()
        return self.head(x)


def _raise(error: Exception) -> None:
    raise error


def test_wrong_gradients_are_reported() -> None:
    result = examine(Entry("wrong", "test", WrongInBatches, normal(6)))
    assert result.verdict == "wrong"
    assert result.errors["moments"] > 0.1
    assert next(iter(result.worst)) == "first"


def test_a_model_that_depends_on_padding_is_not_compared_with_padding() -> None:
    result = examine(Entry("padded", "test", Padded, ragged_tokens(mask=False), pad_tokens))
    assert result.verdict == "exact", result
    assert "padded fit" not in result.errors
    assert "padding" in result.message


def test_the_reference_differentiates_effective_weights() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight * 3, self.bias)

    torch.manual_seed(0)
    model, x = nn.Sequential(Scaled(4, CLASSES)).double(), torch.randn(1, 4, dtype=torch.float64)
    weight = DenseGradients(model, ["0.weight"], effective=["0.weight"])(x)[1]["0.weight"]
    torch.testing.assert_close(weight, torch.einsum("ko,i->koi", torch.eye(CLASSES).double(), x[0]))


def test_blocks_that_leave_out_an_element_are_reported() -> None:
    shapes = {"a": torch.Size([3]), "b": torch.Size([2, 2])}
    whole = BlockView("a", ("a",), lambda values: values["a"])
    part = BlockView("b", ("b",), lambda values: values["b"][0])
    twice = BlockView("b", ("b",), lambda values: torch.cat([values["b"].flatten(), values["b"][0]]))
    assert uncovered([whole, replace(part, arrange=lambda values: values["b"].T.flatten())], shapes) == []
    assert uncovered([whole, part], shapes) == ["b"]
    assert uncovered([whole, twice], shapes) == ["b"]


def test_the_reference_rotates_shared_offsets() -> None:
    entry = Entry("conv", "test", lambda: ENTRIES["CNN, BatchNorm"].build(), normal(3, 8, 8))
    model, train = entry.model(), entry.inputs(6, seed=1)
    ifc = fit(model, [train], sua=True)
    reference = Reference(ifc, entry.model())
    moments = reference.second_moments(entry.cut(train, [1]))
    for name, block in ifc.factors.blocks.items():
        torch.testing.assert_close(block.second_moments, moments[name])


def test_every_outcome_is_recorded(tmp_path: Path) -> None:
    acts = {
        "refused": lambda: _raise(ModelError("The model is not allowed.")),
        "crash": lambda: _raise(RuntimeError("broken")),
        "killed": lambda: os._exit(7),
        "timeout": lambda: time.sleep(60),
        "exact": lambda: None,
    }
    entries = [Entry(name, "test", lambda act=act: Raises(act), normal(6)) for name, act in acts.items()]
    path = tmp_path / "results" / "zoo.json"
    results = run_entries(entries, path, timeout=3.0)
    assert {key: result.verdict for key, result in results.items()} == {f"test/{name}": name for name in acts}
    assert results["test/refused"].message == "ModelError: The model is not allowed."
    assert results["test/killed"].message == "Exit code 7."
    assert read_results(path) == results


def test_a_run_continues_where_it_stopped(tmp_path: Path) -> None:
    path = tmp_path / "zoo.json"
    entries = [replace(ENTRIES["MLP"], name=name) for name in ("a", "b")]
    first = run_entries(entries[:1], path)
    path.write_text(json.dumps({"torch/a": {"name": "a", "source": "torch", "verdict": "wrong"}}))
    assert run_entries(entries, path)["torch/a"].verdict == "wrong"
    again = run_entries(entries, path, again=("wrong",))
    assert again["torch/a"].errors == first["torch/a"].errors
    assert again["torch/b"].verdict == "exact"


def test_the_page_has_a_row_per_architecture(tmp_path: Path) -> None:
    exact = Result("ViT", "timm", "exact", 5_000, 4_000, 0.95, 0.05, {"moments": 2e-16, "influence": 3e-15})
    refused = Result("odd", "torch", "refused", message="ModelError: first | line\nsecond line")
    write_page({"timm/ViT": exact, "torch/odd": refused}, tmp_path / "zoo.md")
    text = (tmp_path / "zoo.md").read_text()
    assert "2 architectures were tested: 1 exact, 1 refused." in text
    assert "| timm | 1 | 1 | 95 % |" in text
    assert "| torch | 1 | 0 | - |" in text
    assert "    | ViT | 4,000 | 95.0 % | 3e-15 |" in text
    assert "    | odd | 0 | - | - |" in text
    assert "| odd | torch | refused: ModelError: first / line |" in text
