"""The user's model: made by a named function, filled with weights that are never unpickled, and tried on the data."""

from __future__ import annotations

import pickletools
import re
import warnings
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ifcomp.data.batches import Batch, as_batches
from ifcomp.data.checks import check_labels
from ifcomp.data.factories import call_factory
from ifcomp.data.sources import Source
from ifcomp.errors import DataError, EmptyDataError, IfcompError, ModelError, SettingError
from ifcomp.io.untrusted import read_safetensors, regular_file
from ifcomp.layers.forward import run_model

#: Where training scripts put the weights among other things.
STATE_KEYS = ("state_dict", "model_state_dict")

#: What programs that rebuild tensors name, and the instructions that they consist of (pickle's protocol 2).
_HARMLESS = re.compile(
    r"collections OrderedDict|torch\._utils _rebuild_(tensor|tensor_v2|parameter)|torch (Size|device)"
    r"|torch (float16|float32|float64|bfloat16|int8|int16|int32|int64|uint8|bool)"
    r"|torch (Float|Double|Half|BFloat16|Long|Int|Short|Char|Byte|Bool)Storage"
)
_CODES = re.compile(
    r"PROTO|STOP|MARK|POP|TUPLE|EMPTY_TUPLE|TUPLE[123]|EMPTY_LIST|APPENDS?|EMPTY_DICT|SETITEMS?|NONE|NEWTRUE|NEWFALSE"
    r"|BININT[12]?|LONG1|BINFLOAT|BINUNICODE|SHORT_BINSTRING|(LONG_)?BIN(PUT|GET)|GLOBAL|REDUCE|BUILD|BINPERSID"
)

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
    model = call_factory(spec, "model", ModelError, nn.Module)
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
    found: Any
    try:
        file = regular_file(path)
        found = read_safetensors(file)[0] if file.suffix == ".safetensors" else _read_torch(file)
    except FileNotFoundError as error:
        raise ModelError(f"There is no weights file '{path}'.") from error
    except Exception as error:  # a damaged file makes its readers raise nearly anything
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


def _read_torch(file: Path) -> Any:
    """What torch's reader of plain tensors finds in a file of ``torch.save``, which is mapped, not decompressed.

    Before it may look, the file must be an uncompressed zip archive, as torch.save has written since 1.6, and its
    program may name nothing but what rebuilds tensors. So neither older formats, which torch up to 2.5 could be tricked
    with, nor calls that ask for memory reach it.
    """
    with file.open("rb") as stream:
        if stream.read(4) != b"PK\x03\x04":
            raise ValueError("it is not a file of torch.save in its format since torch 1.6")
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise ValueError("it is compressed, which torch.save never does")
        if sum(member.file_size for member in members) > file.stat().st_size:
            raise ValueError("its parts are larger than the file")
        programs = [member for member in members if member.filename.rpartition("/")[2] == "data.pkl"]
        if len(programs) != 1:
            raise ValueError("it is not a file of torch.save")
        _check_program(archive.read(programs[0]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.load(str(file), map_location="cpu", weights_only=True, mmap=True)


def _check_program(program: bytes) -> None:
    """Raise ValueError if a pickle names anything but tensors and plain containers; it is looked through, not run."""
    for code, argument, _ in pickletools.genops(program):
        if code.name == "GLOBAL" and not _HARMLESS.fullmatch(str(argument)):
            raise ValueError(f"it asks for '{str(argument).replace(' ', '.')}' to be called")
        if not _CODES.fullmatch(code.name):
            raise ValueError(f"it has an instruction that torch.save does not write, {code.name}")


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
        unnamed = source.spec.startswith("parquet:") and batch.labels is None
        hint = " Every column is an input, since none is the label: name it with --label-column." if unnamed else ""
        raise ModelError(
            f"The model '{spec}' fails on the first examples of '{source.spec}', inputs {inputs}: "
            f"{type(error).__name__}: {_first_line(error)}.{hint}"
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
    own, problem = model.state_dict(), None
    try:
        missing, unexpected = model.load_state_dict(state, strict=False)
    except RuntimeError as error:
        problem = error
        missing, unexpected = list(own.keys() - state.keys()), list(state.keys() - own.keys())
    shapes = [
        f"{name} {list(state[name].shape)} instead of {list(own[name].shape)}"
        for name in own
        if name in state and state[name].shape != own[name].shape
    ]
    types = [
        f"{name} {state[name].dtype} instead of {own[name].dtype}"
        for name in own
        if name in state and state[name].is_floating_point() != own[name].is_floating_point()
    ]
    missing = _without_shared(model, missing, state)
    problems = [("missing", missing), ("unexpected", unexpected), ("of another shape", shapes)]
    problems.append(("of another type", types))
    lines = [f"  {title}: {_listed(sorted(names))}" for title, names in problems if names]
    if problem is not None and not lines:
        lines = [f"  {_first_line(problem)}"]
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
