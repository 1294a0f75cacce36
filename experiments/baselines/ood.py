"""Out-of-distribution scores of the detectors of pytorch-ood, for any classifier. Larger = less like the training data.

The detectors are those of the package (`detectors`). This file runs the classifier over the data once and gives each
detector the representation that it takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from functools import cached_property
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from experiments.baselines.detectors import (
    LEFT_OUT,
    OOD_BASELINES,
    OODBaseline,
    Representation,
    import_detectors,
)
from experiments.baselines.inference import Outputs, check_repeatable, run_data
from experiments.baselines.network import Network
from ifcomp.data.batches import Batch, as_batches
from ifcomp.data.checks import check_data, check_labels
from ifcomp.errors import DataError, EmptyDataError, NonFiniteError, SettingError
from ifcomp.layers.forward import evaluating
from ifcomp.progress import track

#: Methods of the package that fit to and score a representation.
_METHODS: Mapping[Representation, tuple[str, str]] = {
    "logits": ("fit_logits", "predict_logits"),
    "features": ("fit_features", "predict_features"),
    "maps": ("fit_feature_maps", "predict_feature_maps"),
    "head": ("fit", "predict"),
    "inputs": ("fit", "predict"),
}

#: Number of examples that a detector scores at once.
_BATCH_SIZE = 512


def ood_scores(
    name: str,
    model: nn.Module,
    train: Iterable[Any],
    loaders: Mapping[str, Iterable[Any]],
    *,
    parameters: Mapping[str, Any] | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> dict[str, NDArray[Any]]:
    """Return the scores of one detector for several data sets, each [N]. Larger = less like the training data.

    Args:
        name: Key of `OOD_BASELINES`.
        model: The classifier; its logits must be the output of its last Linear.
        train: Training data with labels; used by detectors that are fitted.
        loaders: Data sets by name; labels are ignored.
        parameters: Arguments of the detector, by the package's names; they replace the defaults.
        seed: Seed of detectors that draw random numbers (Gram's hold-out part).
        progress: Show a progress bar; None shows it on terminals.

    Raises:
        MissingPackageError: If pytorch-ood cannot be imported.
        SettingError: If there is no such detector or parameter.
        DataError: If the detector cannot be fitted to the data, or cannot read it.
    """
    return Detection(model, train, loaders, seed=seed, progress=progress).scores(name, parameters)


class Detection:
    """Data sets for several detectors. The classifier runs over each data set at most once for all of them."""

    def __init__(
        self,
        model: nn.Module,
        train: Iterable[Any],
        loaders: Mapping[str, Iterable[Any]],
        *,
        seed: int = 0,
        progress: bool | None = None,
    ) -> None:
        """Set model and data, as for `ood_scores`; nothing runs yet."""
        for loader in (train, *loaders.values()):
            check_data(loader)
            check_repeatable(loader)
        first = next(iter(train), None)
        if first is None:
            raise EmptyDataError("The training data is empty.")
        self._network, self._seed = Network(model, first), seed
        self._known = _Data(self._network, train, labels=True, progress=progress)
        self._tests = {
            key: _Data(self._network, data, labels=False, progress=progress) for key, data in loaders.items()
        }

    def scores(self, name: str, parameters: Mapping[str, Any] | None = None) -> dict[str, NDArray[Any]]:
        """Return the scores of one detector for every data set, each [N]. Larger = less like the training data."""
        _check(name)
        network, baseline = self._network, OOD_BASELINES[name]
        detector = baseline.build(network, parameters or {})
        with evaluating(network.model), torch.inference_mode(False):
            if baseline.fit is not None:
                _fit(name, detector, baseline.fit, self._known, network.head.out_features, self._seed)
            return {key: _predict(name, key, detector, baseline, test) for key, test in self._tests.items()}

    def features(self, key: str | None) -> Tensor:
        """Return the penultimate features of a data set, [N, D]; None is the training data."""
        return (self._known if key is None else self._tests[key]).read("features")

    def logits(self, key: str) -> Tensor:
        """Return the logits of a data set in float64, [N, K]."""
        return self._tests[key].read("logits")


class _Data:
    """A data set, run through the network at most once."""

    def __init__(self, network: Network, data: Iterable[Any], labels: bool, progress: bool | None) -> None:
        self._network, self._data, self._labels, self._progress = network, data, labels, progress

    @cached_property
    def outputs(self) -> Outputs:
        """Logits, features and labels."""
        return run_data(
            self._network.model, self._data, labels=self._labels, head=self._network.head, progress=self._progress
        )

    def read(self, representation: Representation) -> Tensor:
        """Return logits in float64, or features in float32 as the package takes them."""
        if representation == "logits":
            return self.outputs.logits.double()
        assert self.outputs.features is not None
        features = self.outputs.features.float()
        return features[:, :, None, None] if representation == "maps" else features

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield inputs and labels of every batch."""
        for batch in as_batches(track(self._data, "detecting", self._progress)):
            labels = check_labels(batch, self._network.head.out_features) if self._labels else None
            yield _image(batch), labels

    def __len__(self) -> int:
        return len(self._data) if isinstance(self._data, Sized) else 0


def _check(name: str) -> None:
    if name not in OOD_BASELINES:
        reason = f" {name} {LEFT_OUT[name]}." if name in LEFT_OUT else ""
        raise SettingError(f"There is no detector {name}.{reason} There are: {', '.join(OOD_BASELINES)}.")
    import_detectors()


def _fit(name: str, detector: Any, representation: Representation, train: _Data, num_classes: int, seed: int) -> None:
    method = getattr(detector, _METHODS[representation][0])
    if detector.device is None:
        detector.to("cpu")  # the package would choose the same and log it
    arguments = (train,) if representation == "inputs" else (train.read(representation), train.outputs.labels)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            method(*arguments)
    except (AssertionError, ValueError) as error:
        raise DataError(
            f"{name} cannot be fitted to the training data ({error or 'a class has no example'}). It may need more "
            f"examples, and examples of each of the {num_classes} classes."
        ) from error


def _predict(name: str, key: str, detector: Any, baseline: OODBaseline, test: _Data) -> NDArray[Any]:
    method = getattr(detector, _METHODS[baseline.score][1])
    if baseline.score == "inputs":
        parts = [method(x) for x, _ in test]
    else:
        inputs = test.read(baseline.score)
        anchors = torch.eye(inputs.shape[1]).to(inputs) if baseline.anchored else inputs[:0]
        with torch.no_grad():
            parts = [method(torch.cat([part, anchors]))[: len(part)] for part in inputs.split(_BATCH_SIZE)]
    if not parts:
        raise EmptyDataError(f"There is no example to score: data set '{key}' is empty.")
    scores = torch.cat([part.detach().double().cpu() for part in parts])
    if not scores.isfinite().all():
        raise NonFiniteError(
            f"{name} gives NaN or infinity for example {int((~scores.isfinite()).nonzero()[0])} of '{key}'. "
            "Leave the detector out, or change its parameters."
        )
    return scores.numpy()


def _image(batch: Batch) -> Tensor:
    """Return the inputs as one floating-point tensor, or raise DataError."""
    if batch.kwargs or len(batch.args) != 1 or not batch.args[0].is_floating_point():
        raise DataError(
            "This detector is applied to the inputs, which must be one floating-point tensor x. For other inputs use "
            "a detector that reads logits or features."
        )
    image: Tensor = batch.args[0]
    return image
