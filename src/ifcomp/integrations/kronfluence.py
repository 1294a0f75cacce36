"""Factors that kronfluence has written, read as the library's own: fit there, score here.

Both keep a layer's curvature as ``Q diag(Lambda) Q^T``. Kronfluence stores the *sum* of the squared gradients in the
eigenbasis and how many examples it is over; a gradient is [O, J], with the inputs of a convolution in the order of its
weight and the bias as last column, which is our canonical form with one group. It knows ``Linear`` and ``Conv2d`` only
and passes over all other parameters. Its files are plain safetensors, so the package itself is not needed to read them.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor, nn

from ifcomp.curvature.factors import Basis, BlockFactors, Factors, FitSettings
from ifcomp.errors import ModelError, SettingError, StorageError
from ifcomp.io.untrusted import parse_json, read_safetensors, read_text

_TENSORS = ("activation_eigenvectors", "gradient_eigenvectors", "lambda_matrix", "num_lambda_processed")
_ARGUMENTS = "factor_arguments.json"


def factors_from_kronfluence(
    folder: str | os.PathLike[str], model: nn.Module, *, num_classes: int, count: int | None = None
) -> Factors:
    """Read the EKFAC factors that kronfluence wrote to a folder.

    Its task must have summed the cross-entropy over the batch (``beta = 1``). Score with them like this; ``partial``
    is needed where the model has parameters that kronfluence passes over, such as those of BatchNorm:

        >>> analyzer.fit_all_factors("ekfac", dataset, factor_args=FactorArguments(strategy="ekfac"))
        >>> factors = factors_from_kronfluence(analyzer.factors_output_dir("ekfac"), model, num_classes=10)
        >>> ifc = IFComp.from_factors(model, factors, partial=True, sua=False)

    Args:
        folder: What ``analyzer.factors_output_dir(name)`` gives.
        model: The classifier, as it was before kronfluence's ``prepare_model``, which freezes and wraps it.
        num_classes: K, the number of the model's logits.
        count: n, the number of training examples; None takes those that kronfluence went over, which are no more than
            its ``lambda_max_examples``.

    Raises:
        StorageError: If the folder does not hold complete EKFAC factors.
        ModelError: If a layer is one whose gradient kronfluence does not have right.
    """
    found, empirical = _read(Path(folder))
    _check_convolutions(model, found["lambda_matrix"])
    counts = {int(value) for value in found["num_lambda_processed"].values()}
    if len(counts) != 1:
        raise StorageError(f"The factors in '{folder}' are over different numbers of examples: {sorted(counts)}.")
    examples = counts.pop()
    if count is not None and count < examples:
        raise SettingError(f"count is {count}, but the factors in '{folder}' are over {examples} examples.")
    doubles = any(parameter.dtype == torch.float64 for parameter in model.parameters())
    blocks = {
        name: _block(name, found, examples, torch.float64 if doubles else torch.float32)
        for name in found["lambda_matrix"]
    }
    settings = FitSettings(fisher="empirical" if empirical else "sampled")
    return Factors(blocks, examples if count is None else count, num_classes, settings)


def _read(folder: Path) -> tuple[dict[str, dict[str, Tensor]], bool]:
    """The tensors by kind and layer, and whether they come from the data's labels."""
    try:
        arguments = parse_json(read_text(folder / _ARGUMENTS))
        found = {name: read_safetensors(folder / f"{name}.safetensors")[0] for name in _TENSORS}
        if arguments["strategy"] != "ekfac":
            raise ValueError(f"its strategy is {arguments['strategy']!r}")
        if not found["lambda_matrix"] or any(part.keys() != found["lambda_matrix"].keys() for part in found.values()):
            raise ValueError("its files are about different layers")
        if any(value.numel() != 1 or not value.item() >= 1 for value in found["num_lambda_processed"].values()):
            raise ValueError("it does not say over how many examples it is")
        return found, bool(arguments["use_empirical_fisher"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageError(
            f"Cannot read kronfluence's factors from '{folder}': {error}. Give the folder of "
            "analyzer.factors_output_dir(name), after analyzer.fit_all_factors(name, ...) with strategy='ekfac'."
        ) from error


def _block(name: str, found: dict[str, dict[str, Tensor]], examples: int, dtype: torch.dtype) -> BlockFactors:
    """One layer in the canonical form, with its only group as leading axis."""
    inputs, outputs, squares = (found[kind][name].to(dtype).unsqueeze(0) for kind in _TENSORS[:3])
    for tensor in (inputs, outputs, squares):
        if not bool(tensor.isfinite().all()):
            raise StorageError(f"Kronfluence's factors of layer '{name}' are not finite. Fit again in float32 or more.")
    if bool((squares < 0).any()):
        raise StorageError(f"Kronfluence's factors of layer '{name}' have negative second moments. Fit again.")
    return BlockFactors(squares / examples, Basis(inputs, outputs))


def _check_convolutions(model: nn.Module, layers: dict[str, Tensor]) -> None:
    """Kronfluence averages inputs over groups and always pads with zeros: its factors are then of something else."""
    modules = dict(model.named_modules())
    wrong = [
        name
        for name in layers
        if isinstance(module := modules.get(name), nn.Conv2d) and (module.groups > 1 or module.padding_mode != "zeros")
    ]
    if wrong:
        raise ModelError(
            f"Kronfluence's factors of {', '.join(wrong)} are not the layers' curvature: it averages the inputs of a "
            "convolution over its groups, and pads with zeros whatever the padding mode is. Leave these layers out of "
            "the task's get_influence_tracked_modules, or fit with IFComp."
        )
