"""The user's model: made by a named function, filled with weights that are never unpickled, and tried on the data."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from ifcomp.batches import Batch, as_batches, check_labels, run_model
from ifcomp.errors import DataError, EmptyDataError, IfcompError, ModelError, SettingError
from ifcomp.sources import Source
from ifcomp.sources.factories import make

#: Where training scripts put the weights among other things.
STATE_KEYS = ("state_dict", "model_state_dict")

#: Keys and files named in a message at most.
SHOWN = 8


def load_model(spec: str, weights: str | None, device: str) -> nn.Module:
    """The model in eval mode on its device.

    Args:
        spec: ``package.module:factory``.
        weights: A ``.safetensors`` file, or one of ``torch.save`` that holds tensors only; None leaves the model as
            it was made.
        device: Where it goes.

    Raises:
        ModelError: If the model cannot be made, or the weights do not fit; lists what is missing.
    """
    model = make(spec, "model", ModelError, nn.Module)
    if not isinstance(model, nn.Module):
        raise ModelError(f"'{spec}' must return an nn.Module, but returned a {type(model).__name__}.")
    if weights is not None:
        _fill(model, read_weights(weights), spec, weights)
    try:
        return model.to(torch.device(device)).eval()
    except (RuntimeError, AssertionError) as error:
        raise SettingError(f"The model cannot run on --device '{device}': {_first_line(error)}.") from error


def read_weights(path: str) -> dict[str, Tensor]:
    """Tensors by name."""
    if not Path(path).is_file():
        raise ModelError(f"There is no weights file '{path}'.")
    try:
        if Path(path).suffix == ".safetensors":
            return load_file(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about old pickles, which are refused below
            found = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, OSError, EOFError, RuntimeError, ValueError, KeyError, pickle.UnpicklingError) as error:
        raise ModelError(
            f"Cannot read tensors from '{path}' ({_first_line(error)}). Files that need unpickling are refused, since "
            "that would run code from them. Write the weights with safetensors.torch.save_model(model, file), or "
            "torch.save(model.state_dict(), file)."
        ) from error
    if isinstance(found, Mapping):
        found = next((found[key] for key in STATE_KEYS if isinstance(found.get(key), Mapping)), found)
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        kinds = _listed(found) if isinstance(found, Mapping) else f"a {type(found).__name__}"
        raise ModelError(f"'{path}' must hold tensors by name, as model.state_dict() does, but holds {kinds}.")
    return dict(found)


def try_model(model: nn.Module, source: Source, spec: str) -> int:
    """Run the model on the first two examples, and return its number of classes K.

    Raises:
        ModelError: If it fails; says with which inputs.
        DataError: If the data's labels or class names do not fit it.
    """
    first = next(as_batches(source.batches()), None)
    if first is None:
        raise EmptyDataError(f"The data '{source.spec}' has no examples.")
    batch = first.select(slice(0, 2)).to(_device(model))
    try:
        with torch.no_grad():
            classes = run_model(model, batch).shape[1]
    except IfcompError:
        raise
    except Exception as error:
        inputs = ", ".join(f"{str(value.dtype)[6:]} {list(value.shape)}" for value in batch.tensors())
        raise ModelError(
            f"The model '{spec}' fails on the first examples of '{source.spec}', inputs {inputs}: "
            f"{type(error).__name__}: {_first_line(error)}."
        ) from error
    _check_classes(source, classes)
    return classes


def _check_classes(source: Source, classes: int) -> None:
    names = source.class_names
    if names is not None and len(names) != classes:
        raise DataError(
            f"'{source.spec}' has {len(names)} classes ({_listed(names)}), but the model has {classes} logits. Labels "
            "would be numbered wrongly."
        )
    if source.labels is not None:
        check_labels(Batch((), {}, source.labels, len(source.labels), f"'{source.spec}'"), classes)


def _fill(model: nn.Module, state: Mapping[str, Tensor], spec: str, weights: str) -> None:
    own = model.state_dict()
    try:
        missing, unexpected = model.load_state_dict(state, strict=False)
    except RuntimeError:
        missing, unexpected = list(own.keys() - state.keys()), list(state.keys() - own.keys())
    shapes = [
        f"{name} {list(state[name].shape)} instead of {list(own[name].shape)}"
        for name in own
        if name in state and state[name].shape != own[name].shape
    ]
    missing = _without_shared(model, missing, state)
    problems = [("missing", missing), ("unexpected", unexpected), ("of another shape", shapes)]
    lines = [f"  {title}: {_listed(sorted(names))}" for title, names in problems if names]
    if lines:
        raise ModelError(f"The weights in '{weights}' do not fit the model '{spec}':\n" + "\n".join(lines))


def _without_shared(model: nn.Module, missing: Iterable[str], state: Mapping[str, Tensor]) -> list[str]:
    """Missing names without those that share a tensor with one that is there: files keep shared tensors once."""
    everything: dict[str, Any] = model.state_dict(keep_vars=True)
    there = {id(everything[name]) for name in state if name in everything}
    return [name for name in missing if id(everything[name]) not in there]


def _device(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__


def _listed(names: Iterable[Any]) -> str:
    everything = list(map(str, names))
    more = f" and {len(everything) - SHOWN} more" if len(everything) > SHOWN else ""
    return ", ".join(everything[:SHOWN]) + more
