"""`calibrate`, `predict_proba` and `predict_set`: the formulas, data, storage, and results on digits."""

import contextlib
import copy
import dataclasses
import json
import math
import pickle
import runpy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from sklearn.metrics import log_loss
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from cases import LAYER_CASES, REPRESENTATIVE_CASES, Case, seeded
from comparison import as_type, fitted, oracle_blocks, oracle_kernel
from ifcomp import IFComp, Relative
from ifcomp.errors import (
    DataError,
    IfcompWarning,
    LabelError,
    LengthChangedError,
    NotCalibratedError,
    NotFittedError,
    SettingError,
    StorageError,
)
from ifcomp.io.tensor_files import write_tensors
from ifcomp.label_samples import MAX_EXACT_CLASSES
from ifcomp.tasks.calibration_fit import ADDED_PROBABILITIES, split_halves
from oracles import example_logits
from tasks.digits import images_and_labels, train_network

TRAIN = slice(0, 500)
DAMPING = 1e-3


@cache
def shuffled_digits() -> tuple[Tensor, Tensor]:
    images, labels = images_and_labels()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return images[order], labels[order]


@cache
def overconfident() -> nn.Module:
    """A network that was trained for many epochs on labels of which a fifth is wrong."""
    images, labels = shuffled_digits()
    wrong = labels[TRAIN].clone()
    wrong[::5] = (wrong[::5] + 1) % 10
    return train_network(images[TRAIN], wrong, epochs=400)


def new_fit(**options: Any) -> IFComp:
    images, labels = shuffled_digits()
    return IFComp(overconfident(), **options).fit([(images[TRAIN], labels[TRAIN])], progress=False)


def held_out(start: int = 500, stop: int = 1100, size: int = 128) -> list[tuple[Tensor, Tensor]]:
    images, labels = shuffled_digits()
    return list(zip(images[start:stop].split(size), labels[start:stop].split(size), strict=True))


def nll(probability: Tensor, labels: Tensor) -> float:
    return -float(probability.detach().double()[torch.arange(len(labels)), labels].log().mean())


def new_data() -> tuple[Tensor, Tensor]:
    images, labels = shuffled_digits()
    return images[1100:], labels[1100:]


@cache
def calibrated() -> IFComp:
    ifc = new_fit()
    ifc.calibrate(held_out(), progress=False)
    return ifc


# Distributions -------------------------------------------------------------------------------------------------------


def distribution_by_hand(
    ifc: IFComp, case: Case, inputs: Any, inverse_temperature: float, alpha: float
) -> tuple[list[list[float]], list[float]]:
    """The form that keeps the argmax, and E[IF], from the dense logit kernel in loops over labels."""
    kernels = oracle_kernel(ifc, ifc.model, oracle_blocks(case), inputs, DAMPING).tolist()
    rows, influences = [], []
    for kernel, logits in zip(kernels, example_logits(ifc.model, inputs).tolist(), strict=True):
        powers = [math.exp(inverse_temperature * (value - max(logits))) for value in logits]
        p = [power / sum(powers) for power in powers]
        classes, influence = range(len(p)), 0.0
        for y in classes:
            residual = [p[k] - (k == y) for k in classes]
            influence += p[y] * sum(residual[j] * kernel[j][k] * residual[k] for j in classes for k in classes)
        added = alpha * influence / ifc.factors.count
        rows.append([(value + added / len(p)) / (1 + added) for value in p])
        influences.append(influence)
    return rows, influences


@pytest.mark.parametrize("case", REPRESENTATIVE_CASES, ids=str)
@pytest.mark.parametrize("beta", [1.0, 0.3])
def test_the_form_that_keeps_the_argmax_is_the_default(case: Case, beta: float) -> None:
    ifc, inputs = fitted(case, beta=beta), as_type(case.sample(4), torch.float64)
    rows, _ = distribution_by_hand(ifc, case, inputs, beta, 0.4)
    assert_close(ifc.predict_proba(inputs, 0.4, damping=DAMPING).tolist(), rows, rtol=1e-9, atol=1e-12)


def test_the_default_alpha_adds_a_ten_thousandth_to_training_examples() -> None:
    case = next(case for case in LAYER_CASES if case.name == "linear")
    ifc, inputs = fitted(case, fisher="exact"), as_type(case.sample(7, seed=1), torch.float64)
    moments = [block.second_moments.flatten().tolist() for block in ifc.factors.blocks.values()]
    mean = sum(value / (value + DAMPING) for values in moments for value in values)
    rows, influences = distribution_by_hand(ifc, case, inputs, 1.0, 1e-4 * 7 / mean)
    assert sum(influences) / 7 == pytest.approx(mean, rel=1e-9)  # these are the training examples
    assert_close(ifc.predict_proba(inputs, damping=DAMPING).tolist(), rows, rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("error")
def test_the_paper_form_needs_to_be_requested() -> None:
    ifc, x = calibrated(), new_data()[0][:20]
    p, influence = torch.softmax(overconfident()(x).double(), 1).detach(), ifc.influence(x)
    hindsight = p * (1 + 0.15 / 500 * influence)
    assert_close(
        ifc.predict_proba(x, 0.15, keep_argmax=False), hindsight / hindsight.sum(1, keepdim=True), rtol=1e-5, atol=1e-8
    )


@pytest.mark.parametrize("classes", [MAX_EXACT_CLASSES, MAX_EXACT_CLASSES + 1])
def test_many_classes_use_sampled_labels(classes: int) -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, classes)).double())()
    x = torch.randn(9, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ifc = IFComp(model, damping=0.1).fit([x], progress=False)
    exact = ifc.parametric_complexity(x, linearized=True)
    probability = model(x).softmax(1).detach()
    share = (ifc.predict_proba(x, 1.0) - probability) / (1 / classes - probability)  # c / (1 + c) for every label
    used = share[:, 0] / (1 - share[:, 0])
    assert_close(share, share[:, :1].expand_as(share), rtol=1e-6, atol=0)
    if classes == MAX_EXACT_CLASSES:
        assert_close(used, exact, rtol=1e-9, atol=0)
    else:
        assert 1e-3 < float((used / exact - 1).abs().mean()) < 0.3


def test_alpha_zero_is_the_model() -> None:
    x = new_data()[0][:9]
    expected = torch.softmax(0.5 * overconfident()(x).double(), 1).detach()
    assert_close(new_fit(beta=0.5).predict_proba(x, 0.0), expected, rtol=1e-6, atol=0)


# Calibration ---------------------------------------------------------------------------------------------------------


def test_calibrated_distributions_use_temperature_and_alpha() -> None:
    case = next(case for case in LAYER_CASES if case.name == "linear")
    ifc, inputs = fitted(case, damping=DAMPING), as_type(case.sample(60, seed=4), torch.float64)
    labels = example_logits(ifc.model, inputs).argmax(1)
    labels[::2] = (labels[::2] + 1) % case.num_classes
    with pytest.warns(IfcompWarning, match="60 held-out examples are few") as caught:
        calibration = ifc.calibrate([(inputs, labels)], progress=False)
    assert caught[0].filename == __file__
    row = calibration.frame.iloc[2]
    tuning, _ = split_halves(60, 0)
    nll = {}
    for added in ADDED_PROBABILITIES:
        alpha = added * ifc.factors.count / ifc.factors.effective_parameters(DAMPING)
        found = distribution_by_hand(ifc, case, inputs[tuning], 1 / row["temperature"], alpha)[0]
        nll[alpha] = log_loss(labels[tuning], found, labels=range(case.num_classes))
    assert row["alpha"] == pytest.approx(min(nll, key=nll.get), rel=1e-9)
    for temperature, alpha in ((calibration.temperature, calibration.alpha), (2.0, 0.5), (0.4, 0.0)):
        ifc.calibration = dataclasses.replace(calibration, temperature=temperature, alpha=alpha)
        rows, _ = distribution_by_hand(ifc, case, inputs[:5], 1 / temperature, alpha)
        assert_close(ifc.predict_proba(inputs[:5]).tolist(), rows, rtol=1e-9, atol=1e-12)


def test_calibration_is_better_than_softmax_on_new_data() -> None:
    ifc, (x, y) = calibrated(), new_data()
    calibration = ifc.calibration
    assert calibration is not None
    assert calibration.has_gain
    assert calibration.temperature > 2
    softmax = torch.softmax(overconfident()(x), 1).detach()
    assert nll(ifc.predict_proba(x), y) < 0.8 * nll(softmax, y)
    assert torch.equal(ifc.predict_proba(x).argmax(1), softmax.argmax(1))
    assert calibration.frame["nll"].min() == pytest.approx(nll(ifc.predict_proba(x), y), rel=0.25)


def test_the_conformal_half_chooses_nothing() -> None:
    """With wrong labels in this half only its scores change."""
    ifc = new_fit()
    images, labels = (torch.cat(parts) for parts in zip(*held_out(), strict=True))
    one = ifc.calibrate([(images, labels)], progress=False)
    conformal = split_halves(len(labels), ifc.settings.seed)[1]
    labels[conformal] = (labels[conformal] + 1) % 10
    other = ifc.calibrate([(images, labels)], progress=False)
    pd.testing.assert_frame_equal(one.frame, other.frame, check_exact=True)
    assert (one.set_rule.penalty, one.set_rule.free_ranks) == (other.set_rule.penalty, other.set_rule.free_ranks)
    assert np.mean(other.set_rule.scores) > 2 * np.mean(one.set_rule.scores)


def test_batches_do_not_matter() -> None:
    ifc = new_fit()
    one, other = (ifc.calibrate(held_out(size=size), progress=False) for size in (600, 77))
    np.testing.assert_allclose(
        one.frame.iloc[:, 1:-1].astype(float), other.frame.iloc[:, 1:-1].astype(float), rtol=1e-4
    )


def test_shifted_data_joins_the_tuning_half_only() -> None:
    ifc = new_fit()
    plain = ifc.calibrate(held_out(), progress=False)
    noisy = [(x + torch.randn(x.shape, generator=torch.Generator().manual_seed(1)), y) for x, y in held_out(1100, 1400)]
    shifted = ifc.calibrate(held_out(), noisy, progress=False)
    assert shifted.temperature > 1.1 * plain.temperature
    assert shifted.settings["tuning_examples"] == plain.settings["tuning_examples"] + 300 == 600
    assert shifted.settings["shifted_examples"] == 300
    assert len(shifted.set_rule.scores) == len(plain.set_rule.scores) == 300


def test_dict_batches_and_loaders_are_read() -> None:
    ifc = new_fit()
    images, labels = shuffled_digits()
    loader = DataLoader(TensorDataset(images[500:700], labels[500:700]), batch_size=64)
    expected = ifc.calibrate(held_out(500, 700), progress=False)
    assert ifc.calibrate(loader, progress=False).temperature == pytest.approx(expected.temperature, rel=1e-6)
    arrays = (images[500:700].numpy(), labels[500:700].numpy())
    assert ifc.calibrate(arrays, progress=False).temperature == pytest.approx(expected.temperature, rel=1e-4)
    dicts = [{"input": x, "labels": y} for x, y in held_out(500, 700)]
    assert ifc.calibrate(dicts, progress=False).temperature == pytest.approx(expected.temperature, rel=1e-6)


class Changing:
    """Data that differs from pass to pass."""

    def __init__(self, *passes: list[Any]) -> None:
        self.passes = list(passes)

    def __iter__(self) -> Any:
        return iter(self.passes.pop(0) if len(self.passes) > 1 else self.passes[0])


def flipped(batches: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    return [(x.flip(0), y.flip(0)) for x, y in batches]


def nudged(batches: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """One value is different; the logits hardly change."""
    (x, y), *others = batches
    return [(x + 1e-5 * (torch.arange(len(x)) == 7).unsqueeze(1), y), *others]


BAD_DATA = {
    "few": (held_out(500, 539), DataError, "at least 40 held-out examples, but got 39"),
    "none": ([], DataError, "but got 0"),
    "empty": ([(torch.ones(0, 64), torch.ones(0, dtype=torch.long))], DataError, "but got 0"),
    "unlabelled": ([x for x, _ in held_out()], LabelError, "labels are needed"),
    "regression": ([(x, y + 0.5) for x, y in held_out()], LabelError, "regression"),
    "unknown class": ([(x, y + 5) for x, y in held_out()], LabelError, "outside 0 ... 9"),
    "iterator": (iter(held_out()), LengthChangedError, "only once"),
    "tensor": (held_out()[0][0], LabelError, "labels are needed"),
    "shuffled": (DataLoader(TensorDataset(*new_data()), 64, shuffle=True), DataError, "A calibration reads"),
    "length": (Changing(*[held_out()] * 4, held_out()[:-1]), LengthChangedError, "600 examples .* but 512"),
    "order": (Changing(*[held_out()] * 4, flipped(held_out())), DataError, "differ between two passes"),
    "one example": (Changing(*[held_out()] * 4, nudged(held_out())), DataError, "held-out data differ between"),
    "one label": (
        Changing(*[held_out()] * 4, [(x, (y + (x.sum(1) == x.sum(1).max())) % 10) for x, y in held_out()]),
        DataError,
        "inputs or labels of the held-out data differ",
    ),
}


@pytest.mark.parametrize(("data", "error", "words"), BAD_DATA.values(), ids=BAD_DATA)
def test_unusable_data_is_refused(data: Any, error: type[Exception], words: str) -> None:
    ifc = new_fit()
    with pytest.raises(error, match=words):
        ifc.calibrate(data, progress=False)
    assert ifc.calibration is None


# Settings ------------------------------------------------------------------------------------------------------------


def test_calibrations_are_not_combined_with_other_settings() -> None:
    ifc, x = calibrated(), new_data()[0][:5]
    with pytest.raises(SettingError, match=r"calibration is for damping Relative\(multiple=0.1\).*1.0"):
        ifc.predict_proba(x, damping=1.0)
    with pytest.raises(SettingError, match="keeps the argmax"):
        ifc.predict_proba(x, keep_argmax=False)
    ifc.predict_proba(x, 0.1, damping=1.0, keep_argmax=False)
    assert torch.equal(ifc.predict_proba(x, damping=Relative(0.1)), ifc.predict_proba(x))


@pytest.mark.parametrize(
    ("options", "difference"), [({"beta": 0.5}, "beta"), ({"damping": 0.1}, "damping"), ({"seed": 1}, "fit")]
)
def test_calibrations_of_another_fit_are_refused(options: dict[str, Any], difference: str) -> None:
    ifc = new_fit(**options)
    with pytest.raises(SettingError, match=f"belongs to another model or fit: .*{difference} "):
        ifc.calibration = calibrated().calibration


def test_calibrations_of_the_same_fit_can_be_assigned_and_removed() -> None:
    ifc, x = new_fit(), new_data()[0][:5]
    default = ifc.predict_proba(x)
    ifc.calibration = calibrated().calibration
    assert torch.equal(ifc.predict_proba(x), calibrated().predict_proba(x))
    ifc.calibration = None
    assert torch.equal(ifc.predict_proba(x), default)


def test_a_new_fit_removes_the_calibration() -> None:
    ifc = copy.deepcopy(calibrated())
    ifc.fit(held_out(0, 500), progress=False)
    assert ifc.calibration is None


def test_pickles_and_copies_keep_the_calibration() -> None:
    ifc, x = calibrated(), new_data()[0][:5]
    for other in (copy.deepcopy(ifc), pickle.loads(pickle.dumps(ifc))):  # noqa: S301 - its own pickle
        assert torch.equal(other.predict_proba(x), ifc.predict_proba(x))
        assert torch.equal(other.predict_set(x), ifc.predict_set(x))


# Prediction sets -----------------------------------------------------------------------------------------------------


def test_sets_need_a_calibration() -> None:
    x = new_data()[0][:5]
    with pytest.raises(NotFittedError, match=r"fit\("):
        IFComp(overconfident()).predict_set(x)
    with pytest.raises(NotCalibratedError, match=r"calibrate\(held_out\)"):
        new_fit().predict_set(x)


def test_sets_have_the_probable_labels() -> None:
    ifc, x = calibrated(), new_data()[0]
    sets, probability = ifc.predict_set(x, coverage=0.9), ifc.predict_proba(x)
    assert sets.dtype == torch.bool
    assert sets.shape == (len(x), 10)
    assert sets.any(1).all()
    assert (probability.where(sets, 2.0).amin(1) >= probability.where(~sets, -1.0).amax(1)).all()
    rule = ifc.calibration.set_rule
    assert np.array_equal(sets.numpy(), rule.sets(probability.numpy(), 0.9))


def test_a_coverage_beyond_the_data_gives_all_labels_with_a_warning() -> None:
    with pytest.warns(IfcompWarning, match="more than 300 conformal examples") as caught:
        sets = calibrated().predict_set(new_data()[0][:5], coverage=0.999)
    assert sets.all()
    assert caught[0].filename == __file__
    with pytest.raises(SettingError, match="coverage must be"):
        calibrated().predict_set(new_data()[0][:5], coverage=1.0)


def test_mean_coverage_over_random_splits_is_nominal() -> None:
    """Twenty splits into held-out and test data. Sets are compared with those of the softmax at the same coverage."""
    images, labels = (values[500:] for values in shuffled_digits())
    ifc, coverages, sizes, softmax_sizes = new_fit(), [], [], []
    for split in range(20):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(split))
        known, new = order[:600], order[600:]
        ifc.calibrate([(images[known], labels[known])], progress=False)
        sets = ifc.predict_set(images[new], coverage=0.95)
        coverages.append(float(sets.gather(1, labels[new].unsqueeze(1)).double().mean()))
        sizes.append(float(sets.sum(1).double().mean()))
        softmax_sizes.append(softmax_set_size(images, labels, known[split_halves(600, 0)[1]], new))
    assert np.mean(coverages) >= 0.95 - 0.015
    assert np.mean(coverages) <= 0.97
    assert np.mean(sizes) <= 1.02 * np.mean(softmax_sizes)


def softmax_set_size(images: Tensor, labels: Tensor, known: Tensor, new: Tensor) -> float:
    """Mean size of adaptive prediction sets of the softmax: labels in order until their mass reaches a threshold."""
    probability = torch.softmax(overconfident()(images).double(), 1).detach().numpy()
    scores = []
    for row, label in zip(probability[known], labels[known], strict=True):
        scores.append(row[row > row[label]].sum())
    threshold = sorted(scores)[math.ceil((len(known) + 1) * 0.95) - 1]
    return float(np.mean([sum(row[row > value].sum() <= threshold for value in row) for row in probability[new]]))


# Files ---------------------------------------------------------------------------------------------------------------


def test_files_keep_the_calibration(tmp_path: Path) -> None:
    ifc, x = calibrated(), new_data()[0]
    ifc.save(tmp_path / "run.ifcomp")
    loaded = IFComp.load(tmp_path / "run.ifcomp", overconfident())
    assert repr(loaded.calibration) == repr(ifc.calibration)
    assert torch.equal(loaded.predict_proba(x), ifc.predict_proba(x))
    assert torch.equal(loaded.predict_set(x), ifc.predict_set(x))
    loaded.save(tmp_path / "again.ifcomp")
    assert (tmp_path / "again.ifcomp").read_bytes() == (tmp_path / "run.ifcomp").read_bytes()
    new_fit().save(tmp_path / "plain.ifcomp")
    assert IFComp.load(tmp_path / "plain.ifcomp", overconfident()).calibration is None


DAMAGE: dict[str, Any] = {
    "none": lambda results: results.update(calibration=None),
    "list": lambda results: results.update(calibration=[]),
    "alpha": lambda results: results["calibration"].update(alpha=-1),
    "scores": lambda results: results["calibration"].update(scores=[1.0, 0.0]),
    "missing": lambda results: results["calibration"].pop("rows"),
    "fit": lambda results: results["calibration"]["settings"].update(fit="0123456789abcdef"),
    "beta": lambda results: results["calibration"]["settings"].update(beta=0.5),
    "damping": lambda results: results["calibration"]["settings"].update(damping="0.1"),
    "model": lambda results: results["calibration"]["settings"].pop("model"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_calibrations_are_refused(damage: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.ifcomp"
    calibrated().save(path)
    with safe_open(path, framework="pt") as opened:
        metadata = json.loads(opened.metadata()["ifcomp"])
    damage(metadata["results"])
    write_tensors(path, load_file(path), "ifcomp", metadata)
    with pytest.raises(StorageError, match=r"Cannot read the calibration in .*calibrate again"):
        IFComp.load(path, overconfident())


def test_damaged_results_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.ifcomp"
    calibrated().save(path)
    with safe_open(path, framework="pt") as opened:
        metadata = json.loads(opened.metadata()["ifcomp"])
    write_tensors(path, load_file(path), "ifcomp", {**metadata, "results": []})
    with pytest.raises(StorageError, match="results is a list"):
        IFComp.load(path, overconfident())


# Real networks: data that the model was not trained on, from the distribution of its training data ------------------

Network = tuple[nn.Module, list[Any], Tensor, Tensor]


@cache
def digits_network(epochs: int, seed: int) -> Network:
    images, labels = shuffled_digits()
    model = train_network(images[TRAIN], labels[TRAIN], epochs, seed)
    return model, [(images[TRAIN], labels[TRAIN])], images[500:], labels[500:]


@pytest.fixture(scope="module")
def readme_network(tmp_path_factory: pytest.TempPathFactory) -> Network:
    """The network of the README with its training data and test data."""
    script = Path(__file__).parents[1] / "examples" / "own_model" / "net.py"
    with torch.random.fork_rng(devices=[]), contextlib.chdir(tmp_path_factory.mktemp("readme")):
        names = runpy.run_path(str(script), run_name="__main__")
        test = names["batches"]("test.npz")
        model, train = names["trained"](), names["batches"]("train.npz")
    return model, train, torch.cat([x for x, _ in test]), torch.cat([y for _, y in test])


@pytest.fixture(params=["readme", *((epochs, seed) for epochs in (5, 60) for seed in range(3))], ids=str)
def network(request: pytest.FixtureRequest, readme_network: Network) -> Network:
    return readme_network if request.param == "readme" else digits_network(*request.param)


def test_the_default_keeps_the_accuracy(network: Network) -> None:
    model, train, x, _ = network
    default = IFComp(model).fit(train, progress=False).predict_proba(x)
    assert torch.equal(default.argmax(1), model(x).argmax(1))


def test_the_nll_of_the_default_is_not_worse_than_that_of_the_softmax(network: Network) -> None:
    """Without held-out data alpha is small: it costs less than 0.001 nats on networks that need none."""
    model, train, x, y = network
    default = IFComp(model).fit(train, progress=False).predict_proba(x)
    assert nll(default, y) <= nll(torch.softmax(model(x).double(), 1), y) + 0.001


def test_the_default_improves_overconfident_predictions() -> None:
    """A last layer times 5: the softmax is far too confident."""
    model, train, x, y = digits_network(60, 0)
    confident = copy.deepcopy(model)
    *_, last = (layer for layer in confident.modules() if isinstance(layer, nn.Linear))
    with torch.no_grad():
        last.weight.mul_(5)
        assert last.bias is not None
        last.bias.mul_(5)
    default = IFComp(confident).fit(train, progress=False).predict_proba(x)
    assert nll(default, y) < nll(torch.softmax(confident(x).double(), 1), y) - 0.05


def test_the_calibrated_nll_is_not_worse_than_that_of_the_softmax(network: Network) -> None:
    """Half of the data calibrates, the other half judges; 0.005 nats are chance."""
    model, train, x, y = network
    ifc = IFComp(model).fit(train, progress=False)
    ifc.calibrate([(x[::2], y[::2])], progress=False)
    softmax, calibrated = torch.softmax(model(x[1::2]).double(), 1), ifc.predict_proba(x[1::2])
    assert torch.equal(calibrated.argmax(1), softmax.argmax(1))
    assert nll(calibrated, y[1::2]) <= nll(softmax, y[1::2]) + 0.005
