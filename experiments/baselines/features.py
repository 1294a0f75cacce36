"""A classifier run over data, and taken apart: penultimate features and head, and the feature maps before them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ifcomp.data.batches import Batch, as_batch, as_batches
from ifcomp.data.checks import check_data, check_inputs, check_labels
from ifcomp.errors import EmptyDataError, ModelError
from ifcomp.layers.forward import evaluating, run_model
from ifcomp.progress import track


@dataclass(frozen=True)
class Outputs:
    """What a classifier gives for a data set, on the CPU.

    Attributes:
        logits: [N, K].
        labels: [N], or None if they were not asked for.
        features: Inputs of the head, [N, D]; None if no head was given.
    """

    logits: Tensor
    labels: Tensor | None
    features: Tensor | None = None


def run_data(
    model: nn.Module,
    data: Iterable[Any],
    *,
    labels: bool = True,
    head: nn.Linear | None = None,
    progress: bool | None = None,
) -> Outputs:
    """Run a classifier in eval mode over a data set. Cost: one forward pass.

    Args:
        model: Returns logits [B, K], or an object with ``.logits``.
        data: Batches ``(x, y)``, ``(x,)``, ``x`` or dicts.
        labels: Whether labels are needed; if not, they are not looked at.
        head: The model's head, to get the penultimate features as well.
        progress: Show a progress bar; None shows it on terminals.

    Raises:
        EmptyDataError: If there is no example.
        LabelError: If labels are needed and are missing or wrong.
    """
    check_data(data)
    logits, found, features = [], [], []
    with evaluating(model), torch.inference_mode(False), torch.no_grad(), _captured(head) as captured:
        for batch in as_batches(track(data, "forward passes", progress)):
            captured.clear()
            output = forward(model, batch)
            logits.append(output.cpu())
            if labels:
                found.append(check_labels(batch, output.shape[1]).cpu())
            if head is not None:
                features.append(captured[-1].cpu())
    if not logits:
        raise EmptyDataError("There is no example: the data is empty.")
    return Outputs(
        torch.cat(logits), torch.cat(found) if labels else None, torch.cat(features) if head is not None else None
    )


def forward(model: nn.Module, batch: Batch) -> Tensor:
    """Logits [B, K], of copies of the inputs on the model's device; gradients flow back to the inputs."""
    check_inputs(batch)
    device = next(model.parameters()).device

    def move(value: Any) -> Any:
        return value.to(device, copy=True) if isinstance(value, Tensor) else value

    kwargs = {key: move(value) for key, value in batch.kwargs.items()}
    return run_model(model, replace(batch, args=tuple(map(move, batch.args)), kwargs=kwargs))


def split_classifier(model: nn.Module, example: Any) -> tuple[Callable[[Any], Tensor], nn.Linear]:
    """Split a classifier into penultimate features and the Linear that turns them into logits.

    Args:
        model: Any classifier whose logits are the output of a Linear.
        example: A batch, as a loader yields it.

    Returns:
        A function from inputs (a batch as a loader yields it) to features [B, D] in the autograd graph, and the head:
        ``head(features(x))`` are the logits.

    Raises:
        ModelError: If the logits are not the output of a Linear that is called once with one row an example.
    """
    calls: list[tuple[nn.Linear, Tensor, Tensor]] = []

    def note(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        assert isinstance(module, nn.Linear)
        calls.append((module, args[0], output))

    batch = as_batch(example)
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    with evaluating(model), torch.no_grad(), ExitStack() as undo:
        for module in linear:
            undo.callback(module.register_forward_hook(note).remove)
        logits = forward(model, batch)
    times = Counter(module for module, _, _ in calls)
    heads = [
        module
        for module, value, output in calls
        if times[module] == 1 and value.shape[:-1] == (batch.size,) and torch.equal(output, logits)
    ]
    if not heads:
        raise ModelError(
            "The penultimate features cannot be found: the logits are not the output of a Linear that is called once "
            f"with one row an example ({len(linear)} Linear in the model). Let the model return what its last Linear "
            "gives, without a softmax or a scale after it."
        )
    head = heads[-1]

    def features(x: Any) -> Tensor:
        with evaluating(model), _captured(head) as captured:
            forward(model, as_batch(x))
        return captured[-1]

    return features, head


def find_stages(model: nn.Module, example: Any) -> list[nn.Module]:
    """The last module of every resolution: those whose outputs are the feature maps [B, C, H, W] of a CNN's stages.

    Modules that are called several times are left out, as are maps of one pixel.

    Args:
        model: The classifier.
        example: A batch, as a loader yields it.

    Returns:
        The modules in the order in which they run; none for a network without feature maps.
    """
    calls: list[tuple[nn.Module, Any]] = []
    with evaluating(model), torch.no_grad(), ExitStack() as undo:
        for module in model.modules():
            undo.callback(module.register_forward_hook(lambda own, _, output: calls.append((own, output))).remove)
        forward(model, as_batch(example))
    times = Counter(module for module, _ in calls)
    last: dict[torch.Size, nn.Module] = {}
    for module, output in calls:
        if times[module] == 1 and isinstance(output, Tensor) and output.dim() == 4 and output.shape[2:].numel() > 1:
            last.pop(output.shape[2:], None)  # so that the order is that of the calls
            last[output.shape[2:]] = module
    return list(last.values())


@contextmanager
def _captured(head: nn.Module | None) -> Iterator[list[Tensor]]:
    """The inputs of every call of the head."""
    inputs: list[Tensor] = []
    if head is None:
        yield inputs
        return
    hook = head.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    try:
        yield inputs
    finally:
        hook.remove()
