"""The three scripts from raw data to a report are short, and find the wrong labels of small data."""

import ast
import random
import runpy
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_breast_cancer, load_digits
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

SCRIPTS = Path(__file__).parents[1] / "examples" / "reports"


def train(model: nn.Module, x: Tensor, y: Tensor, steps: int = 60) -> None:
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def write_images() -> list[str]:
    """Write 300 digits, of which ten are in the folder of another class. Returns the names of these."""
    digits = load_digits()
    labels = digits.target[:300].copy()
    labels[::30] = (labels[::30] + 1) % 10
    for number, (image, label) in enumerate(zip(digits.images[:300], labels, strict=True)):
        Path("images", f"digit {label}").mkdir(parents=True, exist_ok=True)
        Image.fromarray((image * 15).astype(np.uint8)).save(f"images/digit {label}/{number}.png")
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    train(model, torch.tensor(digits.images[:300] * 15 / 255).float()[:, None], torch.tensor(labels))
    torch.save(model.state_dict(), "images.pt")
    return [f"digit {labels[number]}/{number}.png" for number in range(0, 300, 30)]


def write_table() -> list[int]:
    """Write 300 rows, ten with the other label. Returns their positions."""
    data = load_breast_cancer(as_frame=True)
    frame = data.frame.rename(columns={"target": "label"})[:300]
    frame.loc[::30, "label"] = 1 - frame.loc[::30, "label"]
    frame.to_csv("table.csv", index=False)
    model = nn.Sequential(nn.BatchNorm1d(30), nn.Linear(30, 32), nn.ReLU(), nn.Linear(32, 2))
    train(model, torch.tensor(frame.drop(columns="label").to_numpy()).float(), torch.tensor(frame["label"].to_numpy()))
    torch.save(model.state_dict(), "table.pt")
    return list(range(0, 300, 30))


def write_texts() -> list[str]:
    """Write 240 texts, eight with the other label. Returns these texts."""
    rng = random.Random(0)
    words = [
        ["oven", "flour", "butter", "salt", "onion", "soup", "bread"],
        ["rain", "cloud", "storm", "wind", "frost", "fog", "snow"],
    ]
    filler = ["the", "a", "with", "and", "then", "before", "after", "some", "very"]
    labels = [number % 2 for number in range(240)]
    texts = [" ".join([f"{rng.choice(filler)} {word}" for word in rng.sample(words[label], 4)]) for label in labels]
    wrong = list(range(0, 240, 30))
    frame = pd.DataFrame({"text": texts, "label": [1 - y if i in wrong else y for i, y in enumerate(labels)]})
    frame.to_csv("texts.csv", index=False)
    vocabulary = {word: place for place, word in enumerate(["[PAD]", "[UNK]", *filler, *words[0], *words[1]])}
    split = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    split.pre_tokenizer = Whitespace()  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=split, pad_token="[PAD]", unk_token="[UNK]")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig(vocab_size=len(vocabulary), max_position_embeddings=16, num_labels=2, **sizes)
    model = BertForSequenceClassification(config)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    batch = tokenizer(texts, padding="max_length", max_length=16, return_tensors="pt")
    for _ in range(40):
        optimizer.zero_grad()
        model(**batch, labels=torch.tensor(frame["label"].to_numpy())).loss.backward()
        optimizer.step()
    model.save_pretrained("bert")
    tokenizer.save_pretrained("bert")
    return [texts[number] for number in wrong]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("name", "write", "column"),
    [("images", write_images, "name"), ("table", write_table, "index"), ("text", write_texts, "name")],
)
def test_script_finds_the_wrong_labels(
    name: str, write: object, column: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert callable(write)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        wrong = set(write())
        runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
    audit = pd.read_csv("audit.csv").sort_values("score", ascending=False)
    assert len(wrong & set(audit[column].head(len(wrong)))) >= 0.7 * len(wrong)
    assert "<html" in Path("report.html").read_text()


@pytest.mark.parametrize("path", sorted(SCRIPTS.glob("*.py")), ids=lambda path: path.stem)
def test_script_has_at_most_twelve_lines(path: Path) -> None:
    text = path.read_text()
    first = ast.parse(text).body[1].lineno  # after the docstring
    assert len([line for line in text.splitlines()[first - 1 :] if line.strip()]) <= 12
