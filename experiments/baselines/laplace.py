"""Last-layer Laplace with Kronecker factors, by the package laplace-torch: ``pip install 'ifcomp[laplace]'``."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from experiments.baselines.interface import checked_batch, model_logits
from ifcomp.data.batches import LABEL_KEY, Batch, as_batch, as_batches
from ifcomp.data.checks import check_data, check_inputs, check_labels
from ifcomp.errors import DataError, EmptyDataError, MissingPackageError, ModelError, SettingError
from ifcomp.layers.forward import run_model


class LastLayerLaplace:
    """Generalised linear predictive of the last layer with the probit link; the prior by marginal likelihood."""

    def __init__(self, model: nn.Module, data: Iterable[Any], *, prior_precision: float | None = None) -> None:
        """Fit the curvature of the last layer in one pass over the training data.

        Args:
            model: A classifier whose last layer is ``nn.Linear``; laplace-torch works on a copy.
            data: Batches with labels, ``(x, y)`` or dicts.
            prior_precision: Of the Gaussian prior; None maximises the marginal likelihood.
        """
        laplace = _import_laplace()
        if prior_precision is not None and not 0 < prior_precision < math.inf:
            raise SettingError(f"prior_precision must be a finite number above 0, but is {prior_precision!r}.")
        loader = _Loader(data, model)
        self.model = model
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "By default `link_approx` is `probit`", UserWarning)
            try:
                self.posterior = laplace.Laplace(
                    _Logits(model),
                    "classification",
                    subset_of_weights="last_layer",
                    hessian_structure="kron",
                    dict_key_x=loader.key or "input_ids",
                    dict_key_y=LABEL_KEY,
                )
                self.posterior.fit(loader)
            except ValueError as error:
                raise ModelError(f"laplace-torch cannot use this model: {error}") from error
            if prior_precision is None:
                self.posterior.optimize_prior_precision(method="marglik", link_approx="probit")
            else:
                self.posterior.prior_precision = prior_precision

    @property
    def prior_precision(self) -> float:
        """Of the Gaussian prior over the last layer's weights."""
        return float(self.posterior.prior_precision)

    def predict_proba(self, x: Any) -> Tensor:
        """Predictive probabilities [B, K]. Cost: a forward pass, and K x K numbers for each feature."""
        batch = checked_batch(self.model, x)
        with torch.no_grad():
            found: Tensor = self.posterior(_inputs(batch), pred_type="glm", link_approx="probit").double()
        return found / found.sum(1, keepdim=True)


class _Loader:
    """Data as laplace-torch takes it: ``(x, y)`` or dicts with labels, and a ``dataset`` whose length is n."""

    def __init__(self, data: Iterable[Any], model: nn.Module) -> None:
        check_data(data)
        if isinstance(data, Iterator):
            raise DataError("The data is iterated more than once, but is an iterator. Give a DataLoader or a list.")
        self._data, self._device = data, next(model.parameters()).device
        sizes, first = 0, None
        for batch in as_batches(data):
            first = first or batch
            sizes += batch.size
        if first is None:
            raise EmptyDataError("The Laplace approximation needs at least one example, but the data is empty.")
        self._classes = model_logits(model, _inputs(first.select(slice(0, 1)))).shape[1]
        self.key = next((key for key, value in first.kwargs.items() if isinstance(value, Tensor)), None)
        self.dataset = range(sizes)

    def __iter__(self) -> Iterator[Any]:
        for batch in as_batches(self._data):
            check_inputs(batch)
            labels = check_labels(batch, self._classes).to(self._device)
            inputs = _inputs(batch.to(self._device))
            yield {**inputs, LABEL_KEY: labels} if isinstance(inputs, dict) else (inputs, labels)


class _Logits(nn.Module):
    """A model that takes its inputs as one argument and returns plain logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Any) -> Tensor:
        return run_model(self.model, as_batch(x))


def _inputs(batch: Batch) -> Any:
    return batch.kwargs if batch.kwargs else batch.args[0]


def _import_laplace() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            import laplace
    except (ImportError, RuntimeError) as error:  # torchvision raises the second where it does not fit torch
        raise MissingPackageError(
            f"This baseline needs the package laplace-torch, which cannot be imported ({error}). "
            "Install it with: pip install 'ifcomp[laplace]'"
        ) from error
    return laplace
