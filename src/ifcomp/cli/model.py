"""The user's model: built by a factory, loaded with weights that are never unpickled, and checked on the data."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ifcomp.cli.output import one_line
from ifcomp.data.batches import Batch, as_batches
from ifcomp.data.checks import check_label_form, check_labels
from ifcomp.data.factories import call_factory
from ifcomp.data.sources import Source
from ifcomp.errors import DataError, EmptyDataError, IfcompError, ModelError, SettingError
from ifcomp.io.torch_files import read_torch_file
from ifcomp.io.untrusted import read_safetensors, regular_file
from ifcomp.layers.forward import run_model

#: Keys under which training scripts store the weights in a checkpoint.
STATE_KEYS = ("state_dict", "model_state_dict")

#: Largest number of names listed in a message.
MAX_LISTED = 8


def load_model(spec: str, weights: str | None, device: str, *, folder: str = os.curdir) -> nn.Module:
    """Build the model, load its weights, and return it in eval mode on the device.

    Args:
        spec: ``package.module:factory``.
        weights: A ``.safetensors`` file, or a ``torch.save`` file of tensors in plain containers. None keeps the
            weights that the factory set.
        device: Device of the model.
        folder: Folder in which the module is looked for if it is not installed.

    Raises:
        ModelError: If the model cannot be built, or the weights do not fit; lists the differences.
    """
    model = call_factory(spec, "model", ModelError, nn.Module, folder=folder)
    if not isinstance(model, nn.Module):
        raise ModelError(f"'{spec}' must return an nn.Module, but returned a {type(model).__name__}.")
    if weights is not None:
        load_weights(model, read_weights(weights), spec, weights)
    try:
        return model.to(torch.device(device)).eval()
    except (RuntimeError, AssertionError) as error:
        raise SettingError(f"The model cannot run on --device '{device}': {_first_line(error)}.") from error


def load_checked_model(
    spec: str, weights: str | None, device: str, *sources: Source, folder: str = os.curdir
) -> tuple[nn.Module, int]:
    """Load a model as `load_model` does, check it on data, and return it with its number of classes K.

    Args:
        spec: ``package.module:factory``.
        weights: File of the weights, or None.
        device: Device of the model.
        *sources: Data that the model is checked on, at least one.
        folder: As for `load_model`.
    """
    model = load_model(spec, weights, device, folder=folder)
    num_classes = [check_model(model, source, spec) for source in sources]
    return model, num_classes[0]


# Weights -------------------------------------------------------------------------------------------------------------


def read_weights(path: str) -> dict[str, Tensor]:
    """Read tensors by name from a safetensors or ``torch.save`` file."""
    content: Any
    try:
        file = regular_file(path)
        content = read_safetensors(file)[0] if file.suffix == ".safetensors" else read_torch_file(file)
    except FileNotFoundError as error:
        raise ModelError(f"There is no weights file '{path}'.") from error
    except Exception as error:  # readers raise many kinds of exceptions on a damaged file
        raise ModelError(
            f"Cannot read tensors from '{path}' ({_first_line(error)}). Files that need unpickling are refused, since "
            "that would run code from them. Write the weights with safetensors.torch.save_model(model, file), or "
            "torch.save(model.state_dict(), file)."
        ) from error
    if isinstance(content, Mapping):
        content = next((content[key] for key in STATE_KEYS if isinstance(content.get(key), Mapping)), content)
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        actual = _listed(content) if isinstance(content, Mapping) else f"a {type(content).__name__}"
        raise ModelError(f"'{path}' must contain tensors by name, as model.state_dict() does, but contains {actual}.")
    return dict(content)


def load_weights(model: nn.Module, state: Mapping[str, Tensor], spec: str, weights: str) -> None:
    """Load the state into the model.

    Args:
        model: The model, changed in place.
        state: Tensors by name.
        spec: Name of the model, for messages.
        weights: File of the weights, for messages.

    Raises:
        ModelError: If names, shapes or types differ; lists the differences.
    """
    expected, load_error = model.state_dict(), None
    try:
        missing, unexpected = model.load_state_dict(state, strict=False)
    except RuntimeError as error:
        load_error = error
        missing, unexpected = list(expected.keys() - state.keys()), list(state.keys() - expected.keys())
    common = [name for name in expected if name in state]
    differences = {
        "missing": _without_shared(model, missing, state),
        "unexpected": unexpected,
        "of another shape": [
            f"{name} {list(state[name].shape)} instead of {list(expected[name].shape)}"
            for name in common
            if state[name].shape != expected[name].shape
        ],
        "of another type": [
            f"{name} {state[name].dtype} instead of {expected[name].dtype}"
            for name in common
            if state[name].is_floating_point() != expected[name].is_floating_point()
        ],
    }
    lines = [f"  {title}: {_listed(sorted(names))}" for title, names in differences.items() if names]
    if load_error is not None and not lines:
        lines = [f"  {_first_line(load_error)}"]
    if lines:
        raise ModelError(f"The weights in '{weights}' do not fit the model '{spec}':\n" + "\n".join(lines))


def _without_shared(model: nn.Module, missing: Iterable[str], state: Mapping[str, Tensor]) -> list[str]:
    """Drop missing names that share a tensor with a name in the state. Files store shared tensors once."""
    tensors: dict[str, Any] = model.state_dict(keep_vars=True)
    loaded = {id(tensors[name]) for name in state if name in tensors}
    return [name for name in missing if id(tensors[name]) not in loaded]


# Checks on the data --------------------------------------------------------------------------------------------------


def check_model(model: nn.Module, source: Source, spec: str) -> int:
    """Run the model on the first two examples, and return its number of classes K.

    Raises:
        ModelError: If the model fails; names the inputs.
        DataError: If the labels or class names of the data do not fit the model.
    """
    first = next(as_batches(source.batches()), None)
    if first is None:
        raise EmptyDataError(f"The data '{source.spec}' has no examples.")
    check_label_form(replace(first, name=f"'{source.spec}', {first.name}"))
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    batch = first.select(slice(0, 2)).to(device)
    try:
        with torch.no_grad():
            num_classes = run_model(model, batch).shape[1]
    except IfcompError:
        raise
    except Exception as error:
        inputs = ", ".join(f"{str(value.dtype)[6:]} {list(value.shape)}" for value in batch.tensors())
        no_label_column = source.feature_columns is not None and batch.labels is None
        hint = " No column is the label, so every column is an input: name the label with --label-column."
        raise ModelError(
            f"The model '{spec}' fails on the first examples of '{source.spec}', inputs {inputs}: "
            f"{type(error).__name__}: {_first_line(error)}.{hint if no_label_column else ''}"
        ) from error
    _check_classes(source, num_classes)
    return num_classes


def _check_classes(source: Source, num_classes: int) -> None:
    names = source.class_names
    if names is not None and len(names) != num_classes:
        raise DataError(
            f"'{source.spec}' has {len(names)} classes ({_listed(names)}), but the model has {num_classes} outputs. "
            "Give data with the classes that the model was trained on."
        )
    if source.labels is not None:
        check_labels(Batch((), {}, source.labels, len(source.labels), f"'{source.spec}'"), num_classes)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__


def _listed(names: Iterable[Any]) -> str:
    texts = [one_line(str(name)) for name in names]
    more = f" and {len(texts) - MAX_LISTED} more" if len(texts) > MAX_LISTED else ""
    return ", ".join(texts[:MAX_LISTED]) + more
