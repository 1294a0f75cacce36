"""`IFCompDetector`: a detector for the benchmarks, metrics and searches of pytorch-ood.

Larger scores = more out-of-distribution, as in pytorch-ood.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Self

from torch import Tensor, nn
from torch.utils.data import DataLoader

from ifcomp.optional import requires_package
from ifcomp.predictor import IFComp
from ifcomp.tasks.ood import check_members

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
    """Outlier detector with the score of `IFComp.ood_detector`; larger = more surprising.

    The score joins bounded complexity, energy and the distance to training examples by their p-values among held-out
    inputs. Pytorch-ood fits detectors on training data only, so the held-out inputs are an argument of the constructor.

    Example:
        >>> detector = IFCompDetector(model, held_out=validation_loader).fit(train_loader)
        >>> benchmark.evaluate(detector, loader_kwargs={"batch_size": 128})

    Attributes:
        model: Classifier. It is evaluated in eval mode and not modified.
        held_out: Batches ``(x, y)`` of in-distribution inputs that the model was not trained on.
        beta: Inverse temperature.
        score: As for `IFComp.ood_detector`. Changes of attributes take effect at the next `fit`.
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
        "score": [None, "complexity", "energy", "neighbours"],
    }

    def __init__(
        self,
        model: nn.Module,
        held_out: DataLoader[Any],
        beta: float = 1.0,
        score: str | Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        """Inspect the model and check the settings. The model is not modified.

        Args:
            model: Classifier that returns logits [B, K].
            held_out: Batches ``(x, y)`` of inputs that the model was not trained on. Those with negative labels (OOD)
                are skipped.
            beta: Inverse temperature.
            score: Name of one member, or several names; None joins all members.
            options: Further arguments of `IFComp`, such as ``layers``, ``sua``, ``fisher`` and ``seed``.

        Raises:
            ModelNotSetException: If the model is None.
        """
        if model is None:
            raise ModelNotSetException("IFCompDetector needs a model: give an nn.Module that returns logits.")
        check_members(score)
        self.model = model
        self.held_out = held_out
        self.beta = beta
        self.score = score
        self._options = options
        self._ifc = self._unfitted()

    def fit(self, data_loader: DataLoader[Any]) -> Self:
        """Estimate the curvature on training data, and score the held-out inputs. Negative labels (OOD) are skipped."""
        self._ifc = self._unfitted().fit(_InDistribution(data_loader))
        self._ifc.ood_detector(_InDistribution(self.held_out), score=self.score)
        return self

    def predict(self, x: Tensor) -> Tensor:
        """Return the outlier scores [B] of inputs [B, ...]; larger = more surprising.

        Raises:
            RequiresFittingException: If `fit` was not called.
        """
        if self._ifc.detector is None:
            raise RequiresFittingException
        return self._ifc.detector.score(x)

    def _unfitted(self) -> IFComp:
        return IFComp(self.model, self.beta, **self._options)


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
