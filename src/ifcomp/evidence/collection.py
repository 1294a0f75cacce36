"""Collection of the evidence about labels: distributions of all predictors, and nearest neighbours per layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ifcomp.data.batches import Batch, as_batches
from ifcomp.distributed import all_gather_objects, all_reduce_sum, process_info, same_batches, shard_batches
from ifcomp.errors import DataError, EmptyDataError
from ifcomp.evidence.feature_maps import FeatureMap, Moments
from ifcomp.evidence.features import INPUT, TOKENS, FeatureReader, RawFeatures, check_count
from ifcomp.evidence.members import MODEL, Evidence, Member
from ifcomp.evidence.neighbours import find_neighbours, neighbour_count, votes
from ifcomp.evidence.readout import BLOCK_ROWS, Spectrum, find_spectrum, fit_readout
from ifcomp.evidence.seeds import seeded_order
from ifcomp.evidence.storage import MEMORY_BYTES, allocate
from ifcomp.progress import track

#: Number of principal components in which neighbours are searched.
COMPONENTS = 128

#: Largest number of examples among which neighbours are searched.
MAX_REFERENCE = 20_000

#: Number of nearest neighbours per example that are kept as an explanation.
KEPT_NEIGHBOURS = 5

#: Predictors of every layer.
_PREDICTORS = ("votes", "readout")

#: Largest allowed difference between the logits of two passes over the same data, relative to the largest logit.
_LOGIT_TOLERANCE = 1e-2


@dataclass(frozen=True)
class _Summary:
    """Results of the first pass.

    Attributes:
        labels: Given labels [n].
        logits: Logits [n, K].
        moments: Moments of the features by layer. Layers whose features differ in size between examples are missing.
    """

    labels: Tensor
    logits: Tensor
    moments: Mapping[str, Moments]


def collect_evidence(
    reader: FeatureReader,
    data: Iterable[Any],
    reference: Iterable[Any] | None = None,
    *,
    seed: int = 0,
    memory_bytes: int = MEMORY_BYTES,
    max_reference: int = MAX_REFERENCE,
    progress: bool | None = None,
) -> Evidence:
    """Read features in two passes, fit the predictors of every layer and evaluate them.

    Args:
        reader: Reader of the features.
        data: Labelled data with the same order in both passes.
        reference: Labelled data on which predictors are fitted; None fits them leave-one-out on ``data``.
        seed: Seed of projections and samples.
        memory_bytes: Memory limit of features and of distributions, in bytes each. Larger ones are in temporary files.
        max_reference: Largest number of examples among which neighbours are searched. More are sampled.
        progress: Show progress bars; None shows them on terminals.
    """
    progress = progress if process_info().rank == 0 else False
    summary = _summarise(reader, data, seed, "layer statistics", progress)
    base = summary
    if reference is not None:
        base = _summarise(reader, reference, seed, "statistics of the reference", progress)
    maps = _feature_maps(reader, base, summary)
    features = _store(reader, data, maps, summary, memory_bytes, "layer features", progress)
    base_features = features
    if reference is not None:
        title = "features of the reference"
        base_features = _store(reader, reference, maps, base, memory_bytes, title, progress)
    classes = summary.logits.shape[1]
    chosen = seeded_order(len(base.labels), max_reference, seed)  # equal neighbours are chosen at random
    names = [f"{layer}/{predictor}" for layer in maps for predictor in _PREDICTORS]
    distributions = allocate(len(summary.labels), dict.fromkeys(names, classes), _numpy_dtype(reader), memory_bytes)
    members: list[Member] = []
    neighbours: dict[str, np.ndarray] = {}
    for name in track(list(maps), "predictors", progress):
        layer = _LayerData(features[name], base_features[name], base.labels, reference is None)
        found = {predictor: distributions[f"{name}/{predictor}"] for predictor in _PREDICTORS}
        neighbours[name] = _predict(layer, chosen, seed, found)
        is_trained = name not in (INPUT, TOKENS)
        members += [Member(name, predictor, array, is_trained) for predictor, array in found.items()]
    members.append(Member(MODEL, MODEL, torch.softmax(summary.logits, 1).numpy()))
    return Evidence(summary.labels.numpy(), members, neighbours, base.labels.numpy(), reference is None)


@dataclass(frozen=True)
class _LayerData:
    """Features of one layer, and the labels that its predictors are fitted on.

    Attributes:
        features: Features of the data, [n, d].
        reference: Features of the reference, [m, d].
        labels: Labels of the reference, [m].
        is_same: Whether the reference is the data itself.
    """

    features: np.ndarray
    reference: np.ndarray
    labels: Tensor
    is_same: bool

    def rotate(self, spectrum: Spectrum) -> None:
        """Rotate all features by a spectrum, in place."""
        spectrum.rotate(self.features)
        if not self.is_same:
            spectrum.rotate(self.reference)


def _predict(layer: _LayerData, chosen: Tensor, seed: int, results: Mapping[str, np.ndarray]) -> np.ndarray:
    """Rotate the features in place, and fill in the distributions. Return positions of the nearest neighbours.

    Args:
        layer: Features of the layer.
        chosen: Positions of the reference examples among which neighbours are searched, by the leading principal
            components.
        seed: Seed of the sample on which the readout is chosen.
        results: Receive the distributions [n, K] of each predictor.
    """
    spectrum = find_spectrum(layer.reference)
    layer.rotate(spectrum)
    count, classes = len(layer.features), results["votes"].shape[1]
    readout = fit_readout(layer.reference, layer.labels, classes, spectrum, seed=seed)
    labels = layer.labels[chosen]
    reference, voters = torch.from_numpy(layer.reference[chosen.numpy(), :COMPONENTS]), neighbour_count(labels)
    own = torch.full((count,), -1)
    if layer.is_same:
        own[chosen] = torch.arange(len(chosen))
    nearest = np.empty((count, min(voters, KEPT_NEIGHBOURS)), dtype=np.int64)
    for start in range(0, count, BLOCK_ROWS):
        part = slice(start, start + BLOCK_ROWS)
        queries = torch.from_numpy(np.ascontiguousarray(layer.features[part, :COMPONENTS]))
        found = find_neighbours(queries, reference, voters, own[part])
        nearest[part] = chosen[found.indices[:, :KEPT_NEIGHBOURS]].numpy()
        results["votes"][part] = votes(found, labels, classes)
        given = layer.labels[part] if layer.is_same else None
        results["readout"][part] = readout.probabilities(layer.features[part], given)
    return nearest


def _summarise(reader: FeatureReader, data: Iterable[Any], seed: int, title: str, progress: bool | None) -> _Summary:
    """Run the first pass."""
    moments: dict[tuple[str, int], Moments] = {}
    rows: list[tuple[int, Tensor, Tensor]] = []

    def moments_of(key: tuple[str, int]) -> Moments:
        if key not in moments:
            name, size = key
            moments[key] = Moments(size, name == TOKENS, seed + reader.names.index(name))
        return moments[key]

    for part in reader.read(_batches(data, title, progress)):
        for name, features in part.features.items():
            moments_of((name, features.shape[1])).add(features)
        rows.append((part.position, part.labels, part.logits))
    gathered = all_gather_objects((rows, list(moments)))
    rows = sorted((row for part, _ in gathered for row in part), key=lambda row: row[0])
    if not rows:
        raise EmptyDataError("audit needs at least one example, but the data is empty.")
    labels, logits = torch.cat([row[1] for row in rows]), torch.cat([row[2] for row in rows])
    keys = sorted({key for _, part in gathered for key in part})
    for key in keys:
        moments_of(key).reduce()
    complete = {name: moments[name, size] for name, size in keys if moments[name, size].count == len(labels)}
    return _Summary(labels, logits, complete)


def _feature_maps(reader: FeatureReader, base: _Summary, data: _Summary) -> dict[str, FeatureMap]:
    """Return the feature maps of all layers with features of one size in data and reference that are not constant."""
    maps = {}
    for name in reader.names:
        if name in base.moments and name in data.moments and base.moments[name].size == data.moments[name].size:
            maps[name] = base.moments[name].feature_map(reader.recorder.dtype)
    return {name: found for name, found in maps.items() if found is not None}


def _numpy_dtype(reader: FeatureReader) -> np.dtype:
    return np.dtype(str(reader.recorder.dtype).removeprefix("torch."))


def _store(
    reader: FeatureReader,
    data: Iterable[Any],
    maps: Mapping[str, FeatureMap],
    summary: _Summary,
    memory_bytes: int,
    title: str,
    progress: bool | None,
) -> Mapping[str, np.ndarray]:
    """Run the second pass. Return the features [n, d] of every layer, on all processes."""
    count, sizes = len(summary.labels), {name: found.size for name, found in maps.items()}
    arrays = allocate(count, sizes, _numpy_dtype(reader), memory_bytes)
    seen = 0
    for part in reader.read(_batches(data, title, progress)):
        rows = slice(part.position, part.position + len(part.logits))
        seen = max(seen, rows.stop)
        check_count(count, max(count, seen))
        _check_repeated(part, summary.labels[rows], summary.logits[rows])
        for name, found in maps.items():
            arrays[name][rows] = found(part.features[name]).numpy()
    check_count(count, max(all_gather_objects(seen)))
    all_reduce_sum([torch.from_numpy(array) for array in arrays.values()])
    return arrays


def _check_repeated(part: RawFeatures, labels: Tensor, logits: Tensor) -> None:
    """Raise DataError if the second pass gives other labels or logits than the first."""
    difference = (part.logits - logits).abs().max()
    if not torch.equal(part.labels, labels) or difference > _LOGIT_TOLERANCE * logits.abs().max():
        last = part.position + len(labels) - 1
        raise DataError(
            f"Examples {part.position} to {last} differ between the two passes over the data: it is shuffled, or its "
            "inputs are transformed at random. Give data that is the same in every pass: use shuffle=False, and the "
            "transforms of evaluation instead of those of training."
        )


def _batches(data: Iterable[Any], title: str, progress: bool | None) -> Iterator[Batch]:
    """Iterate over this process's share of every batch, with a progress bar."""
    return shard_batches(same_batches(as_batches(track(data, title, progress))))
