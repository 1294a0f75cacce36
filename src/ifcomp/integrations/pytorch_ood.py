"""`IFCompDetector`: a detector for the benchmarks, metrics and searches of pytorch-ood.

Larger scores = more out-of-distribution, as in pytorch-ood.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Self

from torch import Tensor, nn
from torch.utils.data import DataLoader

from ifcomp.curvature.factors import Damping, Relative
from ifcomp.optional import requires_package
from ifcomp.predictor import IFComp
from ifcomp.tasks.ood import OOD_DAMPING

with requires_package("pytorch-ood", "ood"):
    from pytorch_ood.api import (
        DetectorInfo,
        GradientDetector,
        ModelNotSetException,
        Paper,
        RequiresFittingException,
        Task,
    )
    from pytorch_ood.utils import is_known


class IFCompDetector(GradientDetector):  # type: ignore[misc]  # pytorch-ood has no type information
    """Outlier detector whose score is bounded complexity in nats, from 0 to log K; larger = more surprising.

    With ``probes`` the score is parametric complexity ``log(1 + E[IF] / n)`` (eq. ifcomp_par); with ``capped`` it is
    parametric complexity with hindsight probabilities capped at 1.

    Example:
        >>> detector = IFCompDetector(model).fit(train_loader)
        >>> benchmark.evaluate(detector, loader_kwargs={"batch_size": 128})

    Attributes:
        model: Classifier. It is evaluated in eval mode and not modified.
        beta: Inverse temperature; a change takes effect at the next `fit`.
        damping: Damping of the scores; see `ifcomp.tasks.ood.OOD_DAMPING`.
        probes: Number of probes, or None for all labels.
        capped: Alpha of capped complexity, or None.
    """

    info: ClassVar[DetectorInfo] = DetectorInfo(
        paper=Paper(
            title="Measuring Stochastic Data Complexity with Boltzmann Influence Functions",
            venue="ICML",
            year=2024,
            url="https://arxiv.org/abs/2406.02745",
        ),
        tasks={Task.CLASSIFICATION},
    )
    requires_fit = True
    hyperparameter_space: ClassVar[dict[str, list[Any]]] = {
        "beta": [0.25, 0.5, 1.0, 2.0],
        "damping": [Relative(1e-8), OOD_DAMPING, Relative(0.1)],
    }

    def __init__(
        self,
        model: nn.Module,
        beta: float = 1.0,
        *,
        damping: Damping = OOD_DAMPING,
        probes: int | None = None,
        capped: float | None = None,
        **options: Any,
    ) -> None:
        """Inspect the model and check the settings. The model is not modified.

        Args:
            model: Classifier that returns logits [B, K].
            beta: Inverse temperature.
            damping: Damping of the curvature.
            probes: Estimate the score from this number of probes; the cost is 1 + 2 probes forward passes instead of
                1 + 2K.
            capped: Use capped complexity with this alpha as score.
            options: Further arguments of `IFComp`, such as ``layers``, ``sua``, ``fisher`` and ``seed``.

        Raises:
            ModelNotSetException: If the model is None.
        """
        if model is None:
            raise ModelNotSetException("IFCompDetector needs a model: give an nn.Module that returns logits.")
        self.model = model
        self.beta = beta
        self.damping = damping
        self.probes = probes
        self.capped = capped
        self._options = options
        self._ifc = self._unfitted()

    def fit(self, data_loader: DataLoader[Any]) -> Self:
        """Estimate the curvature in two passes over the training data. Negative labels (OOD) are skipped."""
        self._ifc = self._unfitted().fit(_InDistribution(data_loader))
        return self

    def predict(self, x: Tensor) -> Tensor:
        """Return the outlier scores [B] of inputs [B, ...] in nats; larger = more surprising.

        Raises:
            RequiresFittingException: If `fit` was not called.
        """
        if self._ifc.factors is None:
            raise RequiresFittingException
        if self.probes is None and self.capped is None:
            return self._ifc.bounded_complexity(x, damping=self.damping)
        alpha: dict[str, Any] = {} if self.capped is None else {"capped": True, "alpha": self.capped}
        return self._ifc.parametric_complexity(x, **alpha, probes=self.probes, damping=self.damping)

    def _unfitted(self) -> IFComp:
        return IFComp(self.model, self.beta, damping=self.damping, **self._options)


class _InDistribution:
    """Re-iterable over the batches of a loader without the examples that pytorch-ood marks as OOD."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in self._loader:
            known = is_known(y)
            if known.any():
                yield x[known], y[known]
