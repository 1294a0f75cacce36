"""Every supported form of data gives the same results, also with Hugging Face models."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, Dataset, TensorDataset

from cases import MODEL_CASES, seeded
from ifcomp import IFComp
from ifcomp.errors import DataError

BERT = next(case for case in MODEL_CASES if case.name == "bert")


class KeywordInputs(nn.Module):
    """A model with optional keyword inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor, gain: Tensor | None = None, power: int = 1) -> Tensor:
        h = torch.tanh(self.body(x)) ** power
        return self.head(h if gain is None else h * gain)


def net() -> nn.Module:
    return seeded(KeywordInputs)().double()


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
    """A data set of rows."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return X[index], Y[index]


class Reiterable:
    """Re-iterable batches without a length."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return ((X[i : i + SIZE], Y[i : i + SIZE]) for i in STARTS)


def make_batches(form: Callable[[Tensor, Tensor], Any]) -> list[Any]:
    return [form(X[i : i + SIZE], Y[i : i + SIZE]) for i in STARTS]


def with_empty(*empty: Any) -> list[Any]:
    full = make_batches(lambda x, y: (x, y))
    return [*empty, *full[:1], *empty, *full[1:], *empty]


LABELLED: dict[str, Callable[[], Any]] = {
    "pairs": lambda: make_batches(lambda x, y: (x, y)),
    "lists": lambda: make_batches(lambda x, y: [x, y]),
    "named_tuples": lambda: make_batches(Pair),
    "dicts": lambda: make_batches(lambda x, y: {"x": x, "labels": y}),
    "dicts_labels_first": lambda: make_batches(lambda x, y: {"labels": y, "x": x}),
    "label_lists": lambda: make_batches(lambda x, y: (x, y.tolist())),
    "label_arrays": lambda: make_batches(lambda x, y: (x, y.numpy())),
    "label_bytes": lambda: make_batches(lambda x, y: (x, y.to(torch.uint8))),
    "label_int32": lambda: make_batches(lambda x, y: (x, y.int())),
    "one_batch": lambda: [(X, Y)],
    "one_by_one": lambda: [(X[i : i + 1], Y[i : i + 1]) for i in range(len(X))],
    "re_iterable": Reiterable,
    "loader": lambda: DataLoader(TensorDataset(X, Y), batch_size=SIZE),
    "loader_of_rows": lambda: DataLoader(Rows(), batch_size=3),
    "empty_batches": lambda: with_empty((X[:0], Y[:0])),
    "empty_bare_batches": lambda: with_empty(X[:0], (X[:0],)),
}

UNLABELLED: dict[str, Callable[[], Any]] = {
    "tensors": lambda: make_batches(lambda x, y: x),
    "singles": lambda: make_batches(lambda x, y: (x,)),
    "single_lists": lambda: make_batches(lambda x, y: [x]),
    "dicts": lambda: make_batches(lambda x, y: {"x": x}),
    "none_labels": lambda: make_batches(lambda x, y: (x, None)),
    "none_dict_labels": lambda: make_batches(lambda x, y: {"x": x, "labels": None}),
    "loader": lambda: DataLoader(TensorDataset(X), batch_size=SIZE),
    "loader_of_tensors": lambda: DataLoader(X, batch_size=5),  # type: ignore[arg-type]
}

EXPECTED = IFComp(net(), fisher="sampled", damping=1e-2).fit([(X, Y)])


def assert_same_scores(actual: pd.DataFrame, expected: pd.DataFrame) -> None:
    pd.testing.assert_frame_equal(actual, expected, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("form", LABELLED)
def test_every_form_of_labelled_data_gives_the_same_scores(form: str) -> None:
    batches = LABELLED[form]()
    ifc = IFComp(net(), fisher="sampled", damping=1e-2).fit(batches)
    assert_same_scores(ifc.score(batches).frame, EXPECTED.score([(X, Y)]).frame)
    assert ifc.score(batches).frame["label"].tolist() == Y.tolist()


@pytest.mark.parametrize("form", LABELLED)
def test_empirical_fisher_uses_labels_of_every_form(form: str) -> None:
    expected = IFComp(net(), fisher="empirical", damping=1e-2).fit([(X, Y)])
    ifc = IFComp(net(), fisher="empirical", damping=1e-2).fit(LABELLED[form]())
    assert_close(ifc.influence(X), expected.influence(X), rtol=1e-9, atol=0)


@pytest.mark.parametrize("form", UNLABELLED)
def test_every_form_of_unlabelled_data_gives_the_same_scores(form: str) -> None:
    batches = UNLABELLED[form]()
    ifc = IFComp(net(), fisher="sampled", damping=1e-2).fit(batches)
    frame = ifc.score(batches).frame
    assert_same_scores(frame, EXPECTED.score([X]).frame)
    assert "label" not in frame


def test_a_loader_with_a_worker_gives_the_same_scores() -> None:
    loader = DataLoader(TensorDataset(X, Y), batch_size=SIZE, num_workers=1)
    ifc = IFComp(net(), fisher="sampled", damping=1e-2).fit(loader)
    assert_same_scores(ifc.score(loader).frame, EXPECTED.score([(X, Y)]).frame)


def test_the_last_partial_batch_counts() -> None:
    loader = DataLoader(TensorDataset(X, Y), batch_size=SIZE)
    dropped = DataLoader(TensorDataset(X, Y), batch_size=SIZE, drop_last=True)
    assert IFComp(net()).fit(loader).factors.count == len(X) == 11
    assert IFComp(net()).fit(dropped).factors.count == 8
    assert len(EXPECTED.score(loader)) == 11


def test_progress_is_written_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
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
def test_every_form_of_inputs_gives_the_same_results(form: str) -> None:
    x = CALLS[form]
    assert torch.equal(EXPECTED.influence(x), EXPECTED.influence(X))
    assert torch.equal(EXPECTED.logit_kernel(x), EXPECTED.logit_kernel(X))
    assert torch.equal(EXPECTED.predict_proba(x), EXPECTED.predict_proba(X))
    assert torch.equal(EXPECTED.parametric_complexity(x), EXPECTED.parametric_complexity(X))


@pytest.mark.parametrize("x", [X, (X,), {"x": X}], ids=["tensor", "single", "dict"])
@pytest.mark.parametrize("labels", [Y, Y.tolist(), Y.numpy(), Y.int()], ids=["tensor", "list", "array", "int32"])
def test_every_form_of_labels_gives_the_same_results(x: Any, labels: Any) -> None:
    assert torch.equal(EXPECTED.stochastic_complexity(x, labels), EXPECTED.stochastic_complexity(X, Y))


def test_labels_of_a_call_replace_those_of_the_batch() -> None:
    expected = EXPECTED.stochastic_complexity(X, Y)
    assert torch.equal(EXPECTED.stochastic_complexity({"x": X, "labels": (Y + 1) % 3}, Y), expected)
    with pytest.raises(DataError, match="could be labels too"):
        EXPECTED.stochastic_complexity((X, (Y + 1) % 3), Y)


def test_results_are_float64_without_a_graph() -> None:
    single = IFComp(net().float()).fit([X.float()])
    for result in (
        single.influence(X.float()),
        single.logit_kernel(X.float()),
        single.predict_proba(X.float()),
        single.parametric_complexity(X.float()),
        single.stochastic_complexity(X.float(), Y),
    ):
        assert result.dtype == torch.float64
        assert not result.requires_grad


def test_keyword_inputs_reach_the_model() -> None:
    gain = torch.rand(len(X), 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    batches = [{"x": X[i : i + 3], "gain": gain[i : i + 3], "power": 2} for i in range(0, len(X), 3)]
    ifc = IFComp(net(), fisher="exact", damping=1e-2).fit(batches)
    probability = torch.softmax(net()(X, gain, 2), 1)
    assert_close(ifc.predict_proba({"x": X, "gain": gain, "power": 2}, alpha=0.0), probability.detach())
    frame = ifc.score(batches).frame
    assert frame["confidence"].tolist() == pytest.approx(probability.max(1).values.tolist())


def test_rows_are_in_the_order_of_the_data() -> None:
    order = torch.randperm(len(X), generator=torch.Generator().manual_seed(0))
    shuffled = EXPECTED.score([(X[order][:5], Y[order][:5]), (X[order][5:], Y[order][5:])]).frame
    in_order = EXPECTED.score([(X, Y)]).frame
    assert shuffled["index"].tolist() == list(range(len(X)))
    expected = in_order.iloc[order.tolist()].reset_index(drop=True).drop(columns="index")
    assert_same_scores(shuffled.drop(columns="index"), expected)


def test_score_columns_equal_the_results_of_single_calls() -> None:
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
    case = BERT
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
def test_every_form_of_text_data_is_fitted_and_scored(form: str) -> None:
    model = BERT.make().double()
    batches = TEXTS[form]()
    ifc = IFComp(model, damping=1e-2).fit(batches)
    frame = ifc.score(batches).frame
    inputs = text(labelled=False)
    assert frame["label"].tolist() == text()["labels"].tolist()
    probability = torch.softmax(model(**inputs).logits, 1).detach()
    assert frame["confidence"].tolist() == pytest.approx(probability.max(1).values.tolist(), rel=1e-9)
    influence = ifc.influence(inputs)
    assert influence.shape == (9, 3)
    influence_of_labels = influence[range(9), text()["labels"]]
    assert frame["influence"].tolist() == pytest.approx(influence_of_labels.tolist(), rel=1e-9)
    assert ifc.coverage.fraction == 1.0


def test_empirical_fisher_uses_labels_of_text_data() -> None:
    batch, relabelled = text(), text()
    relabelled["labels"] = (relabelled["labels"] + 1) % 3
    first, second = (
        IFComp(BERT.make(), fisher="empirical").fit([data]).influence(batch) for data in (batch, relabelled)
    )
    assert not torch.allclose(first, second)


def test_masked_padding_does_not_change_influence() -> None:
    """The same texts with and without two more masked positions."""
    ifc = IFComp(BERT.make().double(), damping=1e-2).fit([text()])
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


def test_a_vision_transformer_is_fully_covered() -> None:
    model = seeded(tiny_vit)().double()
    batches = [{"pixel_values": images()[i : i + 3], "labels": torch.tensor([0, 1, 2])[: 7 - i]} for i in (0, 3, 6)]
    ifc = IFComp(model, fisher="exact", damping=1e-2).fit(batches)
    assert ifc.coverage.fraction == 1.0
    assert ifc.coverage.total == sum(parameter.numel() for parameter in model.parameters())
    others = {row.name for row in ifc.coverage.rows if row.kind == "parameter"}
    assert {name.rsplit(".", 1)[-1] for name in others} == {"cls_token", "position_embeddings"}
    assert all(row.covered for row in ifc.coverage.rows)
    frame = ifc.score(batches).frame
    probability = torch.softmax(model(images()).logits, 1).detach()
    assert frame["confidence"].tolist() == pytest.approx(probability.max(1).values.tolist(), rel=1e-9)


@pytest.mark.parametrize("beta", [1.0, 0.3])
def test_influence_of_a_vision_transformer_follows_from_its_kernel(beta: float) -> None:
    """``IF = (p - e_y)^T M (p - e_y)``, where M is computed from other cotangents than IF."""
    ifc = IFComp(seeded(tiny_vit)().double(), beta=beta, damping=1e-2).fit([images()])
    kernel, probability = ifc.logit_kernel(images(4)), ifc.predict_proba(images(4), alpha=0.0)
    residual = probability.unsqueeze(1) - torch.eye(3, dtype=torch.float64)
    expected = torch.einsum("byk,bkl,byl->by", residual, kernel, residual)
    assert_close(ifc.influence(images(4)), expected, rtol=1e-9, atol=0)
