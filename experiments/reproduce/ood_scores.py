"""Scores of the study of OOD detection: influences, complexities, joins and detectors, kept in the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from experiments.baselines.ood import Detection
from experiments.datasets import Batches, Dataset, load
from experiments.reproduce import synthetic_ood
from experiments.reproduce.cached_arrays import Arrays, CachedArrays
from experiments.reproduce.subject import sample
from experiments.tuning import fit_grid
from ifcomp import IFComp, Relative
from ifcomp.complexity import bounded_complexity, capped_complexity, expected_influence, parametric_complexity
from ifcomp.tasks.ood import DEFAULT_MEMBERS, OOD_DAMPING, join_scores, member_weights

if TYPE_CHECKING:
    from experiments.reproduce.ood import Settings

#: Prefix of `synthetic_ood` data sets.
MADE = "made-"
#: Names of in-distribution test images, and of held-out images of the joins.
INSIDE, HELD_OUT = "in", "held out"
#: Forms of complexity.
PARAMETRIC, CAPPED, BOUNDED = "parametric", "capped", "bounded"
#: Rank of the neighbour.
NEIGHBOURS = 50
#: Data of detectors that read inputs instead of logits or features.
_READ_INPUTS = ("Gram", "NAC")


@dataclass(frozen=True)
class Choice:
    """A form of complexity with its settings.

    Attributes:
        form: Form of complexity.
        beta: Inverse temperature.
        damping: Multiple of the mean of a layer, or an absolute value if ``is_absolute``.
        alpha: Alpha of the capped form; None otherwise.
        is_absolute: Whether the damping is absolute.
    """

    form: str
    beta: float
    damping: float
    alpha: float | None = None
    is_absolute: bool = False

    @property
    def key(self) -> str:
        """Name of the influences, which do not depend on the form."""
        return f"beta {self.beta:g}, damping {self.damping:g}{' absolute' if self.is_absolute else ''}"


#: Bounded complexity of `IFComp.ood_detector`.
DEFAULT = Choice(BOUNDED, 1.0, OOD_DAMPING.multiple)


def complexity(choice: Choice, logits: Tensor, influence: Tensor, count: int, mean_influence: float) -> np.ndarray:
    """Return the complexity [N] in nats; larger = more surprising.

    Args:
        choice: Form and settings.
        logits: [N, K].
        influence: Influence of every label, [N, K].
        count: Number of examples of the curvature n.
        mean_influence: Mean of E[IF] over the training data.
    """
    log_probability = (choice.beta * logits.double()).log_softmax(1)
    probability, influence = log_probability.exp(), influence.double()
    if choice.form == BOUNDED:
        return np.asarray(bounded_complexity(log_probability, influence, mean_influence))
    if choice.form == CAPPED:
        assert choice.alpha is not None
        return np.asarray(capped_complexity(probability, influence, count, choice.alpha))
    return np.asarray(parametric_complexity(expected_influence(probability, influence), count))


def rank_sum(values: Iterable[np.ndarray], held_out: Iterable[np.ndarray]) -> np.ndarray:
    """Return the sum over scores of the share of held-out values below a value, [N]; equal ones count half."""
    total: np.ndarray | float = 0.0
    for scores, reference in zip(values, held_out, strict=True):
        ordered = np.sort(reference)
        below, up_to = (np.searchsorted(ordered, scores, side) for side in ("left", "right"))
        total = total + (below + up_to) / (2 * len(ordered))
    return np.asarray(total)


class Scores:
    """All scores of one network, computed when they are first needed.

    Args:
        settings: Settings of the study.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings, self.subject = settings, settings.subject
        identity = {
            "subject": asdict(settings.subject),
            **{name: getattr(settings, name) for name in ("images", "tuning_images", "held_out_images")},
            **{name: getattr(settings, name) for name in ("fit_examples", "input_examples", "betas", "seed")},
        }
        self.arrays = CachedArrays.of("ood", {"schema": 1, **identity})

    @cached_property
    def network(self) -> nn.Module:
        """The network."""
        return self.subject.network()

    @cached_property
    def _parts(self) -> tuple[Dataset, Dataset, Dataset]:
        return self.subject.parts()

    def known(self, count: int | None) -> Batches:
        """Return training data with labels; None returns all."""
        data = self._parts[0]
        return self.subject.batches(sample(data, count or len(data), self.settings.seed))

    @cached_property
    def _data(self) -> dict[str, Dataset]:
        """Images of all sets by name."""
        settings, (_, validation, test) = self.settings, self._parts
        inside = sample(test, settings.images, settings.seed)
        tuning = sample(validation, 2 * settings.tuning_images, settings.seed)
        half = torch.arange(len(tuning)) % 2 == 0
        data = {
            INSIDE: inside,
            HELD_OUT: sample(validation, settings.held_out_images, settings.seed + 1),
            "tuning in": tuning.take(half.nonzero()[:, 0], "even"),
        }
        base = tuning.take((~half).nonzero()[:, 0], "odd")
        data |= {name: self._outside(name, inside) for name in settings.test_sets}
        return data | {name: self._outside(name, base) for name in settings.tuning_sets}

    def _outside(self, name: str, in_data: Dataset) -> Dataset:
        """Return OOD images of a data set, or generated from ``in_data``, at most as many as ``in_data`` has."""
        if name.startswith(MADE):
            return synthetic_ood.make(name.removeprefix(MADE), in_data, self.settings.seed)
        return replace(self.subject.fitted_to(sample(load(name), len(in_data), self.settings.seed)), labels=None)

    def inputs(self, name: str) -> Batches:
        """Return the inputs of a set."""
        return self.subject.inputs(self._data[name])

    def size(self, name: str) -> int:
        """Return the number of images of a set."""
        return len(self._data[name])

    @property
    def betas(self) -> tuple[float, ...]:
        """All betas that are fitted."""
        return tuple(dict.fromkeys((*self.settings.betas, self.settings.paper_beta, DEFAULT.beta)))

    def _factor_file(self, beta: float) -> Path:
        return self.arrays.folder / f"beta-{beta:g}.ifcomp"

    @cached_property
    def predictors(self) -> dict[float, IFComp]:
        """Fitted predictors by beta, from the cache if possible."""
        if not all(self._factor_file(beta).exists() for beta in self.betas):
            fisher = self.subject.fisher
            fitted = fit_grid(self.network, self.betas, self.known(self.settings.fit_examples), fisher=fisher)
            for predictor in fitted:
                predictor.save(self._factor_file(predictor.beta))
            return {predictor.beta: predictor for predictor in fitted}
        return {beta: IFComp.load(self._factor_file(beta), self.network) for beta in self.betas}

    @property
    def count(self) -> int:
        """Number of training examples of the curvature."""
        factors = self.predictors[DEFAULT.beta].factors
        assert factors is not None
        return factors.count

    def logits(self, name: str) -> Tensor:
        """Return the logits of a set, [N, K]."""
        return torch.from_numpy(self._outputs(name)["logits"])

    def _outputs(self, name: str) -> Arrays:
        def compute() -> Mapping[str, Any]:
            detection = self._detection({name: self.inputs(name)}, 1)
            return {"logits": detection.logits(name).numpy(), "features": detection.features(name).numpy()}

        return self.arrays.get(f"outputs, {name}", compute)

    def influence(self, choice: Choice, name: str) -> Tensor:
        """Return the influence of every label for a set, [N, K]."""

        def compute() -> Mapping[str, Any]:
            damping = choice.damping if choice.is_absolute else Relative(choice.damping)
            predictor = self.predictors[choice.beta]
            parts = [predictor.influence(x, damping=damping) for (x,) in self.inputs(name)]
            return {"influence": torch.cat(parts).numpy()}

        return torch.from_numpy(self.arrays.get(f"influence, {choice.key}, {name}", compute)["influence"])

    def complexity(self, choice: Choice, name: str) -> np.ndarray:
        """Return a complexity of a set, [N]."""
        factors = self.predictors[choice.beta].factors
        assert factors is not None
        damping = choice.damping if choice.is_absolute else Relative(choice.damping)
        mean_influence = factors.effective_parameters(damping)
        return complexity(choice, self.logits(name), self.influence(choice, name), factors.count, mean_influence)

    def neighbours(self, name: str) -> np.ndarray:
        """Return the distance to the 50th nearest normalised penultimate features of the training data, [N]."""

        def compute() -> Mapping[str, Any]:
            queries = nn.functional.normalize(torch.from_numpy(self._outputs(name)["features"]).double(), dim=1)
            rank = min(NEIGHBOURS, len(self._reference))
            near = [(rows @ self._reference.T).topk(rank).values[:, -1] for rows in queries.split(200)]
            return {"neighbours": (2 - 2 * torch.cat(near)).clamp_min(0).sqrt().numpy()}

        return self.arrays.get(f"neighbours, {name}", compute)["neighbours"]

    @cached_property
    def _reference(self) -> Tensor:
        """Normalised penultimate features of all training images in float64, [M, D]."""
        return nn.functional.normalize(self._known_detection.features(None).double(), dim=1)

    def members(self, choice: Choice, name: str) -> dict[str, np.ndarray]:
        """Return the members of the joined scores of a set, [N] each."""
        energy = -self.logits(name).logsumexp(1).numpy()
        return {"complexity": self.complexity(choice, name), "energy": energy, "neighbours": self.neighbours(name)}

    def rank_sum(self, choice: Choice, name: str) -> np.ndarray:
        """Return the sum of the ranks of all members among the held-out images, [N]."""
        return rank_sum(self.members(choice, name).values(), self.members(choice, HELD_OUT).values())

    def default(self, name: str) -> np.ndarray:
        """Return the score of `IFComp.ood_detector` with its default settings, [N]."""
        held_out = self.members(DEFAULT, HELD_OUT)
        top = self.logits(HELD_OUT).softmax(1).amax(1)
        weights = member_weights(held_out, (1 - top).numpy(), DEFAULT_MEMBERS)
        return join_scores(self.members(DEFAULT, name), held_out, weights)

    def detector(self, detector: str) -> dict[str, np.ndarray]:
        """Return the scores of a detector of pytorch-ood for the in-distribution and all OOD test sets, [N] each."""

        def compute() -> Mapping[str, Any]:
            reads_inputs = detector in _READ_INPUTS
            return (self._small_detection if reads_inputs else self._known_detection).scores(detector)

        return self.arrays.get(f"detector {detector}", compute)

    @cached_property
    def _known_detection(self) -> Detection:
        return self._detection(self._loaders, None)

    @cached_property
    def _small_detection(self) -> Detection:
        return self._detection(self._loaders, self.settings.input_examples)

    @property
    def _loaders(self) -> dict[str, Batches]:
        return {name: self.inputs(name) for name in (INSIDE, *self.settings.test_sets)}

    def _detection(self, loaders: Mapping[str, Batches], count: int | None) -> Detection:
        return Detection(self.network, self.known(count), loaders, seed=self.settings.seed)

    def method(self, compute: Callable[[str], np.ndarray]) -> dict[str, np.ndarray]:
        """Return the scores of the in-distribution and all OOD test sets, [N] each."""
        return {name: compute(name) for name in (INSIDE, *self.settings.test_sets)}
