"""Selection of beta and alpha on digits, against predictors fitted one by one."""

import itertools
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.metrics import accuracy_score, log_loss
from torch import Tensor, nn

from experiments import tuning
from experiments.tuning import ALPHAS, BETA_MULTIPLES, Tuned, fit_grid, tune
from ifcomp import IFComp, Relative
from tasks.digits import images_and_labels, train_network

TRAINING, VALIDATION, SHIFTED = slice(0, 600), slice(600, 1000), slice(1000, 1300)
BETAS = (0.5, 1.0)
ALPHA_GRID = (0.0, 1e-3, 0.1, 10.0)


def loader(part: slice, size: int = 128, noise: float = 0.0) -> list[tuple[Tensor, Tensor]]:
    images, labels = images_and_labels()
    inputs = images[part] + noise * torch.randn(images[part].shape, generator=torch.Generator().manual_seed(0))
    return list(zip(inputs.split(size), labels[part].split(size), strict=True))


@cache
def network() -> nn.Module:
    """Overconfident network: many epochs on few digits."""
    images, labels = images_and_labels()
    return train_network(images[TRAINING], labels[TRAINING], epochs=60)


@cache
def tuned(objective: str = "nll", keep_argmax: bool = False, shifted: bool = True) -> Tuned:
    return tune(
        network(),
        loader(TRAINING),
        loader(VALIDATION),
        betas=BETAS,
        alphas=ALPHA_GRID,
        objective=objective,
        keep_argmax=keep_argmax,
        shifted=loader(SHIFTED, noise=0.4) if shifted else (),
    )


def held_out() -> tuple[Tensor, Tensor]:
    parts = loader(VALIDATION) + loader(SHIFTED, noise=0.4)
    return torch.cat([images for images, _ in parts]), torch.cat([labels for _, labels in parts])


def softmax_of_network() -> Tensor:
    with torch.no_grad():
        return network()(held_out()[0]).double().softmax(1)


@pytest.mark.parametrize("beta", BETAS)
def test_every_row_equals_a_separate_predictor(beta: float) -> None:
    images, labels = held_out()
    ifc = IFComp(network(), beta, fisher="exact", damping=Relative(0.1)).fit(loader(TRAINING))
    frame = tuned().frame
    for alpha, keep_argmax in itertools.product(ALPHA_GRID, (False, True)):
        p = ifc.predict_proba(images, alpha, keep_argmax=keep_argmax)
        row = frame[(frame["beta"] == beta) & (frame["alpha"] == alpha) & (frame["keep_argmax"] == keep_argmax)]
        assert len(row) == 1
        assert row["nll"].item() == pytest.approx(log_loss(labels, p, labels=range(10)), rel=1e-6)
        assert row["accuracy"].item() == accuracy_score(labels, p.argmax(1))
    assert len(frame) == len(BETAS) * len(ALPHA_GRID) * 2


def test_the_first_row_is_the_model_itself() -> None:
    _, labels = held_out()
    assert tuned().frame.loc[0, ["beta", "alpha", "keep_argmax"]].tolist() == [1.0, 0.0, False]
    assert tuned().base_nll == pytest.approx(log_loss(labels, softmax_of_network(), labels=range(10)), rel=1e-6)
    assert tuned().base_accuracy == accuracy_score(labels, softmax_of_network().argmax(1))


def test_smallest_nll_is_chosen_and_beats_the_model() -> None:
    result = tuned()
    plain = result.frame[~result.frame["keep_argmax"]]
    assert result.nll == plain["nll"].min()
    assert result.nll < result.base_nll - 0.01
    assert (result.predictor.beta, result.predictor.damping) == (result.beta, Relative(0.1))
    images, labels = held_out()
    assert log_loss(labels, result.predict_proba(images), labels=range(10)) == pytest.approx(result.nll, rel=1e-6)


def test_the_model_itself_is_chosen_if_nothing_is_better() -> None:
    """The only other beta and alpha are absurd."""
    result = tune(network(), loader(TRAINING), loader(VALIDATION), betas=[0.001], alphas=[1e9])
    assert (result.beta, result.alpha, result.chosen) == (1.0, 0.0, 0)
    assert result.nll == result.base_nll
    assert result.predictor.beta == 1


def test_ece_is_minimised_only_among_settings_that_keep_accuracy() -> None:
    result = tuned("ece")
    frame = result.frame
    plain = frame[~frame["keep_argmax"]]
    assert not plain["allowed"].all()  # some settings cost accuracy here
    assert (frame["allowed"] == (~frame["keep_argmax"] & (frame["accuracy"] >= result.base_accuracy))).all()
    assert frame["ece"][result.chosen] == plain.loc[plain["allowed"], "ece"].min()
    assert result.base_ece == frame["ece"][0]


def test_the_predicted_class_can_be_kept() -> None:
    result = tuned(keep_argmax=True)
    kept = result.frame[result.frame["keep_argmax"]]
    assert (kept["accuracy"] == result.base_accuracy).all()
    assert result.nll == kept["nll"].min()
    assert result.keep_argmax
    assert (result.predict_proba(held_out()[0]).argmax(1) == softmax_of_network().argmax(1)).all()


def test_shifted_data_is_pooled_with_validation_data() -> None:
    _, labels = held_out()
    count = VALIDATION.stop - VALIDATION.start
    expected = log_loss(labels[:count], softmax_of_network()[:count], labels=range(10))
    assert tuned(shifted=False).base_nll == pytest.approx(expected, rel=1e-6)
    assert tuned().base_nll > 2 * expected


def test_batches_do_not_matter() -> None:
    settings: dict[str, Any] = {"betas": BETAS, "alphas": ALPHA_GRID}
    other = tune(network(), loader(TRAINING, 77), loader(VALIDATION, 33), **settings)
    pd.testing.assert_frame_equal(other.frame, tuned(shifted=False).frame, rtol=1e-4)


def test_the_grid_takes_one_fit_and_one_influence_pass_per_beta(monkeypatch: pytest.MonkeyPatch) -> None:
    fits, passes = [], []
    fit, influence = tuning.fit_together, IFComp.influence
    monkeypatch.setattr(
        tuning,
        "fit_together",
        lambda predictors, *args, **options: fits.append(len(predictors)) or fit(predictors, *args, **options),
    )
    monkeypatch.setattr(IFComp, "influence", lambda *args, **options: passes.append(1) or influence(*args, **options))
    tune(network(), loader(TRAINING), loader(VALIDATION), betas=[0.5, 0.7])
    assert fits == [3]  # 1 is added
    assert len(passes) == 3 * len(loader(VALIDATION))


def test_the_default_grid_is_around_the_fitted_temperature_and_wide() -> None:
    result = tune(network(), loader(TRAINING), loader(SHIFTED, noise=0.4), objective="nll")
    betas = result.frame["beta"].unique()
    assert 0.1 < result.inverse_temperature < 0.9  # the network is overconfident
    np.testing.assert_allclose(betas, [1, *(m * result.inverse_temperature for m in BETA_MULTIPLES)], rtol=0.01)
    assert result.frame["alpha"].unique().tolist() == list(ALPHAS)
    assert (ALPHAS[0], ALPHAS[1], ALPHAS[-1]) == (0, 1e-6, 100)
    assert result.nll == result.frame.loc[~result.frame["keep_argmax"], "nll"].min()


def test_fit_grid_equals_separate_fits() -> None:
    x = images_and_labels()[0][VALIDATION]
    for beta, ifc in zip(BETAS, fit_grid(network(), BETAS, loader(TRAINING), damping=0.01), strict=True):
        alone = IFComp(network(), beta, fisher="exact", damping=0.01).fit(loader(TRAINING))
        torch.testing.assert_close(ifc.influence(x), alone.influence(x), rtol=1e-5, atol=1e-8)
