"""Every form in which data may come, Hugging Face models, and the account of what is covered."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, Dataset, TensorDataset

from cases import LAYER_CASES, MODEL_CASES, Case, Tied, VisionTransformer, seeded
from comparison import as_type
from ifcomp import IFComp
from oracles import Inputs

CASES = {case.name: case for case in [*LAYER_CASES, *MODEL_CASES]}


class Named(nn.Module):
    """Two inputs by name, the second of which may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor, gain: Tensor | None = None, power: int = 1) -> Tensor:
        h = torch.tanh(self.body(x)) ** power
        return self.head(h if gain is None else h * gain)


def net() -> nn.Module:
    return seeded(Named)().double()


def data(size: int = 11) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(size, 4, generator=generator, dtype=torch.float64), torch.randint(
        3, (size,), generator=generator
    )


X, Y = data()
SIZE = 4
STARTS = range(0, len(X), SIZE)


class Pair(NamedTuple):
    inputs: Tensor
    target: Tensor


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """A data set of the user's own."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return X[index], Y[index]


class Again:
    """Something without a length whose ``__iter__`` starts anew."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return ((X[i : i + SIZE], Y[i : i + SIZE]) for i in STARTS)


def batches(form: Callable[[Tensor, Tensor], Any]) -> list[Any]:
    return [form(X[i : i + SIZE], Y[i : i + SIZE]) for i in STARTS]


def with_empty(*empty: Any) -> list[Any]:
    full = batches(lambda x, y: (x, y))
    return [*empty, *full[:1], *empty, *full[1:], *empty]


LABELLED: dict[str, Callable[[], Any]] = {
    "pairs": lambda: batches(lambda x, y: (x, y)),
    "lists": lambda: batches(lambda x, y: [x, y]),
    "named_tuples": lambda: batches(Pair),
    "dicts": lambda: batches(lambda x, y: {"x": x, "labels": y}),
    "dicts_labels_first": lambda: batches(lambda x, y: {"labels": y, "x": x}),
    "label_lists": lambda: batches(lambda x, y: (x, y.tolist())),
    "label_arrays": lambda: batches(lambda x, y: (x, y.numpy())),
    "label_bytes": lambda: batches(lambda x, y: (x, y.to(torch.uint8))),
    "label_int32": lambda: batches(lambda x, y: (x, y.int())),
    "one_batch": lambda: [(X, Y)],
    "one_by_one": lambda: [(X[i : i + 1], Y[i : i + 1]) for i in range(len(X))],
    "re_iterable": Again,
    "loader": lambda: DataLoader(TensorDataset(X, Y), batch_size=SIZE),
    "loader_of_rows": lambda: DataLoader(Rows(), batch_size=3),
    "empty_batches": lambda: with_empty((X[:0], Y[:0])),
    "empty_bare_batches": lambda: with_empty(X[:0], (X[:0],)),
}

UNLABELLED: dict[str, Callable[[], Any]] = {
    "tensors": lambda: batches(lambda x, y: x),
    "singles": lambda: batches(lambda x, y: (x,)),
    "single_lists": lambda: batches(lambda x, y: [x]),
    "dicts": lambda: batches(lambda x, y: {"x": x}),
    "none_labels": lambda: batches(lambda x, y: (x, None)),
    "none_dict_labels": lambda: batches(lambda x, y: {"x": x, "labels": None}),
    "loader": lambda: DataLoader(TensorDataset(X), batch_size=SIZE),
    "loader_of_tensors": lambda: DataLoader(X, batch_size=5),  # type: ignore[arg-type]
}

EXPECTED = IFComp(net(), fisher="sampled", damping=1e-2).fit([(X, Y)])


def same_scores(found: pd.DataFrame, expected: pd.DataFrame) -> None:
    pd.testing.assert_frame_equal(found, expected, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("form", LABELLED)
def test_labelled_data_comes_in_every_form(form: str) -> None:
    given = LABELLED[form]()
    ifc = IFComp(net(), fisher="sampled", damping=1e-2).fit(given)
    same_scores(ifc.score(given).frame, EXPECTED.score([(X, Y)]).frame)
    assert ifc.score(given).frame["label"].tolist() == Y.tolist()


@pytest.mark.parametrize("form", LABELLED)
def test_labels_of_every_form_reach_the_empirical_fisher(form: str) -> None:
    expected = IFComp(net(), fisher="empirical", damping=1e-2).fit([(X, Y)])
    ifc = IFComp(net(), fisher="empirical", damping=1e-2).fit(LABELLED[form]())
    assert_close(ifc.influence(X), expected.influence(X), rtol=1e-9, atol=0)


@pytest.mark.parametrize("form", UNLABELLED)
def test_unlabelled_data_comes_in_every_form(form: str) -> None:
    given = UNLABELLED[form]()
    ifc = IFComp(net(), fisher="sampled", damping=1e-2).fit(given)
    frame = ifc.score(given).frame
    same_scores(frame, EXPECTED.score([X]).frame)
    assert "label" not in frame


def test_a_loader_with_a_worker_gives_the_same() -> None:
    loader = DataLoader(TensorDataset(X, Y), batch_size=SIZE, num_workers=1)
    ifc = IFComp(net(), fisher="sampled", damping=1e-2).fit(loader)
    same_scores(ifc.score(loader).frame, EXPECTED.score([(X, Y)]).frame)


def test_a_last_partial_batch_counts() -> None:
    loader = DataLoader(TensorDataset(X, Y), batch_size=SIZE)
    dropped = DataLoader(TensorDataset(X, Y), batch_size=SIZE, drop_last=True)
    assert IFComp(net()).fit(loader).factors.count == len(X) == 11
    assert IFComp(net()).fit(dropped).factors.count == 8
    assert len(EXPECTED.score(loader)) == 11


def test_progress_is_shown_on_standard_error_only(capsys: pytest.CaptureFixture[str]) -> None:
    quiet = IFComp(net()).fit([X], progress=False)
    quiet.score([X])
    assert capsys.readouterr() == ("", "")
    shown = IFComp(net()).fit([X], progress=True)
    output = capsys.readouterr()
    assert output.out == ""
    assert "pass 1 of 2" in output.err
    assert "pass 2 of 2" in output.err
    shown.score(iter([X]), progress=True)
    assert "scoring" in capsys.readouterr().err
    assert torch.equal(shown.influence(X), quiet.influence(X))


CALLS: dict[str, Any] = {
    "tensor": X,
    "single": (X,),
    "pair": (X, Y),
    "list": [X, Y],
    "dict": {"x": X},
    "dict_with_labels": {"x": X, "labels": Y},
}


@pytest.mark.parametrize("form", CALLS)
def test_inputs_of_a_call_come_in_every_form(form: str) -> None:
    x = CALLS[form]
    assert torch.equal(EXPECTED.influence(x), EXPECTED.influence(X))
    assert torch.equal(EXPECTED.logit_kernel(x), EXPECTED.logit_kernel(X))
    assert torch.equal(EXPECTED.predict_proba(x), EXPECTED.predict_proba(X))
    assert torch.equal(EXPECTED.parametric_complexity(x), EXPECTED.parametric_complexity(X))


@pytest.mark.parametrize("x", [X, (X,), {"x": X}], ids=["tensor", "single", "dict"])
@pytest.mark.parametrize("labels", [Y, Y.tolist(), Y.numpy(), Y.int()], ids=["tensor", "list", "array", "int32"])
def test_labels_of_a_call_come_in_every_form(x: Any, labels: Any) -> None:
    assert torch.equal(EXPECTED.stochastic_complexity(x, labels), EXPECTED.stochastic_complexity(X, Y))


def test_given_labels_go_before_those_of_the_batch() -> None:
    expected = EXPECTED.stochastic_complexity(X, Y)
    for x in ({"x": X, "labels": (Y + 1) % 3}, (X, (Y + 1) % 3)):
        assert torch.equal(EXPECTED.stochastic_complexity(x, Y), expected)


def test_results_are_in_double_precision_and_without_a_graph() -> None:
    single = IFComp(net().float()).fit([X.float()])
    for found in (
        single.influence(X.float()),
        single.logit_kernel(X.float()),
        single.predict_proba(X.float()),
        single.parametric_complexity(X.float()),
        single.stochastic_complexity(X.float(), Y),
    ):
        assert found.dtype == torch.float64
        assert not found.requires_grad


def test_keyword_inputs_reach_the_model() -> None:
    gain = torch.rand(len(X), 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    given = [{"x": X[i : i + 3], "gain": gain[i : i + 3], "power": 2} for i in range(0, len(X), 3)]
    ifc = IFComp(net(), fisher="exact", damping=1e-2).fit(given)
    probability = torch.softmax(net()(X, gain, 2), 1)
    assert_close(ifc.predict_proba({"x": X, "gain": gain, "power": 2}, alpha=0.0), probability.detach())
    frame = ifc.score(given).frame
    assert frame["confidence"].tolist() == pytest.approx(probability.max(1).values.tolist())


def test_rows_come_in_the_order_of_the_data() -> None:
    order = torch.randperm(len(X), generator=torch.Generator().manual_seed(0))
    shuffled = EXPECTED.score([(X[order][:5], Y[order][:5]), (X[order][5:], Y[order][5:])]).frame
    straight = EXPECTED.score([(X, Y)]).frame
    assert shuffled["index"].tolist() == list(range(len(X)))
    expected = straight.iloc[order.tolist()].reset_index(drop=True).drop(columns="index")
    same_scores(shuffled.drop(columns="index"), expected)


def test_a_table_agrees_with_the_single_calls() -> None:
    frame = EXPECTED.score(LABELLED["pairs"](), alpha=0.4).frame
    influence, probability = EXPECTED.influence(X), EXPECTED.predict_proba(X, alpha=0.0)
    expected = {
        "prediction": probability.argmax(1),
        "confidence": probability.max(1).values,
        "expected_influence": (probability * influence).sum(1),
        "parametric_complexity": EXPECTED.parametric_complexity(X, alpha=0.4),
        "label_probability": probability[range(len(X)), Y],
        "influence": influence[range(len(X)), Y],
        "stochastic_complexity": EXPECTED.stochastic_complexity(X, Y, alpha=0.4),
    }
    for name, values in expected.items():
        assert frame[name].tolist() == pytest.approx(values.tolist(), rel=1e-10), name


# Hugging Face -------------------------------------------------------------------------------------------------------


def text(labelled: bool = True, size: int = 9) -> dict[str, Tensor]:
    case = CASES["bert"]
    inputs = case.sample(size)
    assert isinstance(inputs, dict)
    return {**inputs, "labels": torch.arange(size) % 3} if labelled else inputs


def slices(batch: dict[str, Tensor], size: int = 4) -> list[dict[str, Tensor]]:
    length = len(next(iter(batch.values())))
    return [{key: value[i : i + size] for key, value in batch.items()} for i in range(0, length, size)]


def encodings() -> list[Any]:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    return [transformers.BatchEncoding(part) for part in slices(text())]


def collated() -> DataLoader[Any]:
    rows = [{key: value[i] for key, value in text().items()} for i in range(9)]
    return DataLoader(rows, batch_size=4)  # type: ignore[arg-type]


TEXTS: dict[str, Callable[[], Any]] = {
    "dicts": lambda: slices(text()),
    "encodings": encodings,
    "loader": collated,
    "one_batch": lambda: [text()],
}


@pytest.mark.parametrize("form", TEXTS)
def test_texts_are_fitted_and_scored(form: str) -> None:
    model = CASES["bert"].make().double()
    given = TEXTS[form]()
    ifc = IFComp(model, damping=1e-2).fit(given)
    frame = ifc.score(given).frame
    inputs = text(labelled=False)
    assert frame["label"].tolist() == text()["labels"].tolist()
    probability = torch.softmax(model(**inputs).logits, 1).detach()
    assert frame["confidence"].tolist() == pytest.approx(probability.max(1).values.tolist(), rel=1e-9)
    influence = ifc.influence(inputs)
    assert influence.shape == (9, 3)
    own = influence[range(9), text()["labels"]]
    assert frame["influence"].tolist() == pytest.approx(own.tolist(), rel=1e-9)
    assert ifc.coverage.fraction == 1.0


def test_labels_of_texts_reach_the_empirical_fisher() -> None:
    right, wrong = text(), text()
    wrong["labels"] = (wrong["labels"] + 1) % 3
    one, other = (
        IFComp(CASES["bert"].make(), fisher="empirical").fit([batch]).influence(right) for batch in (right, wrong)
    )
    assert not torch.allclose(one, other)


def test_padding_that_is_masked_does_not_matter() -> None:
    """Batches of another length: the same texts with and without two more masked positions."""
    ifc = IFComp(CASES["bert"].make().double(), damping=1e-2).fit([text()])
    short = text(labelled=False, size=4)
    longer = {key: torch.cat([value, value.new_zeros(4, 2)], 1) for key, value in short.items()}
    assert_close(ifc.influence(longer), ifc.influence(short), rtol=1e-9, atol=0)


def tiny_vit() -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.ViTConfig(
        image_size=8,
        patch_size=4,
        num_channels=1,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=12,
        num_labels=3,
        initializer_range=0.4,
    )
    return transformers.ViTForImageClassification(config)


def images(size: int = 7) -> Tensor:
    return torch.randn(size, 1, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_a_vision_transformer_is_covered_whole() -> None:
    model = seeded(tiny_vit)().double()
    given = [{"pixel_values": images()[i : i + 3], "labels": torch.tensor([0, 1, 2])[: 7 - i]} for i in (0, 3, 6)]
    ifc = IFComp(model, fisher="exact", damping=1e-2).fit(given)
    assert ifc.coverage.fraction == 1.0
    assert ifc.coverage.total == sum(parameter.numel() for parameter in model.parameters())
    others = {row.name for row in ifc.coverage.rows if row.kind == "parameter"}
    assert {name.rsplit(".", 1)[-1] for name in others} == {"cls_token", "position_embeddings"}
    assert all(row.covered for row in ifc.coverage.rows)
    frame = ifc.score(given).frame
    probability = torch.softmax(model(images()).logits, 1).detach()
    assert frame["confidence"].tolist() == pytest.approx(probability.max(1).values.tolist(), rel=1e-9)


@pytest.mark.parametrize("beta", [1.0, 0.3])
def test_influence_of_a_vision_transformer_is_that_of_its_kernel(beta: float) -> None:
    """``IF = (p - e_y)^T M (p - e_y)``, with M from other cotangents than IF."""
    ifc = IFComp(seeded(tiny_vit)().double(), beta=beta, damping=1e-2).fit([images()])
    kernel, probability = ifc.logit_kernel(images(4)), ifc.predict_proba(images(4), alpha=0.0)
    residual = probability.unsqueeze(1) - torch.eye(3, dtype=torch.float64)
    expected = torch.einsum("byk,bkl,byl->by", residual, kernel, residual)
    assert_close(ifc.influence(images(4)), expected, rtol=1e-9, atol=0)


# Coverage -----------------------------------------------------------------------------------------------------------


def sample(case: Case, size: int) -> Inputs:
    return as_type(case.sample(size, seed=1), torch.float32)


@pytest.mark.parametrize("case", CASES.values(), ids=str)
def test_every_parameter_is_accounted_for_once(case: Case) -> None:
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


PARTLY = ["lenet", "vision_transformer", "bert", "attention", "attention_cross", "tied", "frozen_bias", "lstm"]


@pytest.mark.parametrize("case", [CASES[name] for name in PARTLY], ids=str)
@pytest.mark.parametrize("layers", ["last", "first_block", "all_but_first_block"])
def test_every_parameter_is_accounted_for_once_with_some_layers(case: Case, layers: str) -> None:
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
        lambda: frozen_parts(VisionTransformer(), "patch.bias", "token", "norm1.weight", "attn.in_proj_weight"),
        {},
        {"patch.bias": "frozen", "token": "frozen", "norm1.weight": "frozen", "attn.in_proj_weight": "frozen"},
    ),
    (
        "layers",
        lambda: seeded(Named)(),
        {"layers": "head"},
        {"body": "not in layers="},
    ),
    (
        "frozen_and_layers",
        lambda: frozen_parts(Named(), "body.weight"),
        {"layers": "head"},
        {"body.weight": "frozen", "body": "not in layers="},
    ),
    (
        "skipped",
        lambda: nn.Sequential(nn.Embedding(5, 4, max_norm=1.0), nn.Linear(4, 3)),
        {"skip_uncovered": True},
        {"0.weight": "skipped: max_norm changes the weights in the forward pass"},
    ),
    ("tied_and_frozen", lambda: frozen_parts(Tied(), "first.weight"), {}, {"first.weight": "frozen"}),
]


def frozen_parts(model: nn.Module, *names: str) -> nn.Module:
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return model


@pytest.mark.parametrize(("make", "options", "reasons"), [pytest.param(*row[1:], id=row[0]) for row in REASONS])
def test_what_is_left_out_has_a_reason(
    make: Callable[[], nn.Module], options: dict[str, Any], reasons: dict[str, str]
) -> None:
    model = make()
    coverage = IFComp(model, **options).coverage
    assert {row.name: row.treatment for row in coverage.rows if not row.covered} == reasons
    total = sum(parameter.numel() for parameter in model.parameters())
    left_out = sum(row.parameters for row in coverage.rows if not row.covered)
    assert coverage.total == total
    assert coverage.covered == total - left_out
    assert coverage.fraction == pytest.approx(coverage.covered / total)


def test_a_printed_coverage_is_a_table() -> None:
    model = frozen_parts(VisionTransformer(), "token")
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


def test_a_model_that_is_one_layer_has_a_name_in_the_table() -> None:
    row = IFComp(nn.Linear(4, 3)).coverage.rows[0]
    assert row.name
    assert row.parameters == 15


def test_coverage_after_the_fit_is_what_held_on_the_data() -> None:
    case = CASES["embedding_positions_flat"]
    ifc = IFComp(case.make())
    kinds = {row.name: row.kind for row in ifc.coverage.rows}
    assert kinds["position"] == "embedding"
    ifc.fit([case.sample(5)])
    kinds = {row.name: row.kind for row in ifc.coverage.rows}
    assert kinds["position.weight"] == "parameter"
    assert kinds["token"] == "embedding"
    assert ifc.coverage.fraction == 1.0
