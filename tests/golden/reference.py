"""Reference results: factors of small models, and every public result scored from them.

``python tests/golden/reference.py NAME ...`` writes the files of some models with the current code, without names those
of all. The test compares results with the files of an earlier version, so the files change only when a result is meant
to change.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from cases import LAYER_CASES, MODEL_CASES
from comparison import as_type
from ifcomp import IFComp
from oracles import Inputs
from tasks.digits import images_and_labels, train_network

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results.safetensors"
_WEIGHTS = FOLDER / "digits.safetensors"

#: One case for each block kind, kernel and layout.
NAMES = (
    "linear",
    "linear_tokens",
    "linear_sequence_first",
    "conv2d",
    "conv2d_groups",
    "conv2d_reflect",
    "conv1d_same_even",
    "batchnorm2d",
    "layernorm",
    "embedding_padding",
    "attention_padding",
    "linear_twice",
    "tied",
    "class_token",
    "lenet",
    "bert",
)
DTYPES = {"float64": torch.float64, "float32": torch.float32}

#: Options of `IFComp` beside the defaults; convolutions once with shared offsets.
OPTIONS: dict[str, dict[str, object]] = {
    "exact": {"fisher": "exact"},
    "sampled": {"beta": 0.5, "sua": True},
}


@dataclass(frozen=True)
class Golden:
    """A model, the data of its fit and the examples that are scored.

    Attributes:
        name: File name without its ending.
        model: The classifier.
        train: Inputs of the fit.
        inputs: Inputs that are scored.
        labels: Their labels.
        options: Of `IFComp`.
    """

    name: str
    model: nn.Module
    train: Inputs
    inputs: Inputs
    labels: Tensor
    options: dict[str, object]


def goldens() -> list[Golden]:
    """All reference models."""
    found = []
    for dtype_name, dtype in DTYPES.items():
        for variant, options in OPTIONS.items():
            for case in (case for case in [*LAYER_CASES, *MODEL_CASES] if case.name in NAMES):
                labels = torch.arange(5) % case.num_classes
                name = f"{case.name}-{variant}-{dtype_name}"
                train, inputs = (as_type(case.sample(size, seed), dtype) for size, seed in ((9, 1), (5, 0)))
                found.append(Golden(name, case.make().to(dtype), train, inputs, labels, options))
            found.append(digits(f"digits-{variant}-{dtype_name}", dtype, options))
    return found


def digits(name: str, dtype: torch.dtype, options: dict[str, object]) -> Golden:
    """A multilayer perceptron on handwritten digits; its weights are in a file, since training is not reproducible."""
    images, labels = images_and_labels()
    images = images.to(dtype)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    if not _WEIGHTS.exists():
        save_file(train_network(images_and_labels()[0], labels, epochs=3).state_dict(), _WEIGHTS)
    model.load_state_dict(load_file(_WEIGHTS))
    return Golden(name, model.to(dtype).eval(), images[:300], images[300:320], labels[300:320], options)


def results(ifc: IFComp, golden: Golden) -> dict[str, Tensor]:
    """Every public result, in float64."""
    x, y = golden.inputs, golden.labels
    train = _labelled(golden.train, torch.arange(ifc.factors.count) % ifc.factors.num_classes)
    found = {
        "influence": ifc.influence(x),
        "influence_damped": ifc.influence(x, damping=0.01),
        "logit_kernel": ifc.logit_kernel(x),
        "predict_proba": ifc.predict_proba(x, alpha=0.3, keep_argmax=False),
        "predict_proba_argmax": ifc.predict_proba(x, alpha=0.3, keep_argmax=True),
        "parametric": ifc.parametric_complexity(x),
        "parametric_linearized": ifc.parametric_complexity(x, linearized=True),
        "parametric_capped": ifc.parametric_complexity(x, capped=True),
        "parametric_probes": ifc.parametric_complexity(x, probes=2),
        "bounded": ifc.bounded_complexity(x),
        "stochastic": ifc.stochastic_complexity(x, y),
        "stochastic_unseen": ifc.stochastic_complexity(x, y, seen=False),
        "effects": torch.as_tensor(ifc.explain(x, y, [train], k=2, progress=False).frame["effect"].to_numpy().copy()),
    }
    table = ifc.score([_labelled(x, y)], progress=False).frame
    found |= {f"score_{name}": torch.as_tensor(table[name].to_numpy().copy()) for name in table.columns}
    return {name: value.to(torch.float64).contiguous() for name, value in found.items()}


def _labelled(inputs: Inputs, labels: Tensor) -> object:
    return {**inputs, "labels": labels} if isinstance(inputs, dict) else (inputs, labels)


def fit(golden: Golden) -> IFComp:
    """A new fit of a reference model."""
    return IFComp(golden.model, **golden.options).fit([golden.train], progress=False)


def main(names: list[str]) -> None:
    """Write the files of the models with these names, or all."""
    found = load_file(RESULTS) if names else {}
    for golden in goldens():
        if names and golden.name not in names:
            continue
        ifc = fit(golden)
        ifc.save(FOLDER / f"{golden.name}.ifcomp")
        found |= {f"{golden.name}/{name}": value for name, value in results(ifc, golden).items()}
    save_file(found, RESULTS)


if __name__ == "__main__":
    main(sys.argv[1:])
