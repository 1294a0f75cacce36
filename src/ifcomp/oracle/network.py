"""The model as a function of one flat parameter vector, and training inputs that can be indexed."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ifcomp.data.batches import Batch, as_batches
from ifcomp.data.checks import check_data, check_inputs
from ifcomp.errors import EmptyDataError, ModelError
from ifcomp.precision import as_double

#: Number of examples per forward pass.
MICROBATCH = 256


@dataclass(frozen=True, eq=False)
class Network:
    """The model at weights ``theta`` [P]: trainable parameters in the order of ``model.named_parameters()``.

    Attributes:
        model: Model in eval mode. Its parameters and buffers are not modified.
        beta: Inverse temperature.
    """

    model: nn.Module
    beta: float

    def __post_init__(self) -> None:
        """Raise ModelError if the model has no trainable parameter."""
        if not self._parameters():
            raise ModelError("The model has no trainable parameter: set requires_grad on the parameters to optimise.")

    def base(self) -> Tensor:
        """Return the fitted weights theta_0, [P]."""
        return torch.cat([parameter.detach().reshape(-1) for parameter in self._parameters().values()])

    def log_probabilities(self, theta: Tensor, batch: Batch) -> Tensor:
        """Return ``log softmax(beta f_theta(x))``, [B, K] in float64."""
        parameters = self._parameters()
        values = theta.split([parameter.numel() for parameter in parameters.values()])
        state = {
            name: value.view(parameter.shape)
            for (name, parameter), value in zip(parameters.items(), values, strict=True)
        }
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        output: Any = functional_call(self.model, state | buffers, batch.args, batch.kwargs)
        logits: Tensor = output if isinstance(output, Tensor) else output.logits
        return torch.log_softmax(self.beta * as_double(logits), 1)

    def _parameters(self) -> dict[str, nn.Parameter]:
        return {name: value for name, value in self.model.named_parameters() if value.requires_grad}


@dataclass(frozen=True, eq=False)
class TrainingInputs:
    """Training inputs, numbered 0 ... n-1 in the order of the data.

    Attributes:
        groups: Inputs, concatenated where shapes are equal, so that any subset needs few batches.
    """

    groups: tuple[Batch, ...]

    @property
    def count(self) -> int:
        """Number of examples n."""
        return sum(group.size for group in self.groups)

    def microbatches(self, device: torch.device, mask: Tensor | None = None) -> Iterator[Batch]:
        """Yield the examples where ``mask`` [n] is true (all if None), in order, in batches of `MICROBATCH`."""
        masks = [None] * len(self.groups) if mask is None else mask.split([group.size for group in self.groups])
        for group, group_mask in zip(self.groups, masks, strict=True):
            selected = group if group_mask is None else group.select(group_mask.nonzero().squeeze(1))
            yield from (microbatch.to(device) for microbatch in selected.split(MICROBATCH) if microbatch.size)

    def digest(self) -> str:
        """Return the SHA-256 of all inputs and labels."""
        return digest(*(value for group in self.groups for value in (*inputs_of(group), group.labels)))


def collect(data: Iterable[Any]) -> TrainingInputs:
    """Read training data into memory, with labels if present.

    Raises:
        DataError: If the data is empty or is not an iterable of batches.
    """
    check_data(data)
    batches = list(as_batches(data))
    if not batches:
        raise EmptyDataError("The oracle needs training data, but it is empty.")
    for batch in batches:
        check_inputs(batch)
    return join(batches)


def join(batches: Iterable[Batch]) -> TrainingInputs:
    """Concatenate consecutive batches of equal shapes."""
    return TrainingInputs(tuple(_concatenate(list(group)) for _, group in itertools.groupby(batches, _group_key)))


def digest_model(model: nn.Module) -> str:
    """Return the SHA-256 of all parameters, buffers and ``requires_grad`` flags."""
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    return digest(*(part for name, value in tensors for part in (name, value.requires_grad, value)))


def inputs_of(batch: Batch) -> list[Any]:
    """Return all inputs of a batch; keyword inputs are preceded by their names."""
    return [*batch.args, *(part for item in sorted(batch.kwargs.items()) for part in item)]


def digest(*parts: Any) -> str:
    """Return the SHA-256 of tensors (dtype, shape and bytes) and of the ``repr`` of other values."""
    sha = hashlib.sha256()
    for part in parts:
        if isinstance(part, Tensor):
            value = part.detach().cpu().contiguous()
            sha.update(f"{value.dtype} {list(value.shape)} ".encode())
            sha.update(value.reshape(-1).view(torch.uint8).numpy().data)
        else:
            sha.update(f"{part!r} ".encode())
    return sha.hexdigest()


def _group_key(batch: Batch) -> Hashable:
    """Return a key that is equal for batches that can be concatenated; it is unique for other inputs than tensors."""
    values = [*batch.args, *batch.kwargs.values()]
    if not all(isinstance(value, Tensor) and value.dim() and len(value) == batch.size for value in values):
        return id(batch)
    labels = None if batch.labels is None else batch.labels.dtype
    return len(batch.args), tuple(batch.kwargs), labels, tuple((value.shape[1:], value.dtype) for value in values)


def _concatenate(batches: list[Batch]) -> Batch:
    first = batches[0]
    if len(batches) == 1:
        return first
    args = tuple(torch.cat(values) for values in zip(*(batch.args for batch in batches), strict=True))
    kwargs = {key: torch.cat([batch.kwargs[key] for batch in batches]) for key in first.kwargs}
    labels = None if first.labels is None else torch.cat([cast(Tensor, batch.labels) for batch in batches])
    return Batch(args, kwargs, labels, sum(batch.size for batch in batches), "the training data")
