"""Last-layer Laplace approximation with Kronecker factors, by laplace-torch: ``pip install 'ifcomp[laplace]'``."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from experiments.baselines.inference import (
    check_repeatable,
    model_inputs,
    model_logits,
    nonempty_batch,
    on_device,
)
from experiments.baselines.interface import check_positive
from ifcomp.data.batches import LABEL_KEY, as_batch, as_batches
from ifcomp.data.checks import check_data, check_labels
from ifcomp.errors import EmptyDataError, MissingPackageError, ModelError
from ifcomp.layers.forward import run_model


class LastLayerLaplace:
    """``softmax(m_k / sqrt(1 + pi/8 S_kk))``: the linearised predictive of the last layer with the probit link.

    The logits have the mean m = f(x) and the covariance S under the posterior of the last layer's weights.
    """

    def __init__(self, model: nn.Module, data: Iterable[Any], *, prior_precision: float | None = None) -> None:
        """Fit the curvature of the last layer. Cost: one pass over the training data.

        Args:
            model: A classifier whose last layer is ``nn.Linear``; laplace-torch works on a copy.
            data: Batches with labels, ``(x, y)`` or dicts.
            prior_precision: Precision of the Gaussian prior; None maximises the marginal likelihood.
        """
        laplace = _import_laplace()
        if prior_precision is not None:
            check_positive("prior_precision", prior_precision)
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
        """Precision of the Gaussian prior over the last layer's weights."""
        return float(self.posterior.prior_precision)

    def predict_proba(self, x: Any) -> Tensor:
        """Return the predictive probabilities, [B, K]. Cost: one forward pass, and D K^2 operations."""
        batch = on_device(self.model, nonempty_batch(x))
        with torch.no_grad():
            values: Tensor = self.posterior(model_inputs(batch), pred_type="glm", link_approx="probit").double()
        return values / values.sum(1, keepdim=True)


class _Loader:
    """Data in the form that laplace-torch takes: ``(x, y)`` or dicts with labels, and a ``dataset`` of length n."""

    def __init__(self, data: Iterable[Any], model: nn.Module) -> None:
        check_data(data)
        check_repeatable(data)
        self._data, self._model = data, model
        count, first = 0, None
        for batch in as_batches(data):
            first = first or batch
            count += batch.size
        if first is None:
            raise EmptyDataError("The Laplace approximation needs at least one example, but the data is empty.")
        self._classes = model_logits(model, model_inputs(first.select(slice(0, 1)))).shape[1]
        self.key = next((key for key, value in first.kwargs.items() if isinstance(value, Tensor)), None)
        self.dataset = range(count)

    def __iter__(self) -> Iterator[Any]:
        for batch in as_batches(self._data):
            moved = on_device(self._model, batch)
            labels = check_labels(batch, self._classes).to(next(moved.tensors()).device)
            inputs = model_inputs(moved)
            yield {**inputs, LABEL_KEY: labels} if isinstance(inputs, dict) else (inputs, labels)


class _Logits(nn.Module):
    """A model that takes its inputs as one argument and returns plain logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Any) -> Tensor:
        return run_model(self.model, as_batch(x))


def _import_laplace() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            import laplace
    except (ImportError, RuntimeError) as error:  # torchvision raises the second if it does not match torch
        raise MissingPackageError(
            f"This baseline needs the package laplace-torch, which cannot be imported ({error}). "
            "Install it with: pip install 'ifcomp[laplace]'"
        ) from error
    return laplace
