"""A model as a function of one flat vector of its trainable parameters, and training inputs that can be picked from."""

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

#: Examples that go through the model at once.
PIECE = 256


@dataclass(frozen=True, eq=False)
class Network:
    """The model at weights ``theta`` [P]: trainable parameters in the order of ``model.named_parameters()``.

    Attributes:
        model: In eval mode; its own parameters and buffers are never written to.
        beta: Inverse temperature.
    """

    model: nn.Module
    beta: float

    def __post_init__(self) -> None:
        """Refuse a model without anything to train."""
        if not self._parameters():
            raise ModelError("The model has no trainable parameter: set requires_grad on what may move in hindsight.")

    def base(self) -> Tensor:
        """The fitted weights theta_0, [P]."""
        return torch.cat([parameter.detach().reshape(-1) for parameter in self._parameters().values()])

    def log_probabilities(self, theta: Tensor, batch: Batch) -> Tensor:
        """``log softmax(beta f_theta(x))``, [B, K] in float64."""
        parameters = self._parameters()
        values = theta.split([parameter.numel() for parameter in parameters.values()])
        state = {
            name: value.view(parameter.shape)
            for (name, parameter), value in zip(parameters.items(), values, strict=True)
        }
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        output: Any = functional_call(self.model, state | buffers, batch.args, batch.kwargs)
        logits: Tensor = output if isinstance(output, Tensor) else output.logits
        return torch.log_softmax(self.beta * logits.double(), 1)

    def _parameters(self) -> dict[str, nn.Parameter]:
        return {name: value for name, value in self.model.named_parameters() if value.requires_grad}


@dataclass(frozen=True, eq=False)
class Points:
    """Training inputs, numbered 0 ... n-1 in the order of the data.

    Attributes:
        pools: Inputs of equal shape put together, so that any choice of examples makes few batches.
    """

    pools: tuple[Batch, ...]

    @property
    def count(self) -> int:
        """The number of examples n."""
        return sum(pool.size for pool in self.pools)

    def pieces(self, device: torch.device, chosen: Tensor | None = None) -> Iterator[Batch]:
        """The examples where ``chosen`` [n] is true (all if None), in order, in batches that fit in memory."""
        parts = [None] * len(self.pools) if chosen is None else chosen.split([pool.size for pool in self.pools])
        for pool, part in zip(self.pools, parts, strict=True):
            picked = pool if part is None else pool.select(part.nonzero().squeeze(1))
            yield from (piece.to(device) for piece in picked.split(PIECE) if piece.size)

    def digest(self) -> str:
        """SHA-256 of all inputs and labels."""
        return digest(*(value for pool in self.pools for value in (*inputs_of(pool), pool.labels)))


def collect(data: Iterable[Any]) -> Points:
    """Read training data into memory, with labels if it has any.

    Raises:
        DataError: If the data is not batches, or empty.
    """
    check_data(data)
    batches = list(as_batches(data))
    if not batches:
        raise EmptyDataError("The oracle needs training data to stay close to, but it is empty.")
    for batch in batches:
        check_inputs(batch)
    return join(batches)


def join(batches: Iterable[Batch]) -> Points:
    """Put neighbouring batches together where shapes allow."""
    return Points(tuple(_joined(list(group)) for _, group in itertools.groupby(batches, _kind)))


def digest_model(model: nn.Module) -> str:
    """SHA-256 of all parameters and buffers, and of which are trainable."""
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    return digest(*(part for name, value in tensors for part in (name, value.requires_grad, value)))


def inputs_of(batch: Batch) -> list[Any]:
    """All inputs of a batch, with the names of keyword ones."""
    return [*batch.args, *(part for item in sorted(batch.kwargs.items()) for part in item)]


def digest(*parts: Any) -> str:
    """SHA-256 of tensors (type, shape and bytes) and of whatever else by its ``repr``."""
    found = hashlib.sha256()
    for part in parts:
        if isinstance(part, Tensor):
            value = part.detach().cpu().contiguous()
            found.update(f"{value.dtype} {list(value.shape)} ".encode())
            found.update(value.reshape(-1).view(torch.uint8).numpy().data)
        else:
            found.update(f"{part!r} ".encode())
    return found.hexdigest()


def _kind(batch: Batch) -> Hashable:
    """Equal for batches that can be joined; a batch with anything but tensors of B examples stays alone."""
    values = [*batch.args, *batch.kwargs.values()]
    if not all(isinstance(value, Tensor) and value.dim() and len(value) == batch.size for value in values):
        return id(batch)
    labels = None if batch.labels is None else batch.labels.dtype
    return len(batch.args), tuple(batch.kwargs), labels, tuple((value.shape[1:], value.dtype) for value in values)


def _joined(batches: list[Batch]) -> Batch:
    first = batches[0]
    if len(batches) == 1:
        return first
    args = tuple(torch.cat(values) for values in zip(*(batch.args for batch in batches), strict=True))
    kwargs = {key: torch.cat([batch.kwargs[key] for batch in batches]) for key in first.kwargs}
    labels = None if first.labels is None else torch.cat([cast(Tensor, batch.labels) for batch in batches])
    return Batch(args, kwargs, labels, sum(batch.size for batch in batches), "the training data")
