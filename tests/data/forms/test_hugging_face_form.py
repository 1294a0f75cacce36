"""Data sets of Hugging Face in place of batches."""

from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from cases import MODEL_CASES, seeded
from ifcomp import IFComp
from ifcomp.errors import DataError, LabelError

datasets = pytest.importorskip("datasets", reason="datasets is not installed")

BERT = next(case for case in MODEL_CASES if case.name == "bert")
COUNT = 9
TEXTS = [f"sentence {row}" for row in range(COUNT)]


def inputs() -> dict[str, Tensor]:
    found = BERT.sample(COUNT)
    assert isinstance(found, dict)
    return found


def labels() -> Tensor:
    return torch.arange(COUNT) % 3


def text_data(name: str = "label", **columns: Any) -> Any:
    values = {key: value.tolist() for key, value in inputs().items()}
    data = datasets.Dataset.from_dict(
        {"text": TEXTS, "idx": list(range(COUNT)), **values, name: labels().tolist(), **columns}
    )
    return data.cast_column(name, datasets.ClassLabel(names=["bad", "fair", "good"]))


def expected() -> pd.DataFrame:
    batches = [{**inputs(), "labels": labels()}]
    return IFComp(BERT.make()).fit(batches).score(batches).frame


FORMS: dict[str, Callable[[], Any]] = {
    "plain": text_data,
    "labels": lambda: text_data("labels"),
    "torch": lambda: text_data().with_format("torch"),
    "torch_columns": lambda: text_data().with_format("torch", columns=[*inputs(), "label"]),
    "numpy": lambda: text_data().with_format("numpy"),
    "transform": lambda: text_data().with_transform(
        lambda rows: {key: [torch.tensor(row) if isinstance(row, list) else row for row in rows[key]] for key in rows}
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_data_sets_give_the_scores_of_batches(form: str) -> None:
    data = FORMS[form]()
    before = data.format
    pd.testing.assert_frame_equal(IFComp(BERT.make()).fit(data).score(data).frame, expected(), rtol=1e-3, atol=1e-5)
    assert data.format == before


def test_labels_are_optional() -> None:
    data = text_data().remove_columns("label")
    frame = IFComp(BERT.make()).fit(data).score(data).frame
    assert "label" not in frame
    assert frame["expected_influence"].tolist() == pytest.approx(expected()["expected_influence"].tolist(), rel=1e-2)


@pytest.mark.filterwarnings("ignore:The audit relies on only")
def test_texts_and_class_names_are_in_the_audit() -> None:
    frame = IFComp(BERT.make()).audit(text_data()).frame
    assert frame["name"].tolist() == TEXTS
    assert frame["label_name"].tolist() == ["bad", "fair", "good"] * 3


class Collator:
    """Pads token ids with zeros, as DataCollatorWithPadding does, and renames the label as it does."""

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        assert "text" not in rows[0]
        assert "idx" not in rows[0]
        lists = {key: [torch.as_tensor(row[key]) for row in rows] for key in rows[0]}
        padded = {key: nn.utils.rnn.pad_sequence(lists[key], batch_first=True) for key in lists if key != "labels"}
        return {**padded, "labels": torch.stack(lists["labels"])}


def ragged() -> Any:
    """Texts of different lengths."""
    data = text_data()
    lengths = [3 + row % 3 for row in range(COUNT)]

    def cut(row: dict[str, Any], index: int) -> dict[str, Any]:
        return {key: row[key][: lengths[index]] for key in inputs()}

    return data.map(cut, with_indices=True)


def padded_batch() -> dict[str, Tensor]:
    rows = [{**{key: row[key] for key in inputs()}, "labels": row["label"]} for row in ragged()]
    return Collator()(rows)


@pytest.mark.parametrize("form", ["plain", "torch"])
def test_a_collator_pads_the_texts(form: str) -> None:
    data = ragged() if form == "plain" else ragged().with_format("torch")
    ifc = IFComp(BERT.make(), collate_fn=Collator()).fit(data)
    batches = [padded_batch()]
    scores = IFComp(BERT.make()).fit(batches).score(batches).frame
    pd.testing.assert_frame_equal(ifc.score(data).frame, scores, rtol=1e-3, atol=1e-5)


def test_data_collator_with_padding_is_accepted() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from tokenizers import Tokenizer, models

    words = {"[PAD]": 0, "[UNK]": 1}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="[UNK]")), pad_token="[PAD]"
    )
    collator = transformers.DataCollatorWithPadding(tokenizer)
    frame = IFComp(BERT.make(), collate_fn=collator).fit(ragged()).score(ragged()).frame
    batches = [padded_batch()]
    scores = IFComp(BERT.make()).fit(batches).score(batches).frame
    pd.testing.assert_frame_equal(frame, scores, rtol=1e-3, atol=1e-5)


def test_texts_of_several_lengths_need_a_collator() -> None:
    with pytest.raises(DataError, match=r"cannot be stacked.*DataCollatorWithPadding"):
        IFComp(BERT.make()).fit(ragged())


def test_a_column_of_features_is_the_input_of_a_plain_network() -> None:
    x = torch.randn(12, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.arange(12) % 2
    data = datasets.Dataset.from_dict({"name": ["row"] * 12, "features": x.tolist(), "label": y.tolist()})
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)))().double()
    found, scores = IFComp(model).fit(data).score(data).frame, IFComp(model).fit([(x, y)]).score([(x, y)]).frame
    pd.testing.assert_frame_equal(found, scores, rtol=1e-3)  # a data set gives float32
    assert "label" in found


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: datasets.DatasetDict(train=text_data()), DataError, r"splits: 'train'.*data\['train'\]"),
        (lambda: text_data().to_iterable_dataset(), DataError, "streamed data set"),
        (lambda: text_data(labels=[0] * COUNT), DataError, "'labels' and 'label' could both be the label"),
        (lambda: text_data().select_columns(["text", "label"]), DataError, "entries 'text', 'label'.*tokenizer"),
        (
            lambda: text_data().remove_columns("label").add_column("label", ["bad"] * COUNT),
            LabelError,
            r"column 'label' has texts.*class_encode_column\('label'\)",
        ),
        (lambda: text_data().select([]), DataError, "empty"),
        (lambda: text_data().remove_columns("label").add_column("label", [0.5] * COUNT), LabelError, "regression"),
    ],
    ids=["splits", "stream", "two_labels", "no_inputs", "label_text", "empty", "regression"],
)
def test_unusable_data_sets_are_refused(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        IFComp(BERT.make()).fit(make())
