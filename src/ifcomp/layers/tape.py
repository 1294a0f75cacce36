"""Watches a model while it runs, and leaves it as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ifcomp.data.batches import Batch
from ifcomp.layers.block import Layout, Site
from ifcomp.layers.capture import Recording
from ifcomp.layers.forward import evaluating, run_in_autocast
from ifcomp.layers.room import Room
from ifcomp.layers.wrappers import uncompiled


class Tape:
    """Watches the sites of a model while it runs."""

    def __init__(
        self, model: nn.Module, sites: tuple[Site, ...], layouts: Mapping[str, Layout], dtype: torch.dtype
    ) -> None:
        """Prepare, without touching the model yet.

        Args:
            model: The classifier.
            sites: What to watch.
            layouts: Where each block's batch axis is.
            dtype: In which precision canonical forms are given.
        """
        self.model = model
        self.sites = sites
        self.layouts = layouts
        self.dtype = dtype
        self.room = Room(dtype)
        self._recording: Recording | None = None
        self._quick = False
        self._filters: dict[nn.Module, Tensor] = {}

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Eval mode and all hooks for the length of the context; then the model is as it was."""
        with ExitStack() as undo:
            undo.enter_context(evaluating(self.model))
            undo.enter_context(uncompiled(self.model))
            undo.callback(self._filters.clear)  # weights may change before the next time
            for site in self.sites:
                if site.forward is None:
                    hook = site.module.register_forward_hook(self._hook(site), prepend=True, with_kwargs=True)
                    undo.callback(hook.remove)
                else:
                    site.module.forward = self._stand_in(site)
                    undo.callback(delattr, site.module, "forward")
            yield

    def record(self, batch: Batch, quick: bool = False) -> Recording:
        """Run the model on a batch inside `attached`.

        Args:
            batch: The examples.
            quick: Whether layers may have a quicker backward than that of PyTorch, which takes memory and cannot be
                run by ``vmap``.
        """
        recording = Recording(batch.size, self.layouts, self.dtype, self.room)
        self._recording, self._quick = recording, quick
        try:
            with torch.inference_mode(False), torch.enable_grad():  # whatever the loader's own modes are
                recording.logits, recording.precision = run_in_autocast(self.model, batch)
        finally:
            self._recording = None
        for site in self.sites:
            for block in site.blocks:
                recording.check_unchanged(block)
        return recording

    def _emit(self, site: Site, parts: Mapping[str, slice | None], value: Tensor, output: Tensor) -> Tensor:
        recording = self._recording
        if recording is None or not output.requires_grad:
            return output
        own_precision = value.requires_grad and value.dtype == output.dtype == self.dtype  # not under autocast
        if self._quick and site.quick is not None and own_precision and site.quick.pays(value, len(value)):
            if site.module not in self._filters:
                place = self.room.take(f"filters of {site.blocks[0].name}", site.quick.shape, value.device)
                self._filters[site.module] = site.quick.filters(place)
            output = site.quick.rewire(value, output, self._filters[site.module])
        names = [block.name for block in site.blocks if block.name in parts]
        if recording.batch > 1 and any(self.layouts.get(name) is Layout.SHARED for name in names):
            value = value.expand(recording.batch, *value.shape[1:])
            output = output.expand(recording.batch, *output.shape[1:])
        for name in names:
            recording.add(name, value, output, parts[name])
        return output

    def _hook(self, site: Site) -> Callable[..., Tensor]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
            return self._emit(site, {site.blocks[0].name: None}, args[0] if args else kwargs["input"], output)

        return hook

    def _stand_in(self, site: Site) -> Callable[..., object]:
        def emit(parts: dict[str, slice | None], value: Tensor, output: Tensor) -> Tensor:
            return self._emit(site, parts, value, output)

        def forward(*args: Any, **kwargs: Any) -> object:
            assert site.forward is not None
            return site.forward(emit, *args, **kwargs)

        return forward
