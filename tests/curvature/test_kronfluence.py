"""Agreement with the EKFAC of kronfluence, which shares no code with the library.

Both define a block's curvature as ``Q diag(Lambda) Q^T`` with ``Lambda`` the mean over examples of squared gradients in
the eigenbasis, at ``beta = 1``. Kronfluence stores the sum of the squares and how many examples it is over; a gradient
is ``[O, J]`` with a convolution's inputs in the order of its weight, channels slowest, and the bias as the last column.
Its damping is absolute, or 0.1 times the mean of ``Lambda`` where none is given.
"""

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from cases import seeded
from comparison import assert_same
from ifcomp import IFComp
from ifcomp.curvature.factors import Basis, BlockFactors, Damping, Relative
from oracles import (
    OracleBlock,
    block_jacobian,
    example_jacobians,
    example_logits,
    label_gradients,
    label_probabilities,
)

pytest.importorskip("kronfluence", reason="kronfluence is not installed")

from kronfluence.analyzer import Analyzer, prepare_model
from kronfluence.arguments import FactorArguments, ScoreArguments
from kronfluence.task import Task

pytestmark = pytest.mark.filterwarnings("ignore:.torch.cuda.amp.GradScaler:FutureWarning")

LAYERS = ("0", "2", "5", "7")
CLASSES = 4
DAMPINGS: list[Damping] = [1e-1, 1e-3, 1e-5, Relative(0.1)]


class Classification(Task):
    """Cross-entropy, with the data's labels or labels drawn from the model."""

    def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
        """Summed over the batch."""
        inputs, labels = batch
        logits = model(inputs)
        if sample:
            labels = torch.multinomial(logits.detach().softmax(1), 1).flatten()
        return functional.cross_entropy(logits, labels, reduction="sum")

    def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
        """Not used by self-influence."""
        return self.compute_train_loss(batch, model)


def network() -> nn.Module:
    """Convolutions with padding, stride and dilation, with and without a bias, and two Linear."""
    return nn.Sequential(
        *(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 2, stride=2, dilation=2, bias=False), nn.Tanh()),
        *(nn.Flatten(), nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, CLASSES)),
    )


@dataclass(frozen=True)
class Fitted:
    """A model, its training data, and kronfluence's analysis of it."""

    model: nn.Module
    train: TensorDataset
    test: TensorDataset
    analyzer: Analyzer

    def blocks(self) -> dict[str, BlockFactors]:
        """Kronfluence's factors as the library's."""
        found = self.analyzer.load_all_factors("ekfac")
        blocks = {}
        for name in LAYERS:
            bases = (found[f"{side}_eigenvectors"][name].unsqueeze(0) for side in ("activation", "gradient"))
            moments = found["lambda_matrix"][name] / found["num_lambda_processed"][name]
            blocks[name] = BlockFactors(moments.unsqueeze(0), Basis(*bases))
        return blocks

    def self_influence(self, damping: Damping) -> Tensor:
        """Kronfluence's self-influence of the test examples with their labels, [B]."""
        assert not isinstance(damping, Relative) or damping.multiple == 0.1
        arguments = ScoreArguments(
            damping_factor=None if isinstance(damping, Relative) else damping,
            per_sample_gradient_dtype=torch.float64,
            precondition_dtype=torch.float64,
            score_dtype=torch.float64,
        )
        self.analyzer.compute_self_scores(
            scores_name="self",
            factors_name="ekfac",
            train_dataset=self.test,
            per_device_train_batch_size=5,
            score_args=arguments,
            overwrite_output_dir=True,
        )
        return self.analyzer.load_self_scores("self")["all_modules"]


def examples(size: int, seed: int) -> TensorDataset:
    """Random images with random labels."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(size, 2, 6, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(images, torch.randint(CLASSES, (size,), generator=generator))


def fit_kronfluence(folder: Path, *, empirical: bool) -> Fitted:
    """EKFAC factors in float64 on the CPU, from labels drawn from the model or from those of the data."""
    model = seeded(network)().double()
    train, test = examples(64, seed=1), examples(12, seed=2)
    task = Classification()
    prepared = prepare_model(copy.deepcopy(model), task)
    analyzer = Analyzer("test", prepared, task, cpu=True, disable_tqdm=True, output_dir=str(folder), log_level=50)
    precisions = ("activation_covariance", "gradient_covariance", "per_sample_gradient", "lambda")
    arguments = FactorArguments(
        strategy="ekfac",
        use_empirical_fisher=empirical,
        **{f"{name}_dtype": torch.float64 for name in precisions},
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        analyzer.fit_all_factors("ekfac", train, per_device_batch_size=16, factor_args=arguments)
    return Fitted(model, train, test, analyzer)


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Fitted:
    """Kronfluence with the true Fisher."""
    return fit_kronfluence(tmp_path_factory.mktemp("sampled"), empirical=False)


@pytest.fixture(scope="module")
def empirical(tmp_path_factory: pytest.TempPathFactory) -> Fitted:
    """Kronfluence with the empirical Fisher, which leaves nothing to chance."""
    return fit_kronfluence(tmp_path_factory.mktemp("empirical"), empirical=True)


@pytest.mark.parametrize("damping", DAMPINGS, ids=str)
def test_influence_with_its_factors_is_its_self_influence(sampled: Fitted, damping: Damping) -> None:
    inputs, labels = sampled.test.tensors
    ifc = IFComp(sampled.model, fisher="exact").fit([sampled.train.tensors])
    own, theirs = ifc.factors.blocks, sampled.blocks()
    assert theirs.keys() == own.keys()
    for name, block in theirs.items():
        assert block.second_moments.shape == own[name].second_moments.shape
        assert block.basis.inputs.shape == own[name].basis.inputs.shape
    ifc.factors = replace(ifc.factors, blocks=theirs)
    influence = ifc.influence(inputs, damping=damping).gather(1, labels.unsqueeze(1)).squeeze(1)
    assert_same(influence, sampled.self_influence(damping), rtol=1e-9, floor=0.0)


@pytest.mark.parametrize("damping", DAMPINGS, ids=str)
def test_fits_on_the_same_labels_agree(empirical: Fitted, damping: Damping) -> None:
    """Nothing is handed over here: both passes, eigenvectors and influence of each."""
    inputs, labels = empirical.test.tensors
    ifc = IFComp(empirical.model, fisher="empirical").fit([empirical.train.tensors])
    influence = ifc.influence(inputs, damping=damping).gather(1, labels.unsqueeze(1)).squeeze(1)
    assert_same(influence, empirical.self_influence(damping), rtol=1e-9, floor=0.0)


def test_curvatures_on_the_same_labels_agree(empirical: Fitted) -> None:
    ifc = IFComp(empirical.model, fisher="empirical").fit([empirical.train.tensors])
    for name, theirs in empirical.blocks().items():
        own = ifc.factors.blocks[name]
        for mine, other in ((own.basis.inputs, theirs.basis.inputs), (own.basis.outputs, theirs.basis.outputs)):
            overlap = (mine.mT @ other).abs()
            assert_same(overlap, torch.eye(overlap.shape[-1], dtype=torch.float64).unsqueeze(0), floor=1e-9)
        assert_same(own.second_moments, theirs.second_moments, rtol=1e-9)


def test_true_fisher_is_the_exact_one_up_to_its_draws(sampled: Fitted) -> None:
    """The sum of its second moments is the mean squared gradient of the labels that it drew."""
    inputs, _ = sampled.train.tensors
    p = label_probabilities(example_logits(sampled.model, inputs), 1.0)
    jacobians = example_jacobians(sampled.model, inputs)
    exact = IFComp(sampled.model, fisher="exact").fit([inputs]).factors.blocks
    for name, theirs in sampled.blocks().items():
        parameters = tuple(key for key in (f"{name}.weight", f"{name}.bias") if key in jacobians)
        gradients = label_gradients(block_jacobian(jacobians, OracleBlock("diagonal", parameters)), p)
        squares = gradients.square().sum(2)
        mean = (p * squares).sum(1)
        error = float((p * (squares - mean.unsqueeze(1)).square()).sum().sqrt()) / len(inputs)
        assert float(exact[name].second_moments.sum()) == pytest.approx(float(mean.mean()), rel=1e-9)
        assert abs(float(theirs.second_moments.sum() - mean.mean())) < 4 * error
