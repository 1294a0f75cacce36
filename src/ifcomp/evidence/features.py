"""Features of the layers of a model: pooled inputs of weight layers, raw inputs and counts of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from ifcomp.data.batches import Batch
from ifcomp.errors import LengthChangedError
from ifcomp.evidence.members import MODEL
from ifcomp.layers.layer import Layer, pool_positions
from ifcomp.layers.layout import Layout
from ifcomp.layers.recorder import Recorder
from ifcomp.layers.recording import Recording
from ifcomp.microbatches import Microbatches, check_batch

#: Name of the raw input among the layers.
INPUT = "input"

#: Name of the counts of tokens among the layers: the inputs of all embeddings.
TOKENS = "tokens"

#: Largest number of layers, in addition to raw input and token counts.
MAX_LAYERS = 8

#: Number of positions per axis of the pooled raw image.
_INPUT_GRID = 8


@dataclass(frozen=True)
class RawFeatures:
    """Features of one microbatch before standardisation.

    Attributes:
        position: Index of the first example.
        features: Features [B, D] by layer, on the CPU. Layers without a call in this microbatch are missing.
        logits: Logits [B, K] in float64.
        labels: Given labels [B].
    """

    position: int
    features: Mapping[str, Tensor]
    logits: Tensor
    labels: Tensor


class FeatureReader:
    """Reader of the features of a model.

    Attributes:
        recorder: Recorder of the model.
        layers: Chosen layers: embeddings, then at most `MAX_LAYERS` others in the order of the forward pass.
        has_input: Whether the model has floating-point inputs, which are features too.
        microbatches: Splits batches into microbatches.
    """

    def __init__(self, recorder: Recorder, first: Batch, limit: int | None = None) -> None:
        """Choose the layers from the first batch.

        Args:
            recorder: Recorder of the model.
            first: First batch of the data.
            limit: Memory limit of the tensors of a microbatch, in bytes; None for no limit.
        """
        self.recorder = recorder
        self.microbatches = Microbatches(recorder.device, limit=limit, repeat_trials=True)
        examples = replace(first.select(slice(0, 2)), shared=recorder.shared).to(recorder.device)
        with recorder.attached():
            recording = recorder.record(examples)
            chosen = _choose(recording, recorder.inventory.layers, examples)
        self.layers: tuple[Layer, ...] = chosen
        self.has_input = _input_features(examples, recorder.dtype) is not None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the raw input and of the counts of tokens, if any, and of the other layers."""
        has_tokens = any(layer.counts_tokens for layer in self.layers)
        untrained = (*((INPUT,) if self.has_input else ()), *((TOKENS,) if has_tokens else ()))
        return (*untrained, *(_feature_name(layer) for layer in self.layers if not layer.counts_tokens))

    def read(self, batches: Iterable[Batch]) -> Iterator[RawFeatures]:
        """Run the model on labelled batches and iterate over the raw features of microbatches, in order."""
        for batch in batches:
            checked = replace(check_batch(batch, self.recorder.num_classes, "needed"), shared=self.recorder.shared)
            yield from self.microbatches.run(checked, 1, lambda part, _: self._read(part), "features")

    def _read(self, batch: Batch) -> RawFeatures:
        with self.recorder.attached():
            recording = self.recorder.record(batch)
            with self.recorder.computing():
                kept = self._kept_positions(recording, batch)
                values = {layer: _layer_features(recording, layer, kept) for layer in self.layers}
                found = {_feature_name(layer): value for layer, value in values.items() if not layer.counts_tokens}
                counts = [value for layer, value in values.items() if layer.counts_tokens and value is not None]
                if counts:
                    found[TOKENS] = torch.cat(counts, 1)
                if self.has_input:
                    found[INPUT] = _input_features(batch, self.recorder.dtype)
                features = {name: value.cpu() for name, value in found.items() if value is not None}
                logits = recording.logits.detach().cpu().double()
        assert batch.labels is not None
        return RawFeatures(batch.position, features, logits, batch.labels.cpu())

    def _kept_positions(self, recording: Recording, batch: Batch) -> Tensor | None:
        """Return the positions that are not padding, [B, T]: from ``attention_mask``, else from a layer, else None."""
        mask = batch.kwargs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() == 2:
            return mask != 0
        for layer in self.recorder.inventory.layers:
            if layer.name in recording.calls:
                kept = layer.kept_positions(recording.values(layer)[0])
                if kept is not None:
                    return kept
        return None


def _choose(recording: Recording, layers: Sequence[Layer], batch: Batch) -> tuple[Layer, ...]:
    """Choose the layers with features. Layers with the same input are represented by the first of them."""
    known = {_storage(value) for value in batch.tensors() if value.is_floating_point()}
    by_name = {layer.name: layer for layer in layers}
    found: list[Layer] = []
    for name, calls in recording.calls.items():
        key = _storage(calls[0].value)
        if name not in by_name or recording.layouts[name] is Layout.SHARED or key in known:
            continue
        if _layer_features(recording, by_name[name], None) is not None:
            known.add(key)
            found.append(by_name[name])
    tokens = [layer for layer in found if layer.counts_tokens]
    others = [layer for layer in found if not layer.counts_tokens]
    spread = np.unique(np.linspace(0, len(others) - 1, min(MAX_LAYERS, len(others))).round().astype(int))
    return (*tokens, *(others[index] for index in spread))


def _feature_name(layer: Layer) -> str:
    """Return the name of a layer, distinct from the names of untrained features and of the model."""
    return f"{layer.name} (layer)" if layer.name in (INPUT, TOKENS, MODEL) else layer.name


def _storage(value: Tensor) -> tuple[object, ...]:
    """Return a key of the elements of a tensor in memory. It does not depend on shape and order of axes."""
    axes: list[tuple[int, int]] = []
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True), reverse=True):
        if axes and axes[-1][0] == stride * size:
            axes[-1] = stride, axes[-1][1] * size
        elif size > 1:
            axes.append((stride, size))
    return value.data_ptr(), *axes


def _layer_features(recording: Recording, layer: Layer, kept: Tensor | None) -> Tensor | None:
    """Return the mean features over the calls of a layer, [B, D]; None for layers without features or calls.

    If the calls have features of several sizes, only those with the size of the first call count.
    """
    if layer.name not in recording.calls:
        return None
    values = []
    for value, used in zip(recording.values(layer), recording.used_rows(layer), strict=True):
        value = value.to(recording.dtype) if value.is_floating_point() else value
        values.append(layer.features(value, kept if used is None else used))
    found = [
        value for value in values if value is not None and values[0] is not None and value.shape == values[0].shape
    ]
    return torch.stack(found).mean(0).to(recording.dtype) if found else None


def _input_features(batch: Batch, dtype: torch.dtype) -> Tensor | None:
    """Return all floating-point inputs with a batch axis, [B, D]; None without any. Images and videos are pooled."""
    parts = []
    batched = batch.batched().values()
    for value, has_axis in zip(batch.tensors(), batched, strict=True):
        if has_axis and value.is_floating_point():
            values = value.to(dtype)
            parts.append(pool_positions(values, _INPUT_GRID) if value.dim() > 3 else values.reshape(len(values), -1))
    return torch.cat(parts, 1) if parts else None


@contextmanager
def all_trainable(model: nn.Module) -> Iterator[None]:
    """Set ``requires_grad`` of all parameters within the context, so that frozen layers are recorded too."""
    frozen = [value for value in model.parameters() if value.is_floating_point() and not value.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def check_count(expected: int, actual: int) -> None:
    """Raise LengthChangedError if the numbers of examples of both passes differ."""
    if expected != actual:
        raise LengthChangedError(
            f"The first pass over the data has {expected:,} examples, the second {actual:,}. Give data that can be "
            "iterated over twice: a DataLoader or a list of batches, not a generator."
        )
