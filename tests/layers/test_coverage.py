"""Coverage: every parameter is counted once, and parameters that are not covered have a reason."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases import LAYER_CASES, MODEL_CASES, Case, Tied, VisionTransformer, seeded
from comparison import as_type
from ifcomp import IFComp
from oracles import Inputs

CASES = {case.name: case for case in [*LAYER_CASES, *MODEL_CASES]}


class TwoLayers(nn.Module):
    """A body and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


def sample(case: Case, size: int) -> Inputs:
    return as_type(case.sample(size, seed=1), torch.float32)


@pytest.mark.parametrize("case", CASES.values(), ids=str)
def test_every_parameter_is_counted_once(case: Case) -> None:
    model = case.make()
    ifc = IFComp(model)
    total = sum(parameter.numel() for parameter in model.parameters())
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert (ifc.coverage.total, ifc.coverage.covered) == (total, trainable)
    ifc.fit([sample(case, 5)])
    assert (ifc.coverage.total, ifc.coverage.covered) == (total, trainable)
    assert ifc.coverage.fraction == pytest.approx(trainable / total)
    assert ifc.factors is not None
    covered = [row.name for row in ifc.coverage.rows if row.covered]
    assert sorted(covered) == sorted(ifc.factors.blocks)
    assert len(set(covered)) == len(covered)
    assert sum(block.second_moments.numel() for block in ifc.factors.blocks.values()) == trainable


SELECTED = ["lenet", "vision_transformer", "bert", "attention", "attention_cross", "tied", "frozen_bias", "lstm"]


@pytest.mark.parametrize("case", [CASES[name] for name in SELECTED], ids=str)
@pytest.mark.parametrize("layers", ["last", "first_block", "all_but_first_block"])
def test_selected_layers_count_every_parameter_once(case: Case, layers: str) -> None:
    model = case.make()
    names = [row.name for row in IFComp(model).coverage.rows if row.covered]
    chosen: Any = {"last": "last", "first_block": names[:1], "all_but_first_block": names[1:] or names}[layers]
    coverage = IFComp(model, layers=chosen).coverage
    assert coverage.total == sum(parameter.numel() for parameter in model.parameters())
    assert [row.name for row in coverage.rows if row.covered]
    reasons = {row.treatment for row in coverage.rows if not row.covered}
    assert reasons <= {"not in layers=", "frozen"}


REASONS: list[tuple[str, Callable[[], nn.Module], dict[str, Any], dict[str, str]]] = [
    ("none", VisionTransformer, {}, {}),
    (
        "frozen",
        lambda: freeze(VisionTransformer(), "patch.bias", "token", "norm1.weight", "attn.in_proj_weight"),
        {},
        {"patch.bias": "frozen", "token": "frozen", "norm1.weight": "frozen", "attn.in_proj_weight": "frozen"},
    ),
    (
        "layers",
        lambda: seeded(TwoLayers)(),
        {"layers": "head"},
        {"body": "not in layers="},
    ),
    (
        "frozen_and_layers",
        lambda: freeze(TwoLayers(), "body.weight"),
        {"layers": "head"},
        {"body.weight": "frozen", "body": "not in layers="},
    ),
    (
        "skipped",
        lambda: nn.Sequential(nn.Embedding(5, 4, max_norm=1.0), nn.Linear(4, 3)),
        {"skip_uncovered": True},
        {"0.weight": "skipped: max_norm changes the weights in the forward pass"},
    ),
    ("tied_and_frozen", lambda: freeze(Tied(), "first.weight"), {}, {"first.weight": "frozen"}),
]


def freeze(model: nn.Module, *names: str) -> nn.Module:
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return model


@pytest.mark.parametrize(("make", "options", "reasons"), [pytest.param(*row[1:], id=row[0]) for row in REASONS])
def test_uncovered_parameters_have_a_reason(
    make: Callable[[], nn.Module], options: dict[str, Any], reasons: dict[str, str]
) -> None:
    model = make()
    coverage = IFComp(model, **options).coverage
    assert {row.name: row.treatment for row in coverage.rows if not row.covered} == reasons
    total = sum(parameter.numel() for parameter in model.parameters())
    uncovered = sum(row.parameters for row in coverage.rows if not row.covered)
    assert coverage.total == total
    assert coverage.covered == total - uncovered
    assert coverage.fraction == pytest.approx(coverage.covered / total)


def test_printed_coverage_is_a_table() -> None:
    model = freeze(VisionTransformer(), "token")
    text = str(IFComp(model, sua=True).coverage)
    lines = text.splitlines()
    assert lines[0].split() == ["layer", "kind", "treatment", "parameters"]
    assert any(line.split() == ["patch", "conv2d", "EKFAC", "(SUA)", "20"] for line in lines)
    assert any(line.split() == ["attn.q", "linear", "EKFAC", "20"] for line in lines)
    assert any(line.split() == ["norm1", "layernorm", "diagonal", "8"] for line in lines)
    assert any(line.split() == ["position", "parameter", "diagonal", "20"] for line in lines)
    assert any(line.startswith("token ") and line.split()[-2:] == ["frozen", "4"] for line in lines)
    total = sum(parameter.numel() for parameter in model.parameters())
    assert lines[-1] == f"covered: {total - 4} of {total} parameters ({100 * (1 - 4 / total):.1f} %)"
    assert len({len(line) for line in lines[:-1]}) == 1


def test_a_model_of_one_layer_has_a_name_in_the_table() -> None:
    row = IFComp(nn.Linear(4, 3)).coverage.rows[0]
    assert row.name
    assert row.parameters == 15


def test_coverage_after_the_fit_is_the_verified_one() -> None:
    case = CASES["embedding_positions_flat"]
    ifc = IFComp(case.make())
    kinds = {row.name: row.kind for row in ifc.coverage.rows}
    assert kinds["position"] == "embedding"
    ifc.fit([case.sample(5)])
    kinds = {row.name: row.kind for row in ifc.coverage.rows}
    assert kinds["position.weight"] == "parameter"
    assert kinds["token"] == "embedding"
    assert ifc.coverage.fraction == 1.0
