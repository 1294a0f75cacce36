"""The evidence of a small network against refits and loops, for any batch size."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cases import seeded
from ifcomp import IFComp
from ifcomp.data.batches import as_batches
from ifcomp.errors import DataError, EmptyDataError, LengthChangedError
from ifcomp.evidence.collection import COMPONENTS, _LayerData, _predict, collect_evidence
from ifcomp.evidence.features import FeatureReader
from ifcomp.evidence.members import MODEL, Evidence
from ifcomp.layers.inventory import take_inventory
from ifcomp.layers.registry import Selection
from ifcomp.layers.verification import verified_recorder
from tracking import Alive

CLASSES, COUNT = 3, 60


def network() -> nn.Module:
    """A convolution and three Linear, in float64."""

    def build() -> nn.Module:
        first = [nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(144, 9), nn.Tanh()]
        return nn.Sequential(*first, nn.Linear(9, 7), nn.ReLU(), nn.Linear(7, CLASSES))

    return seeded(build)().double()


def examples(count: int = COUNT, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Images whose brightness depends on the class. Every seventh label is wrong."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.arange(count) % CLASSES
    images = torch.randn(count, 1, 6, 6, generator=generator, dtype=torch.float64)
    images[:, 0, :2] += truth.double().view(-1, 1, 1)
    labels = torch.where(torch.arange(count) % 7 == 0, (truth + 1) % CLASSES, truth)
    return images, labels


def collect(
    data: Sequence[Any],
    reference: Sequence[Any] | None = None,
    network: Callable[[], nn.Module] = network,
    **options: Any,
) -> Evidence:
    model = network()
    first = next(as_batches(data))
    reader = FeatureReader(verified_recorder(model, take_inventory(model, Selection()), first), first)
    return collect_evidence(reader, data, reference, progress=False, **options)


# The oracle ---------------------------------------------------------------------------------------------------------


def layer_inputs(images: Tensor) -> dict[str, np.ndarray]:
    """Raw input and inputs of the three Linear. The input of the convolution is the raw input."""
    model, found = network(), {"input": images.flatten(1).numpy()}
    with torch.no_grad():
        hidden = images
        for name, layer in model.named_children():
            if name in ("3", "5", "7"):
                found[name] = hidden.numpy()
            hidden = layer(hidden)
    return found | {MODEL: hidden.numpy()}


def softmax(values: np.ndarray) -> np.ndarray:
    exponentials = np.exp(values - values.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def ridge_prediction(features: np.ndarray, labels: np.ndarray, ridge: float, query: np.ndarray) -> np.ndarray:
    """Prediction [K] of a ridge regression of the one-hot label; the intercept is not penalised."""
    means = features.mean(0), np.eye(CLASSES)[labels].mean(0)
    centred, targets = features - means[0], np.eye(CLASSES)[labels] - means[1]
    gram = centred.T @ centred + ridge * np.eye(centred.shape[1])
    return means[1] + (query - means[0]) @ np.linalg.solve(gram, centred.T @ targets)


class LayerOracle:
    """Standardised features of one layer, and the predictors that are fitted on a reference."""

    def __init__(self, reference: np.ndarray, labels: np.ndarray, queries: np.ndarray | None = None) -> None:
        mean, deviation = reference.mean(0), reference.std(0)
        varies = deviation > 1e-6 * np.abs(reference).max(0)
        self.reference = (reference[:, varies] - mean[varies]) / deviation[varies]
        self.labels, self.is_left_out = labels, queries is None
        self.queries = self.reference if queries is None else (queries[:, varies] - mean[varies]) / deviation[varies]
        directions = np.linalg.svd(self.reference)[2][:COMPONENTS]
        self.components = self.reference @ directions.T, self.queries @ directions.T

    def others(self, index: int) -> np.ndarray:
        """Positions in the reference that predict the label of a query."""
        positions = np.arange(len(self.reference))
        return positions[positions != index] if self.is_left_out else positions

    def readout(self) -> np.ndarray:
        """Distributions of refits, with the ridge and the scale of the smallest leave-one-out loss."""
        ridges = [len(self.labels) * 10.0**power for power in range(-9, 5)]
        targets = np.eye(CLASSES)[self.labels]
        fitted = [self.left_out(ridge) for ridge in ridges]
        best = int(np.argmin([np.square(predictions - targets).mean() for predictions in fitted]))
        scales = [2.0**power for power in range(-5, 10)]
        losses = [-np.log((softmax(scale * fitted[best]) * targets).sum(1)).mean() for scale in scales]
        scale = scales[int(np.argmin(losses))]
        if self.is_left_out:
            return softmax(scale * fitted[best])
        rows = [ridge_prediction(self.reference, self.labels, ridges[best], query) for query in self.queries]
        return softmax(scale * np.array(rows))

    def left_out(self, ridge: float) -> np.ndarray:
        """Predictions of every reference example by a regression on the others."""
        rows = []
        for index, query in enumerate(self.reference):
            rest = np.arange(len(self.labels)) != index
            rows.append(ridge_prediction(self.reference[rest], self.labels[rest], ridge, query))
        return np.array(rows)

    def nearest(self, count: int) -> np.ndarray:
        """Positions of the nearest reference examples by cosine, [n, k]."""
        rows = []
        for index, query in enumerate(self.components[1]):
            cosines = {
                other: query @ row / np.linalg.norm(query) / np.linalg.norm(row)
                for other, row in enumerate(self.components[0])
                if other in self.others(index)
            }
            rows.append(sorted(cosines, key=cosines.__getitem__, reverse=True)[:count])
        return np.array(rows)

    def votes(self) -> np.ndarray:
        """Shares of the labels of neighbours; one more vote follows the class frequencies."""
        sizes = np.bincount(self.labels)
        count = min(50, int(np.median(sizes) / 2))
        frequencies = sizes / sizes.sum()
        rows = [
            [(np.sum(self.labels[near] == label) + frequencies[label]) / (count + 1) for label in range(CLASSES)]
            for near in self.nearest(count)
        ]
        return np.array(rows)


def assert_equals_oracle(evidence: Evidence, oracles: dict[str, LayerOracle], logits: np.ndarray) -> None:
    found = {(member.layer, member.predictor): member.probabilities for member in evidence.members}
    assert list(found) == [*((name, kind) for name in oracles for kind in ("votes", "readout")), (MODEL, MODEL)]
    np.testing.assert_allclose(found[MODEL, MODEL], softmax(logits), rtol=1e-9)
    for name, oracle in oracles.items():
        np.testing.assert_allclose(found[name, "votes"], oracle.votes(), rtol=1e-9, err_msg=name)
        np.testing.assert_allclose(found[name, "readout"], oracle.readout(), rtol=1e-6, atol=1e-9, err_msg=name)
        np.testing.assert_array_equal(evidence.neighbours[name], oracle.nearest(5), err_msg=name)


def test_every_example_is_left_out_of_the_predictors_of_its_label() -> None:
    images, labels = examples()
    inputs = layer_inputs(images)
    logits = inputs.pop(MODEL)
    evidence = collect([(images, labels)])
    assert evidence.is_left_out
    np.testing.assert_array_equal(evidence.labels, labels)
    np.testing.assert_array_equal(evidence.reference_labels, labels)
    oracles = {name: LayerOracle(values, labels.numpy()) for name, values in inputs.items()}
    assert_equals_oracle(evidence, oracles, logits)


def test_predictors_are_fitted_on_the_reference_alone() -> None:
    images, labels = examples(20, seed=1)
    others, given = examples()
    inputs, bases = layer_inputs(images), layer_inputs(others)
    evidence = collect([(images, labels)], [(others[:25], given[:25]), (others[25:], given[25:])])
    assert not evidence.is_left_out
    np.testing.assert_array_equal(evidence.labels, labels)
    np.testing.assert_array_equal(evidence.reference_labels, given)
    logits = inputs.pop(MODEL)
    oracles = {name: LayerOracle(bases[name], given.numpy(), inputs[name]) for name in inputs}
    assert_equals_oracle(evidence, oracles, logits)


def test_data_that_is_also_the_reference_is_not_left_out() -> None:
    data = [examples()]
    inputs, labels = layer_inputs(data[0][0]), data[0][1].numpy()
    logits = inputs.pop(MODEL)
    evidence = collect(data, data)
    oracles = {name: LayerOracle(values, labels, values) for name, values in inputs.items()}
    assert_equals_oracle(evidence, oracles, logits)
    assert (evidence.neighbours["3"][:, 0] == np.arange(COUNT)).all()


def test_votes_of_equal_examples_do_not_depend_on_their_order() -> None:
    """More equal examples than neighbours, sorted by label: neighbours from either end would have one label."""
    images = examples(2)[0].repeat_interleave(300, 0)
    labels = torch.tensor([0, 1, 2]).repeat_interleave(torch.tensor([150, 150, 300]))
    votes = collect([(images, labels)]).members[0].probabilities
    np.testing.assert_allclose(votes[:300, :2], 0.5, atol=0.2)
    np.testing.assert_allclose(votes[300:, 2], 1, atol=0.02)


def test_scores_follow_from_the_pool_of_the_evidence() -> None:
    images, labels = examples()
    audit = IFComp(network()).audit([(images, labels)], progress=False)
    weights = audit.weights["weight"].to_numpy()
    pooled = (
        sum(weight * member.probabilities for weight, member in zip(weights, audit.evidence.members, strict=True))
        / weights.sum()
    )
    np.testing.assert_allclose(audit.pred_probs, pooled, rtol=1e-9)
    for row in audit.frame.itertuples():
        others = np.delete(pooled[row.Index], row.label)
        assert row.score == pytest.approx(np.log(others.max()) - np.log(pooled[row.Index, row.label]), abs=1e-9)


def wide_network() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(160, 4), nn.Tanh(), nn.Linear(4, CLASSES)))().double()


def wide_examples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(200, 160, generator=generator, dtype=torch.float64), torch.arange(200) % CLASSES


def test_neighbours_are_searched_among_the_leading_components() -> None:
    x, labels = wide_examples()
    evidence = collect([(x, labels)], network=wide_network)
    oracle = LayerOracle(x.numpy(), labels.numpy())
    assert oracle.components[0].shape == (200, COMPONENTS)
    np.testing.assert_array_equal(evidence.neighbours["input"], oracle.nearest(5))
    np.testing.assert_allclose(evidence.members[0].probabilities, oracle.votes(), rtol=1e-9)
    oracle.components = oracle.reference, oracle.queries
    assert (evidence.neighbours["input"] != oracle.nearest(5)).any()


@pytest.mark.parametrize("has_reference", [False, True])
def test_neighbours_among_a_sample_of_many_examples(has_reference: bool) -> None:
    images, labels = examples()
    others, given = examples(40, seed=1) if has_reference else (images, labels)
    evidence = collect([(images, labels)], [(others, given)] if has_reference else None, max_reference=18, seed=4)
    sample = np.unique(evidence.neighbours["input"])
    assert len(sample) == 18
    frequencies = np.bincount(given[sample], minlength=CLASSES) / 18
    count = int(np.median(np.bincount(given[sample])) / 2)
    raw, queries = others.flatten(1).numpy(), images.flatten(1).numpy()
    mean, deviation = raw.mean(0), raw.std(0)
    for index, query in enumerate((queries - mean) / deviation):
        rest = [other for other in sample if has_reference or other != index]
        rows = ((raw - mean) / deviation)[rest]
        cosines = rows @ query / np.linalg.norm(rows, axis=1)
        near = np.array(rest)[np.argsort(-cosines)[:count]]
        assert evidence.neighbours["input"][index].tolist() == near[:5].tolist()
        votes = np.bincount(given[near], minlength=CLASSES)
        np.testing.assert_allclose(evidence.members[0].probabilities[index], (votes + frequencies) / (count + 1))


# Batches and storage ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7])
@pytest.mark.parametrize("has_reference", [False, True])
def test_the_batch_size_does_not_matter(size: int, has_reference: bool) -> None:
    images, labels = examples()
    batches = list(zip(images.split(size), labels.split(size), strict=True))
    reference = examples(40, seed=2)
    parts = list(zip(reference[0].split(size), reference[1].split(size), strict=True))
    found, expected = (
        IFComp(network()).audit(data, reference=other if has_reference else None, progress=False)
        for data, other in ((batches, parts), ([(images, labels)], [reference]))
    )
    np.testing.assert_allclose(found.frame["score"], expected.frame["score"], atol=1e-6)
    assert found.suspects["index"].tolist() == expected.suspects["index"].tolist()
    assert len(expected.suspects) > 0


def test_a_memory_limit_does_not_matter() -> None:
    data = [examples()]
    found, expected = (IFComp(network()).audit(data, max_memory=limit, progress=False) for limit in ("50kB", None))
    np.testing.assert_allclose(found.frame["score"], expected.frame["score"], atol=1e-6)


def test_features_in_a_temporary_file_give_the_same_evidence() -> None:
    data, reference = [examples()], [examples(40, seed=2)]
    for base in (None, reference):
        found, expected = (collect(data, base, memory_bytes=size) for size in (0, 2**30))
        for member, other in zip(found.members, expected.members, strict=True):
            np.testing.assert_array_equal(member.probabilities, other.probabilities)


def test_another_seed_changes_nothing_without_projection_and_sampling() -> None:
    data = [examples()]
    for member, other in zip(collect(data).members, collect(data, seed=5).members, strict=True):
        np.testing.assert_array_equal(member.probabilities, other.probabilities)


# Data that cannot be audited ----------------------------------------------------------------------------------------


#: Reads before the last pass: two to compare the first batch, one to verify the model, and the first pass.
READS = 4


class Changing:
    """Data that differs between the passes."""

    def __init__(self, passes: Sequence[Sequence[tuple[Tensor, Tensor]]]) -> None:
        self.passes = list(passes)

    def __iter__(self) -> Any:
        return iter(self.passes.pop(0))


def changed(change: str) -> list[tuple[Tensor, Tensor]]:
    images, labels = examples()
    if change == "order":
        order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(0))
        images, labels = images[order], labels[order]
    elif change == "transform":
        images = images.flip(3)
    elif change == "one label":
        labels = labels.clone()
        labels[31] = (labels[31] + 1) % CLASSES
    elif change == "one pixel":  # the logits hardly change
        images = images.clone()
        images[31, 0, 2, 2] += 1e-4
    return [(images, labels)]


@pytest.mark.parametrize("change", ["order", "transform", "one label", "one pixel"])
def test_data_that_changes_between_the_passes_is_refused(change: str) -> None:
    once = [examples()]
    with pytest.raises(DataError, match="differ between the two passes"):
        IFComp(network()).audit(Changing([*[once] * READS, changed(change)]), progress=False)


def test_data_that_gets_longer_or_shorter_is_refused() -> None:
    (images, labels), last = examples(), examples(3)
    once, more, less = [(images, labels)], [(images, labels), last], [(images[:59], labels[:59])]
    for second in (more, less):
        with pytest.raises(LengthChangedError, match="60 examples"):
            IFComp(network()).audit(Changing([*[once] * READS, second]), progress=False)


def test_empty_data_is_refused() -> None:
    with pytest.raises(EmptyDataError, match="data is empty"):
        IFComp(network()).audit([], progress=False)
    with pytest.raises(EmptyDataError, match="reference is empty"):
        IFComp(network()).audit([examples()], reference=[], progress=False)


# Layers without features of one size --------------------------------------------------------------------------------


class Sometimes(nn.Module):
    """A layer per position of a sequence, and one more layer for long sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.extra, self.head = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(x))))
        if x.shape[1] > 5:
            hidden = torch.tanh(self.extra(hidden))
        return self.head(hidden.mean(1))[:, :CLASSES]


@pytest.mark.parametrize("is_long_first", [False, True])
def test_layers_without_features_of_one_size_for_all_examples_are_left_out(is_long_first: bool) -> None:
    """The raw input has several lengths, and one layer is not called for short sequences."""
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(12, size, 4, generator=generator), torch.arange(12) % CLASSES) for size in (7, 5)]
    model = seeded(Sometimes)()
    audit = IFComp(model).audit(batches if is_long_first else batches[::-1], progress=False)
    assert list(audit.weights["layer"].unique()) == ["second", "head", MODEL]


def test_layers_of_another_size_in_the_reference_are_left_out() -> None:
    generator = torch.Generator().manual_seed(0)
    data, reference = ([(torch.randn(12, size, 4, generator=generator), torch.arange(12) % CLASSES)] for size in (7, 6))
    audit = IFComp(seeded(Sometimes)()).audit(data, reference=reference, progress=False)
    assert list(audit.weights["layer"].unique()) == ["second", "extra", "head", MODEL]


def test_memory_of_the_predictors_does_not_grow_with_the_number_of_examples() -> None:
    """Neighbours of all examples at once would take 50 x 28 bytes per example."""
    peaks = {}
    for count in (20_000, 60_000):
        generator = np.random.default_rng(0)
        features = generator.normal(size=(count, 4)).astype(np.float32)
        labels = torch.from_numpy(features[:, 0] > 0).long()
        results = {name: np.zeros((count, 2), dtype=np.float32) for name in ("votes", "readout")}
        layer = _LayerData(features, features, labels, is_same=True)
        with Alive() as alive:
            nearest = _predict(layer, torch.arange(500), 0, results)
        peaks[count] = alive.peak
        assert nearest.shape == (count, 5)
        for probabilities in results.values():
            np.testing.assert_allclose(probabilities.sum(1), 1, rtol=1e-5)
    assert peaks[60_000] - peaks[20_000] < 40_000 * 50
