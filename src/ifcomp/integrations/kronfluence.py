"""Import of EKFAC factors fitted by kronfluence.

Both libraries represent the curvature of a layer as ``Q diag(Lambda) Q^T``. Kronfluence stores the *sum* of the squared
gradients in the eigenbasis and the number of examples. Its gradients are [O, J] with the bias as last column and the
inputs of a convolution in the order of its weight, which is our canonical form with one group. It supports ``Linear``
and ``Conv2d`` and ignores other parameters. Its files are safetensors, so kronfluence need not be installed.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor, nn

from ifcomp.blocks.block import Basis
from ifcomp.curvature.factors import BlockFactors, Factors, FitSettings
from ifcomp.errors import ModelError, SettingError, StorageError
from ifcomp.io.untrusted import parse_json, read_safetensors, read_text

_TENSORS = ("activation_eigenvectors", "gradient_eigenvectors", "lambda_matrix", "num_lambda_processed")
_ARGUMENTS = "factor_arguments.json"


def factors_from_kronfluence(
    folder: str | os.PathLike[str], model: nn.Module, *, num_classes: int, count: int | None = None
) -> Factors:
    """Read EKFAC factors from a folder of kronfluence.

    The task must sum the cross-entropy over the batch (``beta = 1``). ``partial=True`` is needed if the model has
    parameters that kronfluence ignores, such as those of BatchNorm:

        >>> analyzer.fit_all_factors("ekfac", dataset, factor_args=FactorArguments(strategy="ekfac"))
        >>> factors = factors_from_kronfluence(analyzer.factors_output_dir("ekfac"), model, num_classes=10)
        >>> ifc = IFComp.from_factors(model, factors, partial=True, sua=False)

    Args:
        folder: Result of ``analyzer.factors_output_dir(name)``.
        model: Classifier before kronfluence's ``prepare_model``, which freezes and wraps it.
        num_classes: Number of logits K.
        count: Number of training examples n. None uses the number of examples of the factors, which is at most
            ``lambda_max_examples`` of kronfluence.

    Raises:
        StorageError: If the folder does not contain complete EKFAC factors.
        ModelError: If kronfluence computes wrong gradients for a layer.
    """
    tensors, empirical = _read(Path(folder))
    _check_convolutions(model, tensors["lambda_matrix"])
    counts = {int(value) for value in tensors["num_lambda_processed"].values()}
    if len(counts) != 1:
        raise StorageError(f"The factors in '{folder}' have different numbers of examples: {sorted(counts)}.")
    examples = counts.pop()
    if count is not None and count < examples:
        raise SettingError(f"count is {count}, but the factors in '{folder}' are over {examples} examples.")
    is_double = any(parameter.dtype == torch.float64 for parameter in model.parameters())
    blocks = {
        name: _block(name, tensors, examples, torch.float64 if is_double else torch.float32)
        for name in tensors["lambda_matrix"]
    }
    settings = FitSettings(fisher="empirical" if empirical else "sampled")
    return Factors(blocks, examples if count is None else count, num_classes, settings)


def _read(folder: Path) -> tuple[dict[str, dict[str, Tensor]], bool]:
    """Return the tensors by file and layer, and whether the Fisher is empirical."""
    try:
        arguments = parse_json(read_text(folder / _ARGUMENTS))
        tensors = {name: read_safetensors(folder / f"{name}.safetensors")[0] for name in _TENSORS}
        if arguments["strategy"] != "ekfac":
            raise ValueError(f"its strategy is {arguments['strategy']!r}")
        if not tensors["lambda_matrix"] or any(
            part.keys() != tensors["lambda_matrix"].keys() for part in tensors.values()
        ):
            raise ValueError("its files have different layers")
        if any(value.numel() != 1 or not value.item() >= 1 for value in tensors["num_lambda_processed"].values()):
            raise ValueError("the number of examples is missing")
        return tensors, bool(arguments["use_empirical_fisher"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageError(
            f"Cannot read kronfluence's factors from '{folder}': {error}. Give the folder of "
            "analyzer.factors_output_dir(name), after analyzer.fit_all_factors(name, ...) with strategy='ekfac'."
        ) from error


def _block(name: str, tensors: dict[str, dict[str, Tensor]], examples: int, dtype: torch.dtype) -> BlockFactors:
    """Return the factors of one layer in canonical form, with the single group as leading axis."""
    inputs, outputs, squares = (tensors[kind][name].to(dtype).unsqueeze(0) for kind in _TENSORS[:3])
    for tensor in (inputs, outputs, squares):
        if not bool(tensor.isfinite().all()):
            raise StorageError(f"Kronfluence's factors of layer '{name}' are not finite. Fit again in float32 or more.")
    if bool((squares < 0).any()):
        raise StorageError(f"Kronfluence's factors of layer '{name}' have negative second moments. Fit again.")
    return BlockFactors(squares / examples, Basis(inputs, outputs))


def _check_convolutions(model: nn.Module, layers: dict[str, Tensor]) -> None:
    """Raise ModelError for grouped convolutions and other padding than zeros, which kronfluence treats wrongly."""
    modules = dict(model.named_modules())
    wrong = [
        name
        for name in layers
        if isinstance(module := modules.get(name), nn.Conv2d) and (module.groups > 1 or module.padding_mode != "zeros")
    ]
    if wrong:
        raise ModelError(
            f"Kronfluence's factors of {', '.join(wrong)} are not the curvature of these layers: it averages the "
            "inputs of a convolution over its groups, and pads with zeros for every padding mode. Leave these layers "
            "out of the task's get_influence_tracked_modules, or fit with IFComp."
        )
