"""Agreement with the EKFAC of kronfluence, and scores with its factors.

Both define the curvature of a block as ``Q diag(Lambda) Q^T``, where ``Lambda`` is the mean over examples of squared
gradients in the eigenbasis at ``beta = 1``. The damping of kronfluence is absolute, or by default 0.1 times the mean of
``Lambda``.
"""

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from cases import seeded
from comparison import assert_same
from ifcomp import IFComp
from ifcomp.curvature.factors import BlockFactors, Damping, Factors, FitSettings, Relative
from ifcomp.errors import FingerprintError, ModelError, SettingError, StorageError
from ifcomp.integrations.kronfluence import factors_from_kronfluence
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

from benchmarks.kronfluence_side import Classification

pytestmark = pytest.mark.filterwarnings("ignore:.torch.cuda.amp.GradScaler:FutureWarning")

CLASSES = 4
DAMPINGS: list[Damping] = [1e-1, 1e-5, Relative(0.1)]


def network() -> nn.Module:
    """Convolutions with padding, stride and dilation, with and without a bias, and two Linear.

    Every output of a layer is used: kronfluence also counts the inputs of unused outputs.
    """
    return nn.Sequential(
        *(nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.Tanh()),
        *(nn.Conv2d(4, 3, 2, dilation=2, padding=1, bias=False), nn.Tanh()),
        *(nn.Flatten(), nn.Linear(27, 6), nn.Tanh(), nn.Linear(6, CLASSES)),
    )


def normalised_network() -> nn.Module:
    """A convolution, BatchNorm and a Linear."""
    norm = nn.BatchNorm2d(4)
    norm.running_mean, norm.running_var = torch.linspace(-1, 1, 4), torch.linspace(0.5, 2, 4)
    return nn.Sequential(nn.Conv2d(2, 4, 3), norm, nn.Tanh(), nn.Flatten(), nn.Linear(64, CLASSES))


@dataclass(frozen=True)
class Fitted:
    """A model, its training data, and kronfluence's analysis of it."""

    model: nn.Module
    train: TensorDataset
    test: TensorDataset
    analyzer: Analyzer

    @property
    def folder(self) -> Path:
        """Folder of the factors."""
        return self.analyzer.factors_output_dir("ekfac")

    def factors(self) -> Factors:
        """Return the imported factors."""
        return factors_from_kronfluence(self.folder, self.model, num_classes=CLASSES)

    def blocks(self) -> dict[str, BlockFactors]:
        """Return the imported factors by layer."""
        return dict(self.factors().blocks)

    def self_influence(self, damping: Damping) -> Tensor:
        """Return the self-influence of the test examples by kronfluence, [B]."""
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


def fit_kronfluence(folder: Path, make: Callable[[], nn.Module], *, empirical: bool) -> Fitted:
    """Fit EKFAC factors in float64 on the CPU, with sampled labels or those of the data."""
    model = seeded(make)().double()
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
    return fit_kronfluence(tmp_path_factory.mktemp("sampled"), network, empirical=False)


@pytest.fixture(scope="module")
def empirical(tmp_path_factory: pytest.TempPathFactory) -> Fitted:
    """Kronfluence with the empirical Fisher, which is deterministic."""
    return fit_kronfluence(tmp_path_factory.mktemp("empirical"), network, empirical=True)


@pytest.fixture(scope="module")
def normalised(tmp_path_factory: pytest.TempPathFactory) -> Fitted:
    """Kronfluence on a network with BatchNorm, which it ignores."""
    return fit_kronfluence(tmp_path_factory.mktemp("normalised"), normalised_network, empirical=True)


def self_influence(ifc: IFComp, test: TensorDataset, damping: Damping) -> Tensor:
    """Return the influence of the given labels by IFComp, [B]."""
    inputs, labels = test.tensors
    return ifc.influence(inputs, damping=damping).gather(1, labels.unsqueeze(1)).squeeze(1)


@pytest.mark.parametrize("damping", DAMPINGS, ids=str)
def test_influence_with_imported_factors_equals_self_influence_of_kronfluence(
    sampled: Fitted, damping: Damping
) -> None:
    ifc = IFComp.from_factors(sampled.model, sampled.factors(), sua=False)
    assert_same(self_influence(ifc, sampled.test, damping), sampled.self_influence(damping), rtol=1e-9, floor=0.0)


@pytest.mark.parametrize("damping", [1e-3, Relative(0.1)], ids=str)
def test_ignored_layers_are_left_out_of_scores(normalised: Fitted, damping: Damping) -> None:
    ifc = IFComp.from_factors(normalised.model, normalised.factors(), partial=True, sua=False)
    assert_same(self_influence(ifc, normalised.test, damping), normalised.self_influence(damping), rtol=1e-9, floor=0.0)
    assert {row.name for row in ifc.coverage.rows if not row.covered} == {"1"}


def test_ignored_layers_are_refused_without_partial(normalised: Fitted) -> None:
    with pytest.raises(FingerprintError, match=r"without factors: 1\.bias, 1\.weight\n.*partial=True"):
        IFComp.from_factors(normalised.model, normalised.factors())


def test_settings_are_those_of_the_fit(sampled: Fitted, empirical: Fitted) -> None:
    assert sampled.factors().settings == FitSettings(beta=1.0, fisher="sampled")
    assert empirical.factors().settings == FitSettings(beta=1.0, fisher="empirical")
    assert sampled.factors().count == len(sampled.train)
    more = factors_from_kronfluence(sampled.folder, sampled.model, num_classes=CLASSES, count=1000)
    assert more.count == 1000
    with pytest.raises(SettingError, match="over 64 examples"):
        factors_from_kronfluence(sampled.folder, sampled.model, num_classes=CLASSES, count=63)


def test_factors_come_in_the_precision_of_the_model(sampled: Fitted) -> None:
    model = copy.deepcopy(sampled.model).float()
    ifc = IFComp.from_factors(model, factors_from_kronfluence(sampled.folder, model, num_classes=CLASSES), sua=False)
    inputs = sampled.test.tensors[0]
    exact = IFComp.from_factors(sampled.model, sampled.factors(), sua=False).influence(inputs)
    assert_same(ifc.influence(inputs.float()), exact, rtol=1e-3, floor=1e-3)


def test_a_wrong_number_of_classes_is_refused(sampled: Fitted) -> None:
    factors = factors_from_kronfluence(sampled.folder, sampled.model, num_classes=CLASSES + 1)
    with pytest.raises(FingerprintError, match="5 classes"):
        IFComp.from_factors(sampled.model, factors, sua=False).influence(sampled.test.tensors[0])


@pytest.mark.parametrize("settings", [{"groups": 2}, {"padding_mode": "reflect"}], ids=str)
def test_convolutions_with_wrong_gradients_in_kronfluence_are_refused(
    sampled: Fitted, settings: dict[str, Any]
) -> None:
    model = network()
    model[0] = nn.Conv2d(2, 4, 3, padding=1, **settings)
    with pytest.raises(ModelError, match="factors of 0 are not"):
        factors_from_kronfluence(sampled.folder, model, num_classes=CLASSES)


def remove_lambda(folder: Path) -> None:
    (folder / "lambda_matrix.safetensors").unlink()


def truncate_eigenvectors(folder: Path) -> None:
    path = folder / "gradient_eigenvectors.safetensors"
    path.write_bytes(path.read_bytes()[:100])


def other_strategy(folder: Path) -> None:
    path = folder / "factor_arguments.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "strategy": "kfac"}))


def fewer_layers(folder: Path) -> None:
    tensors = load_file(folder / "num_lambda_processed.safetensors")
    del tensors["0"]
    save_file(tensors, folder / "num_lambda_processed.safetensors")


@pytest.mark.parametrize("damage", [remove_lambda, truncate_eigenvectors, other_strategy, fewer_layers, shutil.rmtree])
def test_damaged_folders_are_refused(sampled: Fitted, damage: Callable[[Path], None], tmp_path: Path) -> None:
    folder = tmp_path / "factors"
    shutil.copytree(sampled.folder, folder)
    damage(folder)
    with pytest.raises(StorageError, match=r"Cannot read kronfluence's factors from .*strategy='ekfac'"):
        factors_from_kronfluence(folder, sampled.model, num_classes=CLASSES)


@pytest.mark.parametrize(("value", "message"), [(float("nan"), "'0' are not finite"), (-1.0, "negative")])
def test_damaged_moments_are_refused(sampled: Fitted, value: float, message: str, tmp_path: Path) -> None:
    folder = tmp_path / "factors"
    shutil.copytree(sampled.folder, folder)
    tensors = load_file(folder / "lambda_matrix.safetensors")
    tensors["0"][0, 0] = value
    save_file(tensors, folder / "lambda_matrix.safetensors")
    with pytest.raises(StorageError, match=message):
        factors_from_kronfluence(folder, sampled.model, num_classes=CLASSES)


@pytest.mark.parametrize("damping", DAMPINGS, ids=str)
def test_fits_on_the_same_labels_agree(empirical: Fitted, damping: Damping) -> None:
    """Both libraries fit and score independently."""
    ifc = IFComp(empirical.model, fisher="empirical").fit([empirical.train.tensors])
    assert_same(self_influence(ifc, empirical.test, damping), empirical.self_influence(damping), rtol=1e-9, floor=0.0)


def test_curvatures_on_the_same_labels_agree(empirical: Fitted) -> None:
    ifc = IFComp(empirical.model, fisher="empirical").fit([empirical.train.tensors])
    for name, theirs in empirical.blocks().items():
        ours = ifc.factors.blocks[name]
        for our_basis, their_basis in (
            (ours.basis.inputs, theirs.basis.inputs),
            (ours.basis.outputs, theirs.basis.outputs),
        ):
            overlap = (our_basis.mT @ their_basis).abs()
            assert_same(overlap, torch.eye(overlap.shape[-1], dtype=torch.float64).unsqueeze(0), floor=1e-9)
        assert_same(ours.second_moments, theirs.second_moments, rtol=1e-9)


def test_sampled_fisher_agrees_with_the_exact_one_within_its_error(sampled: Fitted) -> None:
    """The sum of the second moments is the mean squared gradient of the sampled labels."""
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
