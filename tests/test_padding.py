"""Fits and scores do not depend on the amount of padding, nor on the division of the data into batches."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from cases import seeded
from comparison import assert_same
from ifcomp import IFComp
from ifcomp.curvature.accumulation import CovarianceSums
from ifcomp.curvature.factors import Damping, FitSettings, Relative
from ifcomp.data.batches import as_batches
from ifcomp.fitting import FitPasses
from ifcomp.layers.inventory import take_inventory
from ifcomp.layers.registry import Selection
from ifcomp.layers.verification import verified_recorder

CLASSES = 3
WORDS = 14
WIDTH = 6
LENGTHS = (8, 12, 20)
DAMPINGS: list[Damping] = [1e-4, 1e-2, 1.0, Relative(0.1)]

Text = dict[str, Tensor]

# Models


class Transformer(nn.Module):
    """Two layers of attention over the valid tokens, and the mean of valid tokens or the first token.

    The attention of PyTorch masks with -inf; ``additive`` adds a finite number to the scores instead.
    """

    def __init__(self, pool: str = "mean", additive: float | None = None) -> None:
        super().__init__()
        self.word, self.position = nn.Embedding(WORDS, WIDTH, padding_idx=0), nn.Embedding(max(LENGTHS), WIDTH)
        self.attention = nn.ModuleList(nn.MultiheadAttention(WIDTH, 2, batch_first=True) for _ in range(2))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 9), nn.GELU(), nn.Linear(9, WIDTH)) for _ in self.attention
        )
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in self.attention)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.pool, self.additive = pool, additive

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits from ids and mask [B, T]."""
        h = self.word(input_ids) + self.position(torch.arange(input_ids.shape[1]).unsqueeze(0))
        mask = attention_mask == 0
        if self.additive is not None:
            mask = self.additive * mask.to(h.dtype)
        for attention, mlp, norm in zip(self.attention, self.mlp, self.norms, strict=True):
            h = h + attention(h, h, h, key_padding_mask=mask, need_weights=False)[0]
            h = h + mlp(norm(h))
        valid = attention_mask.unsqueeze(-1).to(h.dtype)
        return self.head(h[:, 0] if self.pool == "first" else (h * valid).sum(1) / valid.sum(1))


class Causal(nn.Module):
    """Fused attention to earlier tokens. The first query has one key, so its gradient is zero up to rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.word = nn.Embedding(WORDS, WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, 16) for _ in range(3))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits from ids and mask [B, T]."""
        h = self.word(input_ids)
        query, key, value = (layer(h).unsqueeze(1) for layer in (self.query, self.key, self.value))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True).squeeze(1)
        valid = attention_mask.unsqueeze(-1).to(h.dtype)
        return self.head((torch.tanh(mixed) * valid).sum(1) / valid.sum(1))


class TextConvolution(nn.Module):
    """Convolutions without a border; the mean is over windows without padding."""

    def __init__(self) -> None:
        super().__init__()
        self.word = nn.Embedding(WORDS, WIDTH)
        self.first, self.second = nn.Conv1d(WIDTH, 4, 2), nn.Conv1d(4, 6, 2, groups=2)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits from ids and mask [B, T]."""
        h = self.word(input_ids).transpose(1, 2)
        h = torch.tanh(self.second(torch.tanh(self.first(h))))
        valid = attention_mask[:, None, 2:].to(h.dtype)
        return self.head((h * valid).sum(2) / valid.sum(2))


def bert() -> nn.Module:
    """BERT of transformers for sequence classification."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=9,
        max_position_embeddings=max(LENGTHS),
        num_labels=CLASSES,
        initializer_range=0.4,
    )
    return transformers.BertForSequenceClassification(config)


class Scaled(nn.Module):
    """A model with larger logits."""

    def __init__(self, model: nn.Module, scale: float) -> None:
        super().__init__()
        self.model, self.scale = model, scale

    def forward(self, **inputs: Tensor) -> Tensor:
        """Logits."""
        return self.scale * self.model(**inputs)


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "mean": (seeded(Transformer), {}),
    "first": (seeded(lambda: Transformer("first")), {}),
    "finite mask": (seeded(lambda: Transformer(additive=-100.0)), {}),
    "causal": (seeded(Causal), {}),
    "convolution": (seeded(TextConvolution), {}),
    "shared offsets": (seeded(TextConvolution), {"sua": True}),
    "bert": (seeded(bert), {}),
}

# Data


def texts(size: int, length: int, seed: int = 0) -> Text:
    """Ids and mask of texts of three to eight words, padded to a length, with labels."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, WORDS, (size, min(LENGTHS)), generator=generator)
    valid = torch.arange(min(LENGTHS)) < torch.randint(3, min(LENGTHS) + 1, (size, 1), generator=generator)
    extra = torch.zeros(size, length - min(LENGTHS), dtype=torch.long)
    return {
        "input_ids": torch.cat([ids * valid, extra], 1),
        "attention_mask": torch.cat([valid.long(), extra], 1),
        "labels": torch.randint(CLASSES, (size,), generator=generator),
    }


def in_batches(data: Text, order: Tensor, size: int, *, trim: bool) -> list[Text]:
    """The data in another order, in batches that end with the longest text if ``trim``."""
    batches = []
    for index in order.split(size):
        longest = int(data["attention_mask"][index].sum(1).max()) if trim else data["attention_mask"].shape[1]
        batches.append(
            {key: value[index][:, :longest] if value.dim() == 2 else value[index] for key, value in data.items()}
        )
    return batches


def cuts(data: Text) -> dict[str, list[Text]]:
    """The same data in different batches and in different orders."""
    size = len(data["labels"])
    order, sorted_order = torch.arange(size), data["attention_mask"].sum(1).argsort(stable=True)
    return {
        "batches": in_batches(data, order, 11, trim=False),
        "trimmed": in_batches(data, order, 11, trim=True),
        "sorted": in_batches(data, sorted_order, 8, trim=True),
        "one by one": in_batches(data, order, 1, trim=True),
    }


def covariances(model: nn.Module, data: Iterable[Text], sua: bool = False, **options: Any) -> CovarianceSums:
    """The sums of the first pass."""
    batches = list(as_batches(data))
    recorder = verified_recorder(model, take_inventory(model, Selection(sua=sua)), batches[0])
    return FitPasses(recorder, [FitSettings(**options)]).covariances(batches)[0]


def unlabelled(data: Text) -> Text:
    return {key: value for key, value in data.items() if key != "labels"}


def assert_same_covariances(actual: CovarianceSums, expected: CovarianceSums, rtol: float) -> None:
    for name, matrix in expected.tensors.items():
        assert_same(actual.tensors[name], matrix, rtol=rtol, floor=rtol)
        values = torch.linalg.eigvalsh(matrix)
        assert_same(torch.linalg.eigvalsh(actual.tensors[name]), values, rtol=rtol, floor=rtol)


# The amount of padding


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 100 * 2.0**-23)], ids=str)
def test_covariances_do_not_depend_on_padding(name: str, dtype: torch.dtype, rtol: float) -> None:
    make, options = MODELS[name]
    short, *longer = (covariances(make().to(dtype), [texts(30, length)], **options) for length in LENGTHS)
    for sums in longer:
        assert_same_covariances(sums, short, rtol)


@pytest.mark.parametrize("fisher", ["exact", "sampled", "empirical"])
@pytest.mark.parametrize("name", MODELS)
def test_influence_does_not_depend_on_padding(name: str, fisher: str) -> None:
    make, options = MODELS[name]
    queries = unlabelled(texts(5, LENGTHS[0], seed=1))
    short, *longer = (
        IFComp(make().double(), fisher=fisher, **options).fit([texts(40, length)], progress=False) for length in LENGTHS
    )
    for damping in DAMPINGS:
        expected = short.influence(queries, damping=damping)
        for ifc in longer:
            assert_same(ifc.influence(queries, damping=damping), expected, rtol=1e-9, floor=0.0)


def test_influence_in_float32_does_not_depend_on_padding() -> None:
    """Eigenvectors are determined to rounding over the gap of their eigenvalues."""
    make, _ = MODELS["mean"]
    queries = unlabelled(texts(5, LENGTHS[0], seed=1))
    short, *longer = (IFComp(make(), fisher="exact").fit([texts(40, length)], progress=False) for length in LENGTHS)
    for ifc in longer:
        for damping in (1e-2, Relative(0.1)):
            expected = short.influence(queries, damping=damping)
            assert_same(ifc.influence(queries, damping=damping), expected, rtol=2.0**-11.5, floor=0.0)


@pytest.mark.parametrize("length", LENGTHS[1:])
def test_scores_and_explanations_do_not_depend_on_padding(length: int) -> None:
    """The queries and the training data of the explanation are padded; the fit is the same."""
    make, _ = MODELS["mean"]
    train, queries = texts(20, LENGTHS[0]), texts(6, LENGTHS[0], seed=1)
    long_train, long_queries = texts(20, length), texts(6, length, seed=1)
    ifc = IFComp(make().double(), damping=1e-2).fit([train], progress=False)
    for of in (
        ifc.influence,
        ifc.logit_kernel,
        ifc.parametric_complexity,
        lambda x: ifc.parametric_complexity(x, probes=2),
    ):
        assert_same(of(unlabelled(long_queries)), of(unlabelled(queries)), rtol=1e-9, floor=1e-12)
    table, expected = (ifc.score([data], progress=False).frame for data in (long_queries, queries))
    for column in expected.select_dtypes("number"):
        assert table[column].tolist() == pytest.approx(expected[column].tolist(), rel=1e-9)
    effects, expected_effects = (
        ifc.explain(unlabelled(query), query["labels"], [data], k=3, progress=False).frame
        for query, data in ((long_queries, long_train), (queries, train))
    )
    assert effects["index"].tolist() == expected_effects["index"].tolist()
    assert effects["effect"].tolist() == pytest.approx(expected_effects["effect"].tolist(), rel=1e-9)


# Batches


@pytest.mark.parametrize("name", MODELS)
def test_fits_do_not_depend_on_batches(name: str) -> None:
    make, options = MODELS[name]
    data = texts(40, LENGTHS[1])
    whole = IFComp(make().double(), fisher="exact", **options).fit([data], progress=False)
    queries = unlabelled(texts(5, LENGTHS[0], seed=1))
    expected = whole.influence(queries, damping=1e-2)
    sums = covariances(make().double(), [data], fisher="exact", **options)
    for batches in cuts(data).values():
        assert_same_covariances(covariances(make().double(), batches, fisher="exact", **options), sums, 1e-12)
        ifc = IFComp(make().double(), fisher="exact", **options).fit(batches, progress=False)
        assert_same(ifc.influence(queries, damping=1e-2), expected, rtol=1e-9, floor=0.0)


# Confident examples


@pytest.mark.parametrize("fisher", ["exact", "sampled", "empirical"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["mean", "convolution", "shared offsets"])
def test_confident_examples_count(name: str, dtype: torch.dtype, fisher: str) -> None:
    """Residuals of large logits underflow, in float64 to zero; input covariances are the same."""
    make, options = MODELS[name]
    data = texts(20, LENGTHS[1])
    scaled = [Scaled(make(), scale).to(dtype) for scale in (1.0, 1e2, 1e5)]
    expected, *others = (covariances(model, [data], fisher=fisher, **options) for model in scaled)
    for sums in others:
        for block, matrix in expected.inputs.items():
            assert_same(sums.inputs[block], matrix, rtol=100 * torch.finfo(dtype).eps, floor=torch.finfo(dtype).eps)
