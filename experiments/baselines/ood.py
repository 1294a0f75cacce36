"""Out-of-distribution detectors of pytorch-ood on any classifier. Larger = less like the training data.

The detectors are the package's own; here a classifier is taken apart for them (penultimate features, head, stages) and
run over the data once. Parameters are the package's defaults, with three exceptions where it has none or where its
default is not what was published: DICE masks p = 0.9 of the weights, ViM keeps half of the features' dimensions, and
GradNorm and GradUncertainty take the gradient of the head alone, as in OpenOOD. None is tuned; ``parameters=`` sets
what was chosen on validation data. All need only the trained model; those that are fitted also need one forward pass
over the training data, with labels.

| baseline | fitted | reads | forward passes per example |
|---|---|---|---|
| MSP | no | logits | 1 |
| MaxLogit | no | logits | 1 |
| Energy | no | logits | 1 |
| Entropy | no | logits | 1 |
| GEN | no | logits | 1 |
| KLMatching | yes | logits | 1 |
| OpenMax | yes | logits | 1 |
| KNN | yes | penultimate features | 1, and a search among the training features |
| Mahalanobis | yes | penultimate features | 1 |
| RMD | yes | penultimate features | 1 |
| GMM | yes | penultimate features | 1 |
| ViM | yes | penultimate features | 1 |
| DICE | yes | penultimate features | 1 |
| fDBD | yes | penultimate features | 1 |
| NCI | yes | penultimate features | 1 |
| NNGuide | yes | penultimate features | 1, and a search among the training features |
| PNML | yes | penultimate features | 1 |
| SHE | yes | penultimate features | 1 |
| LTS | no | penultimate features | 1 |
| ASH | no | penultimate features | 1 |
| SCALE | no | penultimate features | 1 |
| ReAct | yes | penultimate features | 1 |
| VRA | yes | penultimate features | 1 |
| GradNorm | no | gradient of the head's weight | 1 |
| GradUncertainty | no | gradient of the head | 1 |
| ODIN | no | inputs, moved along their gradient | 3 |
| MahalanobisODIN | yes | inputs, moved along their gradient | 3 |
| Gram | yes | feature maps of every resolution | 1, and their Gram matrices |
| NAC | yes | feature maps of every resolution and their gradients | 1 + the number of resolutions |

`LEFT_OUT` says which detectors of the package are not here, and why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from functools import cached_property
from types import ModuleType
from typing import Any, Literal

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from experiments.baselines.features import Outputs, run_data
from experiments.baselines.losses import check_repeatable
from experiments.baselines.network import Chain, Network
from ifcomp.data.batches import Batch, as_batches
from ifcomp.data.checks import check_data, check_labels
from ifcomp.errors import DataError, EmptyDataError, MissingPackageError, NonFiniteError, SettingError
from ifcomp.layers.forward import evaluating
from ifcomp.progress import track

Representation = Literal["logits", "features", "maps", "head", "inputs"]

#: Names of the package's methods that fit to and score a representation.
_METHODS: Mapping[Representation, tuple[str, str]] = {
    "logits": ("fit_logits", "predict_logits"),
    "features": ("fit_features", "predict_features"),
    "maps": ("fit_feature_maps", "predict_feature_maps"),
    "head": ("fit", "predict"),
    "inputs": ("fit", "predict"),
}

#: Examples that a detector scores at once.
_AT_ONCE = 512


@dataclass(frozen=True)
class OODBaseline:
    """How a detector of pytorch-ood is made and used.

    Attributes:
        detector: Name of the class.
        fit: What it is fitted to; None if it is not.
        score: What it scores.
        arguments: Of its constructor, beside the package's defaults.
        anchored: Whether an input of each class is scored along with every batch, and dropped. The package's OpenMax
            knows distances only to classes that are predicted in the batch.
    """

    detector: str
    fit: Representation | None
    score: Representation
    arguments: Callable[[Network], dict[str, Any]]
    anchored: bool = False

    def build(self, network: Network, parameters: Mapping[str, Any]) -> Any:
        """The detector, not yet fitted."""
        arguments = {**self.arguments(network), **parameters}
        try:
            return getattr(_package(), self.detector)(**arguments)
        except (TypeError, ValueError, AssertionError) as error:
            raise SettingError(f"{self.detector} cannot be made with {dict(parameters)}: {error}.") from error


def _on_logits(detector: str, fitted: bool = False) -> OODBaseline:
    return OODBaseline(detector, "logits" if fitted else None, "logits", lambda _: {"model": None})


def _on_features(
    detector: str, arguments: Callable[[Network], dict[str, Any]] = lambda _: {}, fitted: bool = True
) -> OODBaseline:
    return OODBaseline(
        detector, "features" if fitted else None, "features", lambda network: {"encoder": None, **arguments(network)}
    )


def _on_maps(detector: str, fitted: bool) -> OODBaseline:
    return OODBaseline(
        detector, "maps" if fitted else None, "maps", lambda network: {"backbone": None, "head": network.head_on_maps}
    )


def _head(network: Network) -> dict[str, Any]:
    return {"head": network.head_copy}


def _head_weight(network: Network) -> dict[str, Any]:
    return {"model": network.head_copy, "param_filter": lambda parameter: parameter == "weight"}


def _gram(network: Network) -> dict[str, Any]:
    chain = Chain(network)
    return {"head": chain.logits, "feature_layers": chain.links, "num_classes": network.head.out_features}


#: Every detector of pytorch-ood that needs only a model and its training data, by the name it has in tables.
OOD_BASELINES: Mapping[str, OODBaseline] = {
    "MSP": _on_logits("MaxSoftmax"),
    "MaxLogit": _on_logits("MaxLogit"),
    "Energy": _on_logits("EnergyBased"),
    "Entropy": _on_logits("Entropy"),
    "GEN": _on_logits("GEN"),
    "KLMatching": _on_logits("KLMatching", fitted=True),
    "OpenMax": replace(_on_logits("OpenMax", fitted=True), anchored=True),
    "KNN": _on_features("KNN"),
    "Mahalanobis": _on_features("Mahalanobis"),
    "RMD": _on_features("RMD"),
    "GMM": _on_features("GMM"),
    "ViM": _on_features("ViM", lambda network: {"d": network.head.in_features // 2, **network.weight_and_bias}),
    "DICE": _on_features("DICE", lambda network: {"p": 0.9, **network.weight_and_bias}),
    "fDBD": _on_features("fDBD", _head),
    "NCI": _on_features("NCI", _head),
    "NNGuide": _on_features("NNGuide", _head),
    "PNML": _on_features("PNML", _head),
    "SHE": _on_features("SHE", _head),
    "LTS": _on_features("LTS", _head, fitted=False),
    "ASH": _on_maps("ASH", fitted=False),
    "SCALE": _on_maps("SCALE", fitted=False),
    "ReAct": _on_maps("ReAct", fitted=True),
    "VRA": _on_maps("VRA", fitted=True),
    "GradNorm": OODBaseline("GradNorm", None, "head", _head_weight),
    "GradUncertainty": OODBaseline("GradUncertainty", None, "head", lambda network: {"model": network.head_copy}),
    "ODIN": OODBaseline("ODIN", None, "inputs", lambda network: {"model": network.logits}),
    "MahalanobisODIN": OODBaseline(
        "MahalanobisODIN", "features", "inputs", lambda network: {"encoder": network.encode}
    ),
    "Gram": OODBaseline("Gram", "inputs", "inputs", _gram),
    "NAC": OODBaseline(
        "NACUE", "inputs", "inputs", lambda network: {"model": network.logits, "layers": network.stages}
    ),
}

#: Detectors of pytorch-ood that are not among the baselines.
LEFT_OUT: Mapping[str, str] = {
    "MCD": "needs a network with dropout and many random passes; see the predictive baselines",
    "MCM": "needs embeddings of the class names by a vision-language model",
    "MultiMahalanobis": "the weights of its layers have to be chosen on out-of-distribution data",
    "RankFeat": "needs the rest of the network as a function of its last feature maps",
    "TemperatureScaling": "orders inputs nearly as MSP does, and is fitted to held-out labels",
    "WeightedEBO": "needs weights of the classes that only a special training loss gives",
}


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
    """Outlier scores of one detector for several data sets, each [N] in order. Larger = less like the training data.

    Args:
        name: One of `OOD_BASELINES`.
        model: The classifier; its logits must be the output of its last Linear.
        train: Training data with labels; only looked at by detectors that are fitted.
        loaders: Data sets by name; labels are not looked at.
        parameters: Of the detector, by the package's names, in the place of defaults.
        seed: Of detectors that draw random numbers (Gram's hold-out part).
        progress: Show a progress bar; None shows it on terminals.

    Raises:
        MissingPackageError: If pytorch-ood cannot be imported.
        SettingError: If there is no such detector or parameter.
        DataError: If the detector cannot be fitted to the data, or cannot read it.
    """
    network, data = _prepare([name], model, train, loaders, progress)
    return _scores(name, network, data, parameters or {}, seed)


def all_ood_scores(
    model: nn.Module,
    train: Iterable[Any],
    loaders: Mapping[str, Iterable[Any]],
    names: Sequence[str] = tuple(OOD_BASELINES),
    *,
    seed: int = 0,
    progress: bool | None = None,
) -> dict[str, dict[str, NDArray[Any]]]:
    """`ood_scores` of several detectors, which share the forward passes: scores by detector and data set."""
    network, data = _prepare(names, model, train, loaders, progress)
    return {name: _scores(name, network, data, {}, seed) for name in names}


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
        """What a detector reads instead of inputs: logits in float64, features in float32 as the package wants them."""
        if representation == "logits":
            return self.outputs.logits.double()
        assert self.outputs.features is not None
        features = self.outputs.features.float()
        return features[:, :, None, None] if representation == "maps" else features

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Inputs with labels, batch by batch."""
        for batch in as_batches(track(self._data, "detecting", self._progress)):
            labels = check_labels(batch, self._network.head.out_features) if self._labels else None
            yield _image(batch), labels

    def __len__(self) -> int:
        return len(self._data) if isinstance(self._data, Sized) else 0


def _prepare(
    names: Sequence[str],
    model: nn.Module,
    train: Iterable[Any],
    loaders: Mapping[str, Iterable[Any]],
    progress: bool | None,
) -> tuple[Network, tuple[_Data, dict[str, _Data]]]:
    """Check everything before work starts, and take the model apart."""
    unknown = [name for name in names if name not in OOD_BASELINES]
    if unknown:
        reasons = "".join(f" {name} {LEFT_OUT[name]}." for name in unknown if name in LEFT_OUT)
        raise SettingError(
            f"There is no detector {', '.join(unknown)}.{reasons} There are: {', '.join(OOD_BASELINES)}."
        )
    _package()
    for data in (train, *loaders.values()):
        check_data(data)
        check_repeatable(data)
    first = next(iter(train), None)
    if first is None:
        raise EmptyDataError("The training data is empty.")
    network = Network(model, first)
    tests = {key: _Data(network, data, False, progress) for key, data in loaders.items()}
    return network, (_Data(network, train, True, progress), tests)


def _scores(
    name: str, network: Network, data: tuple[_Data, dict[str, _Data]], parameters: Mapping[str, Any], seed: int
) -> dict[str, NDArray[Any]]:
    baseline = OOD_BASELINES[name]
    detector = baseline.build(network, parameters)
    train, tests = data
    with evaluating(network.model), torch.inference_mode(False):
        if baseline.fit is not None:
            _fit(name, detector, baseline.fit, train, network.head.out_features, seed)
        return {key: _predict(name, key, detector, baseline, test) for key, test in tests.items()}


def _fit(name: str, detector: Any, representation: Representation, train: _Data, num_classes: int, seed: int) -> None:
    method = getattr(detector, _METHODS[representation][0])
    if detector.device is None:
        detector.to("cpu")  # else the package guesses the same, and logs it
    arguments = (train,) if representation == "inputs" else (train.read(representation), train.outputs.labels)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            method(*arguments)
    except (AssertionError, ValueError) as error:
        raise DataError(
            f"{name} cannot be fitted to the training data ({error or 'a class has no example'}). It may need more "
            f"examples, and some of each of the {num_classes} classes."
        ) from error


def _predict(name: str, key: str, detector: Any, baseline: OODBaseline, test: _Data) -> NDArray[Any]:
    method = getattr(detector, _METHODS[baseline.score][1])
    if baseline.score == "inputs":
        parts = [method(x) for x, _ in test]
    else:
        inputs = test.read(baseline.score)
        anchors = torch.eye(inputs.shape[1]).to(inputs) if baseline.anchored else inputs[:0]
        with torch.no_grad():
            parts = [method(torch.cat([part, anchors]))[: len(part)] for part in inputs.split(_AT_ONCE)]
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
    """The inputs as one floating-point tensor, or DataError."""
    if batch.kwargs or len(batch.args) != 1 or not batch.args[0].is_floating_point():
        raise DataError(
            f"{batch.name}: this detector works on the inputs themselves, which must be one floating-point tensor x. "
            "For other inputs take a detector that reads logits or features."
        )
    image: Tensor = batch.args[0]
    return image


def _package() -> ModuleType:
    try:
        import pytorch_ood.detector
    except (ImportError, RuntimeError) as error:  # torchvision without its operators raises RuntimeError
        raise MissingPackageError(
            f"These detectors need pytorch-ood, which cannot be imported ({error}): pip install 'ifcomp[ood]', with "
            "torch and torchvision that belong together."
        ) from error
    return pytorch_ood.detector  # type: ignore[no-any-return]
