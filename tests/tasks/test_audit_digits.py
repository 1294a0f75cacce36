"""Audits of trained networks whose wrong labels are known, and of unusual data."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from ifcomp import IFComp
from ifcomp.errors import (
    DataError,
    EmptyDataError,
    LabelError,
    LengthChangedError,
    LogitsError,
    NonFiniteError,
    SettingError,
)
from ifcomp.tasks.audit import AUDIT_DAMPING, LabelAudit
from tasks.digits import flipped_labels, images_and_labels


def train(images: Tensor, labels: Tensor, classes: int, epochs: int, width: int = 128) -> nn.Module:
    """Train an MLP with two hidden layers, until it predicts all labels if there are enough epochs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        size = images.shape[1]
        model = nn.Sequential(
            *(nn.Linear(size, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()), nn.Linear(width, classes)
        )
        optimizer = torch.optim.Adam(model.parameters(), 3e-3)
        for _ in range(epochs):
            for batch in torch.randperm(len(images)).split(64):
                optimizer.zero_grad()
                F.cross_entropy(model(images[batch]), labels[batch]).backward()
                optimizer.step()
            if (model(images).argmax(1) == labels).all():
                break
    return model.eval()


def losses(model: nn.Module, images: Tensor, labels: Tensor) -> np.ndarray:
    with torch.no_grad():
        return F.cross_entropy(model(images), labels, reduction="none").numpy()


def auroc(is_wrong: np.ndarray, scores: np.ndarray) -> float:
    return float(roc_auc_score(is_wrong, scores))


def audit_of(model: nn.Module, images: Tensor, labels: Tensor) -> LabelAudit:
    return IFComp(model).audit([(images, labels)], progress=False)


@pytest.fixture(scope="module")
def memorised() -> tuple[nn.Module, Tensor, Tensor, np.ndarray]:
    """Digits with 10 % wrong labels, and a network that has memorised all of them."""
    images, (labels, is_wrong) = images_and_labels()[0], flipped_labels(0.1, 0)
    model = train(images, labels, 10, epochs=200)
    assert (model(images).argmax(1) == labels).all()
    return model, images, labels, is_wrong


def test_wrong_labels_are_found_after_the_network_memorised_them(
    memorised: tuple[nn.Module, Tensor, Tensor, np.ndarray],
) -> None:
    model, images, labels, is_wrong = memorised
    audit = audit_of(model, images, labels)
    assert auroc(is_wrong, audit.frame["score"].to_numpy()) > 0.97
    assert auroc(is_wrong, losses(model, images, labels)) < 0.92
    truth = images_and_labels()[1].numpy()
    assert (audit.frame["suggested"].to_numpy()[is_wrong] == truth[is_wrong]).mean() > 0.9
    assert audit.memorised == pytest.approx(0.1, abs=0.03)
    assert audit.headline.startswith("The model has memorised labels: ")
    assert audit.weights["weight"].iloc[-1] < 0.1  # the model's softmax


def test_wrong_labels_of_held_out_data_are_found() -> None:
    images, truth = images_and_labels()
    labels, is_wrong = flipped_labels(0.1, 1)
    held_out = np.arange(len(truth)) % 2 == 0
    model = train(images[~held_out], truth[~held_out], 10, epochs=20)
    for reference in (None, [(images[~held_out], truth[~held_out])]):
        data = [(images[held_out], labels[held_out])]
        audit = IFComp(model).audit(data, reference=reference, progress=False)
        assert auroc(is_wrong[held_out], audit.frame["score"].to_numpy()) > 0.99
        assert abs(audit.memorised) < 0.05


def clusters(sizes: list[int], wrong: float, spread: float = 0.5, seed: int = 0) -> tuple[Tensor, Tensor, np.ndarray]:
    """Gaussian classes of the given sizes, of which a share has another label."""
    generator = np.random.default_rng(seed)
    truth = np.repeat(np.arange(len(sizes)), sizes)
    centres = generator.normal(size=(len(sizes), 12))
    inputs = centres[truth] + spread * generator.normal(size=(len(truth), 12))
    is_wrong = generator.random(len(truth)) < wrong
    labels = np.where(is_wrong, (truth + generator.integers(1, len(sizes), len(truth))) % len(sizes), truth)
    return torch.tensor(inputs, dtype=torch.float32), torch.tensor(labels), is_wrong


@pytest.mark.parametrize(
    "sizes",
    [[15] * 20, [150, 150], [400, 60, 25], [5, 200, 40, 7, 90]],
    ids=["20 x 15", "2", "3 unbalanced", "5 unbalanced"],
)
def test_small_and_unbalanced_classes(sizes: list[int]) -> None:
    inputs, labels, is_wrong = clusters(sizes, 0.1)
    model = train(inputs, labels, len(sizes), epochs=60)
    audit = audit_of(model, inputs, labels)
    scores = audit.frame["score"].to_numpy()
    assert auroc(is_wrong[~np.isnan(scores)], scores[~np.isnan(scores)]) > 0.95


class Contrary(nn.Module):
    """A network whose logits are shifted by one class."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).roll(1, 1)


def test_a_model_that_contradicts_all_labels_does_not_disturb_the_layers() -> None:
    images, truth = images_and_labels()
    labels, is_wrong = flipped_labels(0.1, 2)
    model = Contrary(train(images, truth, 10, epochs=10))
    audit = audit_of(model, images, labels)
    assert auroc(is_wrong, audit.frame["score"].to_numpy()) > 0.97
    assert audit.weights["weight"].iloc[-1] < 0.05
    assert not audit.headline.startswith("The layers contradict")


def test_labels_in_another_order_than_the_classes_of_the_model_are_reported() -> None:
    """The reference has the order of the model, the data has another."""
    images, truth = images_and_labels()
    model = train(images, truth, 10, epochs=10)
    data, reference = [(images[::2], (truth[::2] + 1) % 10)], [(images[1::2], truth[1::2])]
    audit = IFComp(model).audit(data, reference=reference, progress=False)
    assert audit.headline.startswith("The layers contradict ")


@pytest.mark.filterwarnings("ignore:The audit relies on only . of 7 predictors")  # one neighbour votes
def test_a_thousand_classes_of_three_examples() -> None:
    """Distributions have n K elements per member."""
    inputs, labels, is_wrong = clusters([3] * 1000, 0.05, spread=0.05)
    model = train(inputs, labels, 1000, epochs=2)
    audit = audit_of(model, inputs, labels)
    assert audit.pred_probs.shape == (3000, 1000)
    np.testing.assert_allclose(audit.pred_probs.sum(1), 1, rtol=1e-6)
    scores = audit.frame["score"].to_numpy()
    is_scored = ~np.isnan(scores)
    assert is_scored.mean() > 0.99
    assert auroc(is_wrong[is_scored], scores[is_scored]) > 0.9


def test_label_complexity_is_a_column_after_a_fit(memorised: tuple[nn.Module, Tensor, Tensor, np.ndarray]) -> None:
    model, images, labels, _ = memorised
    data = [(images[:200], labels[:200])]
    plain = IFComp(model).audit(data, progress=False)
    fitted = IFComp(model).fit(data, progress=False).audit(data, progress=False)
    assert "label_complexity" not in plain.frame
    assert fitted.frame["label_complexity"].notna().all()
    np.testing.assert_array_equal(fitted.frame["score"], plain.frame["score"])


# Data that cannot be audited, and data of few examples ---------------------------------------------------------------


class Counting(nn.Module):
    """Counts the calls of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.layer = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x)


def small() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(30, 5, generator=generator), torch.arange(30) % 3


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    yield small()


@pytest.mark.parametrize("argument", ["data", "reference"])
@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: DataLoader(TensorDataset(*small()), shuffle=True), DataError, "DataLoader shuffles"),
        (batches, LengthChangedError, "a generator can be iterated over only once"),
        (lambda: iter([small()]), LengthChangedError, "can be iterated over only once"),
        (list, EmptyDataError, "is empty"),
        (lambda: [(small()[0][:0], small()[1][:0])], EmptyDataError, "is empty"),
        (lambda: [small()[0]], LabelError, "labels are needed"),
        (lambda: [(small()[0], small()[1].float())], LabelError, "labels must be integers"),
        (lambda: (*small(), 0), DataError, "Put a single batch into a list"),
    ],
    ids=["shuffled", "generator", "iterator", "empty", "empty batch", "unlabelled", "float labels", "triple"],
)
def test_unusable_data_is_refused_before_the_model_runs(
    argument: str, make: Callable[[], Any], error: type[Exception], message: str
) -> None:
    model = Counting()
    options = {"data": [small()], argument: make()}
    with pytest.raises(error, match=message):
        IFComp(model).audit(options.pop("data"), progress=False, **options)
    assert model.calls == 0


@pytest.mark.parametrize(
    ("second", "error", "message"),
    [
        ((small()[0] * float("nan"), small()[1]), NonFiniteError, "batch 1: input tensor 0 has a NaN"),
        ((small()[0], small()[1] + 1), LabelError, "batch 1: label 3"),
        ((small()[0], small()[1] - 1), LabelError, "batch 1: label -1"),
        ((small()[0], small()[1][:7]), LabelError, "batch 1: 7 labels for 30 examples"),
        ((small()[0],), LabelError, "batch 1: labels are needed"),
    ],
    ids=["NaN", "large label", "negative label", "few labels", "no labels"],
)
def test_the_batch_with_an_error_is_named(second: tuple[Tensor, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        IFComp(Counting()).audit([small(), second], progress=False)


def test_a_model_with_one_logit_is_refused() -> None:
    with pytest.raises(LogitsError, match="one logit"):
        IFComp(nn.Linear(5, 1)).audit([(small()[0], torch.zeros(30, dtype=torch.long))], progress=False)


@pytest.mark.filterwarnings("ignore:The audit relies on only 1 of 1 predictors")
def test_one_example_is_not_scored() -> None:
    audit = IFComp(Counting()).audit([(small()[0][:1], small()[1][:1])], progress=False)
    assert audit.frame["score"].isna().all()
    assert audit.suspects.empty
    assert np.isfinite(audit.noise_rate)
    assert audit.headline.startswith("0 of 1 labels")
    assert "suspects among 1 labels" in repr(audit)
    assert len(audit.why(0)) == 1
    audit.plot()


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.filterwarnings("ignore::ifcomp.errors.IfcompWarning")
def test_few_examples_are_audited(count: int) -> None:
    x, _ = small()
    for labels in (torch.arange(count) % 3, torch.zeros(count, dtype=torch.long)):
        audit = IFComp(Counting()).audit([(x[:count], labels)], progress=False)
        assert len(audit.frame) == count
        assert np.isfinite(audit.pred_probs).all()
        is_single = np.bincount(labels)[labels] == 1
        np.testing.assert_array_equal(audit.frame["score"].isna(), is_single)


@pytest.mark.filterwarnings("ignore:The audit relies on only 1 of 1 predictors")
def test_equal_inputs_leave_only_the_model() -> None:
    audit = IFComp(Counting()).audit([(torch.ones(30, 5), small()[1])], progress=False)
    assert audit.weights["layer"].tolist() == ["model"]
    assert audit.frame["score"].notna().all()


def test_the_model_is_not_modified() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3)).train()
    model[0].requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    IFComp(model).audit([small()], progress=False)
    assert all(module.training for module in model.modules())
    assert [parameter.requires_grad for parameter in model.parameters()] == [False, False, True, True, True, True]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or "forward" in vars(module) for module in model.modules())


@pytest.mark.filterwarnings("ignore:The audit relies on only . of 3 predictors")  # the weights of the model are random
def test_a_fit_on_the_data_adds_label_complexity_and_influential_examples() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 3, generator=generator)
    y = (x[:, 0] > 0).long()
    y[:6] = 1 - y[:6]
    model, batches = nn.Linear(3, 2), [(x[:32], y[:32]), (x[32:], y[32:])]
    ifc = IFComp(model, fisher="exact").fit(batches, progress=False)
    audit = ifc.audit(batches, progress=False)
    assert "label_complexity" in audit.frame
    assert audit.influential is not None
    suspects = audit.suspects["index"].tolist()
    assert list(dict.fromkeys(audit.influential["suspect"])) == suspects
    chosen = torch.tensor(suspects)
    expected = ifc.explain(x[chosen], y[chosen], batches, k=4, positions=suspects, damping=AUDIT_DAMPING).frame
    np.testing.assert_allclose(audit.influential["effect"], expected["effect"])
    assert (audit.influential["suspect"] != audit.influential["index"]).all()
    assert ifc.audit(batches[:1], progress=False).influential is None  # not the data of the fit
    assert IFComp(model).audit(batches, progress=False).influential is None


def test_the_data_itself_is_no_reference() -> None:
    data = [(torch.zeros(4, 3), torch.arange(4) % 2)]
    with pytest.raises(SettingError, match="reference is the audited data itself"):
        IFComp(nn.Linear(3, 2)).audit(data, reference=data)
