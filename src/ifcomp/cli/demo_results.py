"""What the demo finds, as plain data: the JSON that it prints has these fields."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Suspect:
    """A training example with a suspicious label; ``pixels`` are 8 rows of 8 values in 0 ... 16.

    ``complexity`` is its label complexity in nats; larger = more suspicious.
    """

    index: int
    given: int
    suggested: int
    complexity: float
    flipped: bool
    pixels: list[list[int]]


@dataclass(frozen=True)
class Ranking:
    """How well a score ranks flipped labels first.

    Attributes:
        found: Flipped labels among the first k, where k is the number of flipped labels.
        auroc: Probability that a flipped label ranks before another.
    """

    found: float
    auroc: float


@dataclass(frozen=True)
class Audit:
    """Which training labels are wrong.

    Attributes:
        examples: Of the training data.
        flipped: Labels that are wrong.
        suspected: Labels that the audit calls suspects; it does not know how many are wrong.
        suspected_flipped: How many of these are wrong.
        complexity: Sorted by label complexity.
        loss: Sorted by plain loss.
        chance: Sorted at random.
        suspects: The first ones.
    """

    examples: int
    flipped: int
    suspected: int
    suspected_flipped: int
    complexity: Ranking
    loss: Ranking
    chance: Ranking
    suspects: list[Suspect]


@dataclass(frozen=True)
class Networks:
    """The network trained with flipped labels, and the one trained again without the suspects.

    Attributes:
        parameters: Of each network.
        covered: Parameters that the curvature covers.
        memorised: Share of the flipped labels that the first network predicts.
        accuracy: Of the first network on test digits.
        accuracy_cleaned: Of the second.
    """

    parameters: int
    covered: int
    memorised: float
    accuracy: float
    accuracy_cleaned: float


@dataclass(frozen=True)
class Detection:
    """AUROC of strangers against clean test digits."""

    name: str
    complexity: float
    max_softmax: float


@dataclass(frozen=True)
class Damping:
    """A relative damping and the mean AUROC that it reaches on validation data."""

    relative: float
    validation_auroc: float


@dataclass(frozen=True)
class OutOfDistribution:
    """Which inputs are new."""

    damping: Damping
    candidates: list[Damping]
    chosen_on: list[str]
    rows: list[Detection]


@dataclass(frozen=True)
class Quality:
    """How good probabilities are."""

    ece: float
    nll: float
    accuracy: float


@dataclass(frozen=True)
class Shifted:
    """Quality on one kind of test digits: softmax, softmax at a fitted temperature, and pNML."""

    name: str
    softmax: Quality
    temperature: Quality
    pnml: Quality


@dataclass(frozen=True)
class Alpha:
    """An alpha of `IFComp.predict_proba` and what it reaches on validation data; 0 is the softmax."""

    value: float
    validation_nll: float
    validation_accuracy: float


@dataclass(frozen=True)
class Calibration:
    """How far to trust a prediction.

    Attributes:
        alpha: The chosen one: smallest validation NLL among those that cost little accuracy.
        candidates: All that were tried, the softmax first.
        accuracy_cost: How much validation accuracy an alpha may cost.
        inverse_temperature: The one that softmax is compared at, chosen on the same data.
        chosen_on: Kinds of validation digits.
        rows: Kinds of test digits.
    """

    alpha: Alpha
    candidates: list[Alpha]
    accuracy_cost: float
    inverse_temperature: float
    chosen_on: list[str]
    rows: list[Shifted]


@dataclass(frozen=True)
class Demo:
    """Everything that the demo found."""

    seed: int
    training_examples: int
    validation_examples: int
    test_examples: int
    networks: Networks
    audit: Audit
    out_of_distribution: OutOfDistribution
    calibration: Calibration
    seconds: float
