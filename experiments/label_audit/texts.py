"""Sentences with label noise, and small transformers that memorise them."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.datasets import DATA_VARIABLE
from experiments.label_audit.cases import (
    Case,
    Labelled,
    cached,
    corrupt,
    is_cached,
)
from experiments.label_audit.fitting import Plan, memorise, out_of_fold

WIDTH, HEADS, LAYERS, MAX_LENGTH = 64, 4, 2, 40
MIN_COUNT = 2
PLAN = Plan(epochs=50, target=0.995, batch_size=64, patience=5)


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.output = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Map [B, T, width] to the same shape; ``mask`` [B, T] is True for words."""
        inputs = self.norm1(x)
        query, key, value = (layer(inputs).unflatten(2, (HEADS, -1)).transpose(1, 2) for layer in self.projections)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None, None, :])
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        result: Tensor = x + self.down(F.relu(self.up(self.norm2(x))))
        return result

    @property
    def projections(self) -> tuple[nn.Module, nn.Module, nn.Module]:
        """Layers of queries, keys and values."""
        return self.query, self.key, self.value


class Transformer(nn.Module):
    """Classifier of padded sentences: embedding, two blocks, mean over the words.

    Args:
        words: Size of the vocabulary with padding (0) and unknown words (1).
        classes: Number of classes K.
    """

    def __init__(self, words: int, classes: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, WIDTH, padding_idx=0)
        self.positions = nn.Embedding(MAX_LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, classes)

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids [B, T] to logits [B, K]."""
        mask = ids != 0
        x = self.words(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x, mask)
        weights = mask.unsqueeze(2).to(x.dtype)
        logits: Tensor = self.head((self.norm(x) * weights).sum(1) / weights.sum(1))
        return logits


@dataclass(frozen=True)
class TextTask:
    """Sentences with symmetric label noise.

    Attributes:
        source: File name without ending in the folder "text" of the data.
        count: Number of training sentences; the others are held out.
        is_development: Whether settings were chosen on this task.
        seeds: Seeds of sample, noise and training.
    """

    source: str
    count: int
    is_development: bool
    seeds: tuple[int, ...] = (0, 1, 2)
    fraction: float = 0.3

    @property
    def name(self) -> str:
        """Unique name."""
        return f"text-{self.source.removesuffix('_train')}"

    def data(self, seed: int) -> tuple[Labelled, Labelled | None, int, int]:
        """Return training data, held-out data, the number of classes and the size of the vocabulary."""
        labels, sentences = _read(self.source)
        classes = int(labels.max()) + 1
        given = corrupt(labels, "symmetric", self.fraction, classes, seed)
        order = np.random.default_rng(seed).permutation(len(sentences))
        chosen, rest = order[: self.count], order[self.count :]
        vocabulary = build_vocabulary([sentences[i] for i in chosen])
        parts = []
        for indices in (chosen, rest):
            ids = encode([sentences[i] for i in indices], vocabulary)
            index = torch.from_numpy(indices)
            parts.append(Labelled(ids, given[index], given[index] != labels[index]))
        return parts[0], parts[1] if len(rest) >= 2_000 else None, classes, len(vocabulary) + 2

    def cases(self, seed: int) -> Mapping[str, Callable[[], Case]]:
        """Return a function per stage that builds the case."""
        stages = {"last": lambda: self._case(seed, "last")}
        if self.data(seed)[1] is not None:
            stages["held-out"] = lambda: self._case(seed, "held-out")
        return stages

    def fold_probabilities(self, seed: int, may_train: bool) -> Tensor | None:
        """Return out-of-sample probabilities [N, K] of five early-stopped networks."""
        name = f"{self.name}-s{seed}-folds"
        return cached(name, lambda: self._folds(seed))["p"] if may_train or is_cached(name) else None

    def _case(self, seed: int, stage: str) -> Case:
        training, held_out, classes, words = self.data(seed)
        tensors = cached(f"{self.name}-s{seed}", lambda: self._train(seed))
        epoch = int(tensors.pop("epoch"))
        model = Transformer(words, classes)
        model.load_state_dict(tensors)
        data = held_out if stage == "held-out" and held_out is not None else training
        return Case(model.eval(), data.x, data.labels, data.wrong, classes, bags(data.x, words), epoch)

    def _train(self, seed: int) -> dict[str, Tensor]:
        training, _, classes, words = self.data(seed)
        torch.manual_seed(seed)
        model = Transformer(words, classes)
        epoch = memorise(model, training.x, training.labels, PLAN, seed)
        return {**model.state_dict(), "epoch": torch.tensor(epoch)}

    def _folds(self, seed: int) -> dict[str, Tensor]:
        training, _, classes, words = self.data(seed)
        return {"p": out_of_fold(lambda: Transformer(words, classes), training, classes, PLAN, seed)}


def build_vocabulary(sentences: Sequence[str]) -> dict[str, int]:
    """Map words that occur at least twice to 2, 3, ..."""
    counts = Counter(word for sentence in sentences for word in _words(sentence))
    frequent = sorted(word for word, count in counts.items() if count >= MIN_COUNT)
    return {word: index for index, word in enumerate(frequent, 2)}


def encode(sentences: Sequence[str], vocabulary: Mapping[str, int]) -> Tensor:
    """Return ids [N, 40], padded with 0; unknown words are 1."""
    ids = torch.zeros(len(sentences), MAX_LENGTH, dtype=torch.int64)
    for row, sentence in zip(ids, sentences, strict=True):
        words = [vocabulary.get(word, 1) for word in _words(sentence)][:MAX_LENGTH] or [1]
        row[: len(words)] = torch.tensor(words)
    return ids


def bags(ids: Tensor, words: int) -> Tensor:
    """Return the number of occurrences of every word, [N, V]; padding does not count."""
    result = torch.zeros(len(ids), words)
    result.scatter_add_(1, ids, torch.ones(ids.shape))
    result[:, 0] = 0
    return result


def _words(sentence: str) -> list[str]:
    return re.findall(r"[a-z0-9']+|[^\sa-z0-9']", sentence.lower())


def _read(source: str) -> tuple[Tensor, list[str]]:
    path = Path(os.environ[DATA_VARIABLE]) / "text" / f"{source}.tsv"
    rows = [line.split("\t", 1) for line in path.read_text(encoding="utf-8").splitlines() if "\t" in line]
    return torch.tensor([int(label) for label, _ in rows]), [text for _, text in rows]


TASKS: Mapping[str, TextTask] = {
    task.name: task for task in (TextTask("trec_train", 5_452, True), TextTask("mr", 6_000, False))
}
