"""`IFCompDetector` in the metrics, benchmark loop and search of pytorch-ood, on synthetic data."""

import copy
from functools import cache

import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, TensorDataset

from ifcomp import IFComp
from ifcomp.errors import EmptyDataError, SettingError

pytest.importorskip("pytorch_ood", reason="pytorch-ood is not installed")

from pytorch_ood.api import Detector, ModelNotSetException, RequiresFittingException
from pytorch_ood.benchmark import Benchmark
from pytorch_ood.detector import MaxSoftmax
from pytorch_ood.metrics import OODMetrics
from pytorch_ood.utils import GridSearch

from ifcomp.integrations.pytorch_ood import IFCompDetector

CLASSES = 3


def clusters(size: int, seed: int, noise: float = 0.3) -> TensorDataset:
    """Return 4x4 images, one noisy pattern per class, with their classes."""
    patterns = torch.randn(CLASSES, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(size) % CLASSES
    noises = torch.randn(size, 1, 4, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(patterns[labels] + noise * noises, labels)


def outliers(size: int, seed: int, noise: float) -> TensorDataset:
    """Return the same images with more noise and label -1."""
    return TensorDataset(clusters(size, seed, noise).tensors[0], torch.full((size,), -1))


class SyntheticBenchmark(Benchmark):
    """Benchmark with two sets of outliers."""

    ood_names = ("weak", "strong")

    def train_set(self) -> Dataset:
        """Return the training set."""
        return clusters(96, seed=1)

    def test_sets(self, known: bool = True, unknown: bool = True) -> list[Dataset]:
        """Return the clean images followed by each set of outliers."""
        return [ConcatDataset([clusters(60, seed=2), outliers(40, seed=3, noise=noise)]) for noise in (0.6, 1.2)]


@cache
def trained() -> nn.Module:
    """Train a small network with BatchNorm."""
    images, labels = SyntheticBenchmark().train_set().tensors
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = (nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, CLASSES))
        model = nn.Sequential(*layers)
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        for _ in range(60):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    return model.eval()


def train_loader() -> DataLoader:
    return DataLoader(SyntheticBenchmark().train_set(), batch_size=32)


def held_out_loader() -> DataLoader:
    """Return held-out images, one batch of which are outliers that are skipped."""
    return DataLoader(ConcatDataset([clusters(200, seed=4), outliers(40, seed=6, noise=2.0)]), batch_size=40)


def fitted(**options: object) -> IFCompDetector:
    return detector(**options).fit(train_loader())


def detector(**options: object) -> IFCompDetector:
    return IFCompDetector(trained(), held_out_loader(), fisher="exact", **options)


def test_ifcomp_detector_is_a_detector() -> None:
    assert issubclass(IFCompDetector, Detector)
    assert IFCompDetector.requires_fit
    assert IFCompDetector.info.paper.year == 2024


@pytest.mark.parametrize("score", [None, "energy"])
def test_scores_are_those_of_the_detector_of_ifcomp(score: str | None) -> None:
    ifc = IFComp(trained(), 0.5, fisher="exact").fit(train_loader())
    gate = ifc.ood_detector([clusters(200, seed=4).tensors], score=score)
    images = clusters(7, seed=5).tensors[0]
    torch.testing.assert_close(fitted(beta=0.5, score=score)(images), gate.score(images), rtol=1e-5, atol=1e-6)


def test_metrics_of_the_benchmark_equal_those_of_the_scores() -> None:
    detector = fitted()
    results = SyntheticBenchmark().evaluate(detector, loader_kwargs={"batch_size": 32}, device="cpu")
    assert [row["Dataset"] for row in results] == ["weak", "strong"]
    for row, data in zip(results, SyntheticBenchmark().test_sets(), strict=True):
        images, labels = (torch.stack(column) for column in zip(*data, strict=True))
        scores = torch.cat([detector.predict(part) for part in images.split(32)])
        assert row["AUROC"] == pytest.approx(roc_auc_score(labels < 0, scores), abs=1e-12)
        metrics = OODMetrics().update(scores, labels).compute()
        assert {key: row[key] for key in metrics} == pytest.approx(metrics, abs=1e-12)
    assert all(0.75 < row["AUROC"] < 1 for row in results)


def test_the_benchmark_compares_several_detectors() -> None:
    benchmark = SyntheticBenchmark()
    results = benchmark.evaluate([fitted(), MaxSoftmax(trained())], loader_kwargs={"batch_size": 32})
    assert {row["Detector"] for row in results} == {"IFCompDetector", "MaxSoftmax"}
    assert len(results) == 4


def test_scores_do_not_depend_on_the_mode_or_the_batch() -> None:
    detector, images = fitted(), clusters(6, seed=5).tensors[0]
    whole = detector(images)
    with torch.no_grad():
        torch.testing.assert_close(torch.cat([detector(image) for image in images.split(1)]), whole, rtol=1e-5, atol=0)
    with torch.inference_mode():
        torch.testing.assert_close(detector(images), whole, rtol=1e-5, atol=0)
    model = copy.deepcopy(trained()).train()
    training = IFCompDetector(model, held_out_loader(), fisher="exact").fit(train_loader())
    assert torch.equal(training(images), whole)
    assert model.training


def test_outliers_in_the_training_data_are_skipped() -> None:
    mixed = ConcatDataset([clusters(96, seed=1), outliers(40, seed=3, noise=3.0)])
    with_outliers = detector().fit(DataLoader(mixed, batch_size=32))
    images = clusters(7, seed=5).tensors[0]
    torch.testing.assert_close(with_outliers(images), fitted()(images), rtol=1e-4, atol=1e-6)
    with pytest.raises(EmptyDataError):
        with_outliers.fit(DataLoader(outliers(40, seed=3, noise=3.0), batch_size=32))


def test_grid_search_selects_beta_and_score() -> None:
    held_out = ConcatDataset([clusters(30, seed=7), outliers(30, seed=8, noise=0.6)])
    space = {"beta": [1.0], "score": [None, "energy"]}
    searched = detector()
    search = GridSearch(searched, train_loader(), DataLoader(held_out, batch_size=30), hyperparameter_space=space)
    best = search.run()
    images, labels = (torch.stack(column) for column in zip(*held_out, strict=True))
    expected = {score: auroc(fitted(score=score)(images), labels) for score in space["score"]}
    assert [row["score"] for row in search.results_] == pytest.approx(list(expected.values()), abs=1e-9)
    assert best["score"] == max(expected, key=expected.__getitem__) == searched.score
    assert detector().get_hyperparameters() == {"beta": 1.0, "score": None}


def auroc(scores: Tensor, labels: Tensor) -> float:
    return float(roc_auc_score(labels < 0, scores))


def test_wrong_usage_is_refused() -> None:
    with pytest.raises(ModelNotSetException):
        IFCompDetector(None, held_out_loader())
    with pytest.raises(RequiresFittingException):
        detector().predict(torch.zeros(1, 1, 4, 4))
    with pytest.raises(SettingError, match="beta"):
        detector(beta=-1.0)
    with pytest.raises(SettingError, match="score must be one or several of"):
        detector(score="loss")
