"""The detectors of pytorch-ood that serve as baselines: how each is built, fitted and applied.

All need only the trained model; fitted ones also need one forward pass over the labelled training data. Parameters are
the package's defaults, with three exceptions where it has none or differs from the publication: DICE masks p = 0.9 of
the weights, ViM keeps half of the dimensions of the features, and GradNorm and GradUncertainty use the gradient of the
head alone, as in OpenOOD.

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

`LEFT_OUT` lists the other detectors of the package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Literal

from experiments.baselines.network import Chain, Network
from ifcomp.errors import MissingPackageError, SettingError

#: What a detector is fitted to or applied to. "maps" are features as one-pixel maps; "head" are features too, for
#: detectors that take the head as their model.
Representation = Literal["logits", "features", "maps", "head", "inputs"]


@dataclass(frozen=True)
class OODBaseline:
    """A detector of pytorch-ood.

    Attributes:
        detector: Name of the class.
        fit: Representation that it is fitted to; None if it is not fitted.
        score: Representation that it is applied to.
        arguments: Arguments of the constructor that differ from the package's defaults.
        anchored: Whether one input per class is added to every batch and dropped from the result. The package's
            OpenMax has distances only to classes that are predicted in the batch.
    """

    detector: str
    fit: Representation | None
    score: Representation
    arguments: Callable[[Network], dict[str, Any]]
    anchored: bool = False

    def build(self, network: Network, parameters: Mapping[str, Any]) -> Any:
        """Return the detector, not yet fitted."""
        arguments = {**self.arguments(network), **parameters}
        try:
            return getattr(import_detectors(), self.detector)(**arguments)
        except (TypeError, ValueError, AssertionError) as error:
            raise SettingError(f"{self.detector} cannot be built with {dict(parameters)}: {error}.") from error


def import_detectors() -> ModuleType:
    """Return ``pytorch_ood.detector``, or raise MissingPackageError."""
    try:
        import pytorch_ood.detector
    except (ImportError, RuntimeError) as error:  # torchvision without its operators raises RuntimeError
        raise MissingPackageError(
            f"These detectors need pytorch-ood, which cannot be imported ({error}): pip install 'ifcomp[ood]', with "
            "matching versions of torch and torchvision."
        ) from error
    return pytorch_ood.detector  # type: ignore[no-any-return]


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


#: All detectors of pytorch-ood that need only a model and its training data, by their names in tables.
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

#: Detectors of pytorch-ood that are not among the baselines, with the reason.
LEFT_OUT: Mapping[str, str] = {
    "MCD": "needs a network with dropout and several random passes, see experiments.baselines.dropout",
    "MCM": "needs embeddings of the class names by a vision-language model",
    "MultiMahalanobis": "needs weights of its layers that are tuned on out-of-distribution data",
    "RankFeat": "needs the layers after the last feature maps as one function",
    "TemperatureScaling": "has nearly the order of MSP, and is fitted to held-out labels",
    "WeightedEBO": "needs class weights that only a special training loss provides",
}
