"""Collection of the evidence about labels: distributions of all predictors, and nearest neighbours per layer.

A checkpoint contains the statistics of the first pass and the neighbours of finished layers. Features and distributions
are in files beside it. A resumed run continues with the next batch of a pass, or with the next layer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ifcomp.data.batches import Batch, as_batches
from ifcomp.data.digests import DataDigest
from ifcomp.distributed import all_gather_objects, all_reduce_sum, process_info, same_batches, shard_batches
from ifcomp.errors import DataError, EmptyDataError
from ifcomp.evidence.feature_maps import FeatureMap, Moments
from ifcomp.evidence.features import INPUT, TOKENS, FeatureReader, RawFeatures, check_count
from ifcomp.evidence.members import MODEL, Evidence, Member
from ifcomp.evidence.neighbours import find_neighbours, neighbour_count, votes
from ifcomp.evidence.readout import BLOCK_ROWS, Spectrum, find_spectrum, fit_readout
from ifcomp.evidence.seeds import seeded_order
from ifcomp.evidence.storage import MEMORY_BYTES, allocate, append_digest, check_digests, copied
from ifcomp.io.resumable import NO_CHECKPOINT, ResumableWork
from ifcomp.progress import track

#: Number of principal components in which neighbours are searched.
COMPONENTS = 128

#: Largest number of examples among which neighbours are searched.
MAX_REFERENCE = 20_000

#: Number of nearest neighbours per example that are kept as an explanation.
KEPT_NEIGHBOURS = 5

#: Predictors of every layer.
_PREDICTORS = ("votes", "readout")

#: Names of the audited data and of the reference.
_DATA, _REFERENCE = "data", "reference"

#: The last stage of the work.
_PREDICTING = "predictors"

#: Largest allowed difference between the logits of two passes over the same data, relative to the largest logit.
_LOGIT_TOLERANCE = 1e-2


def stages(has_reference: bool) -> list[str]:
    """Names of the stages of the work, in order."""
    sources = [_DATA, _REFERENCE] if has_reference else [_DATA]
    return [*map(_statistics_of, sources), *map(_features_of, sources), _PREDICTING]


def _statistics_of(source: str) -> str:
    return f"statistics of the {source}"


def _features_of(source: str) -> str:
    return f"features of the {source}"


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


class _Statistics:
    """Statistics that the first pass accumulates.

    Args:
        reader: Reader of the features.
        source: Name of the data.
        seed: Seed of projections.
    """

    def __init__(self, reader: FeatureReader, source: str, seed: int) -> None:
        self._reader, self._source, self._seed = reader, source, seed
        self._moments: dict[tuple[str, int], Moments] = {}
        self._rows: list[tuple[int, Tensor, Tensor]] = []

    def add(self, part: RawFeatures) -> None:
        """Add the examples of a microbatch."""
        for name, features in part.features.items():
            self._moments_of((name, features.shape[1])).add(features)
        self._rows.append((part.position, part.labels, part.logits))

    def tensors(self) -> dict[str, Tensor]:
        """Return all statistics. Names begin with the name of the data."""
        found = {}
        if self._rows:
            labels, logits = torch.cat([row[1] for row in self._rows]), torch.cat([row[2] for row in self._rows])
            self._rows = [(self._rows[0][0], labels, logits)]
            found = {"labels": labels, "logits": logits}
        for (name, size), moments in self._moments.items():
            found |= {f"{size}/{key}/{name}": value.clone() for key, value in moments.state().items()}
        return {f"{self._source}/{key}": value for key, value in found.items()}

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """Restore what `tensors` returned."""
        prefix, grouped = f"{self._source}/", defaultdict[tuple[str, int], dict[str, Tensor]](dict)
        found = {name.removeprefix(prefix): value for name, value in saved.items() if name.startswith(prefix)}
        if not found:
            return
        self._rows = [(0, found.pop("labels"), found.pop("logits"))]
        for entry, value in found.items():
            size, key, name = entry.split("/", 2)
            grouped[name, int(size)][key] = value
        for layer, state in grouped.items():
            self._moments_of(layer).restore(state)

    def reduced(self) -> _Summary:
        """Combine the statistics of all processes."""
        gathered = all_gather_objects((self._rows, list(self._moments)))
        rows = sorted((row for part, _ in gathered for row in part), key=lambda row: row[0])
        if not rows:
            raise EmptyDataError("audit needs at least one example, but the data is empty.")
        labels, logits = torch.cat([row[1] for row in rows]), torch.cat([row[2] for row in rows])
        keys = sorted({key for _, part in gathered for key in part})
        found = {key: self._moments_of(key) for key in keys}
        for moments in found.values():
            moments.reduce()
        complete = {name: moments for (name, _), moments in found.items() if moments.count == len(labels)}
        return _Summary(labels, logits, complete)

    def _moments_of(self, layer: tuple[str, int]) -> Moments:
        """Return the moments of a layer for one number of features."""
        if layer not in self._moments:
            name, size = layer
            self._moments[layer] = Moments(size, name == TOKENS, self._seed + self._reader.names.index(name))
        return self._moments[layer]


@dataclass(frozen=True)
class _Passes:
    """The two passes over the data and over the reference.

    Attributes:
        reader: Reader of the features.
        seed: Seed of projections.
        memory_bytes: Memory limit of features, in bytes.
        progress: Show progress bars.
        work: Saves statistics from time to time.
        data_digests: Digest of the data of each first pass in this process, by the name of the data.
    """

    reader: FeatureReader
    seed: int
    memory_bytes: int
    progress: bool | None
    work: ResumableWork
    data_digests: dict[str, DataDigest] = field(default_factory=dict)

    def summarise(self, source: str, data: Iterable[Any], known: dict[str, Tensor]) -> _Summary:
        """Run the first pass, or restore its results.

        Args:
            source: Name of the data.
            data: The data.
            known: Results of earlier stages, to which the statistics are added.
        """
        stage, statistics = _statistics_of(source), _Statistics(self.reader, source, self.seed)
        statistics.restore(self.work.begin_stage(stage, statistics.tensors, known))
        if not self.work.is_complete(stage):
            self.data_digests[source] = digest = DataDigest()
            for part in self.reader.read(self._batches(source, data, stage, digest)):
                statistics.add(part)
        summary = statistics.reduced()
        if self.work.folder is not None:
            known |= statistics.tensors()
        return summary

    def store(
        self,
        source: str,
        data: Iterable[Any],
        maps: Mapping[str, FeatureMap],
        summary: _Summary,
        known: Mapping[str, Tensor],
    ) -> Mapping[str, np.ndarray]:
        """Run the second pass. Return the features [n, d] of every layer, on all processes.

        Args:
            source: Name of the data.
            data: The data.
            maps: Feature maps of the layers.
            summary: Results of the first pass.
            known: Results of earlier stages.
        """
        count, stage, seen, again = len(summary.labels), _features_of(source), 0, DataDigest()
        sizes = {name: found.size for name, found in maps.items()}
        row_digests = self.row_digests(stage)

        def state() -> dict[str, Tensor]:
            _flush(arrays)
            append_digest(row_digests, list(arrays.values()), seen)
            return {"seen": torch.tensor(seen)}

        saved = self.work.begin_stage(stage, state, known)
        arrays = self.allocate(count, sizes, source, bool(saved))
        check_digests(row_digests, list(arrays.values()), stage)
        if self.work.is_complete(stage):
            self.work.check_batches(as_batches(data), source)
            return arrays
        seen = int(saved.get("seen", 0))
        for part in self.reader.read(self._batches(source, data, stage, again)):
            rows = slice(part.position, part.position + len(part.logits))
            seen = max(seen, rows.stop)
            check_count(count, max(count, seen))
            _check_repeated(part, summary.labels[rows], summary.logits[rows])
            for name, found in maps.items():
                arrays[name][rows] = found(part.features[name]).numpy()
        check_count(count, max(all_gather_objects(seen)))
        if source in self.data_digests and self.data_digests[source].in_order != again.in_order:
            raise _other_data("Inputs or labels")
        all_reduce_sum([torch.from_numpy(array) for array in arrays.values()])
        if self.work.folder is not None:
            append_digest(row_digests, list(arrays.values()), count)
        return arrays

    def row_digests(self, name: str) -> list[list[Any]]:
        """Return the digests of the rows of a file, which every checkpoint contains."""
        row_digests: list[list[Any]] = self.work.settings.setdefault(f"digests of {name}", [])
        return row_digests

    def allocate(self, rows: int, sizes: Mapping[str, int], name: str, reopen: bool) -> dict[str, np.ndarray]:
        """Return arrays [rows, size], which are in files beside the checkpoint if there is one; see `allocate`."""
        files = None if self.work.folder is None else self.work.folder / name
        return allocate(rows, sizes, _numpy_dtype(self.reader), self.memory_bytes, files, reopen=reopen)

    def _batches(self, source: str, data: Iterable[Any], title: str, digest: DataDigest) -> Iterator[Batch]:
        """Iterate over this process's share of every remaining batch, with a progress bar. The digest has all."""
        batches = same_batches(as_batches(track(data, title, self.progress)))
        return shard_batches(self.work.remaining_batches(batches, digest, source))


def _flush(arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays that are in files to the disk."""
    for array in arrays.values():
        if isinstance(array, np.memmap):
            array.flush()


def collect_evidence(
    reader: FeatureReader,
    data: Iterable[Any],
    reference: Iterable[Any] | None = None,
    *,
    seed: int = 0,
    memory_bytes: int = MEMORY_BYTES,
    max_reference: int = MAX_REFERENCE,
    progress: bool | None = None,
    work: ResumableWork = NO_CHECKPOINT,
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
        work: Saves results from time to time; its stages are `stages`. Only for one process.
    """
    progress = progress if process_info().rank == 0 else False
    passes, known = _Passes(reader, seed, memory_bytes, progress, work), dict[str, Tensor]()
    base = summary = passes.summarise(_DATA, data, known)
    if reference is not None:
        base = passes.summarise(_REFERENCE, reference, known)
    maps = _feature_maps(reader, base, summary)
    base_features = features = passes.store(_DATA, data, maps, summary, known)
    if reference is not None:
        base_features = passes.store(_REFERENCE, reference, maps, base, known)
    classes = summary.logits.shape[1]
    chosen = seeded_order(len(base.labels), max_reference, seed)  # equal neighbours are chosen at random
    names = [f"{layer}/{predictor}" for layer in maps for predictor in _PREDICTORS]
    members: list[Member] = []
    neighbours: dict[str, np.ndarray] = {}

    def state() -> dict[str, Tensor]:
        _flush(distributions)
        return {f"neighbours/{name}": torch.from_numpy(found) for name, found in neighbours.items()}

    saved = work.begin_stage(_PREDICTING, state, known)
    sizes = dict.fromkeys(names, classes)
    distributions = passes.allocate(len(summary.labels), sizes, "distributions", bool(saved))
    for name in track(list(maps), "predictors", progress):
        found = {predictor: distributions[f"{name}/{predictor}"] for predictor in _PREDICTORS}
        row_digests = passes.row_digests(name)
        if f"neighbours/{name}" in saved:
            neighbours[name] = saved[f"neighbours/{name}"].numpy()
            check_digests(row_digests, list(found.values()), f"distributions of {name}")
        else:
            layer = _layer_data(features[name], base_features[name], base.labels, work)
            neighbours[name] = _predict(layer, chosen, seed, found)
            if work.folder is not None:
                append_digest(row_digests, list(found.values()), len(summary.labels))
            work.save_if_due()
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


def _layer_data(features: np.ndarray, reference: np.ndarray, labels: Tensor, work: ResumableWork) -> _LayerData:
    """Return the features of a layer, which are then rotated in place: copies if a resumed run needs the originals."""
    is_same = features is reference
    if work.folder is not None:
        features = copied(features)
        reference = features if is_same else copied(reference)
    return _LayerData(features, reference, labels, is_same)


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


def _feature_maps(reader: FeatureReader, base: _Summary, data: _Summary) -> dict[str, FeatureMap]:
    """Return the feature maps of all layers with features of one size in data and reference that are not constant."""
    maps = {}
    for name in reader.names:
        if name in base.moments and name in data.moments and base.moments[name].size == data.moments[name].size:
            maps[name] = base.moments[name].feature_map(reader.recorder.dtype)
    return {name: found for name, found in maps.items() if found is not None}


def _numpy_dtype(reader: FeatureReader) -> np.dtype:
    """The dtype of features and distributions."""
    return np.dtype(str(reader.recorder.dtype).removeprefix("torch."))


def _check_repeated(part: RawFeatures, labels: Tensor, logits: Tensor) -> None:
    """Raise DataError if the second pass gives other labels or logits than the first."""
    difference = (part.logits - logits).abs().max()
    if not torch.equal(part.labels, labels) or difference > _LOGIT_TOLERANCE * logits.abs().max():
        raise _other_data(f"Examples {part.position} to {part.position + len(labels) - 1}")


def _other_data(what: str) -> DataError:
    return DataError(
        f"{what} differ between the two passes over the data: it is shuffled, or its inputs are transformed at random. "
        "Give data that is the same in every pass: use shuffle=False, and the transforms of evaluation instead of "
        "those of training."
    )
