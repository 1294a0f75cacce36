"""Outputs of a data set against the layers of a model called one by one."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from experiments.baselines.inference import as_models, check_repeatable, model_logits, run_data
from ifcomp.errors import DataError, EmptyDataError, LabelError, NonFiniteError, SettingError


def test_run_data_gives_everything_in_order() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.ReLU(), nn.Linear(6, 3))
    x, y = torch.randn(7, 4), torch.arange(7) % 3
    outputs = run_data(model, [(x[:3], y[:3]), (x[3:], y[3:])], head=model[3])
    hidden = model[0](x).relu().detach()
    assert_close(outputs.features, hidden)
    assert_close(outputs.logits, model[3](hidden).detach())
    assert torch.equal(outputs.labels, y)
    plain = run_data(model, [(x, -y)], labels=False)
    assert plain.labels is None
    assert plain.features is None
    assert_close(plain.logits, outputs.logits)
    assert not model[3]._forward_pre_hooks


def test_run_data_refuses_bad_data() -> None:
    model = nn.Linear(4, 3)
    with pytest.raises(EmptyDataError):
        run_data(model, [])
    with pytest.raises(LabelError, match="labels are needed"):
        run_data(model, [torch.randn(2, 4)])


def test_logits_of_inputs_are_those_of_eval_mode() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)), torch.randn(5, 4)
    logits = model_logits(model, x)
    assert logits.dtype == torch.float64
    assert_close(logits, model[0](x).detach().double())
    assert model.training
    assert not logits.requires_grad


def test_bad_inputs_are_refused() -> None:
    model = nn.Linear(4, 3)
    with pytest.raises(EmptyDataError):
        model_logits(model, torch.zeros(0, 4))
    with pytest.raises(NonFiniteError, match="example 1"):
        model_logits(model, torch.zeros(2, 4).index_fill(0, torch.tensor(1), torch.nan))


def test_several_models_need_data_that_can_be_iterated_again() -> None:
    model, data = nn.Linear(4, 3), [torch.zeros(2, 4)]
    assert as_models(model, iter(data)) == [model]
    assert as_models([model, model], data) == [model, model]
    with pytest.raises(SettingError, match="At least one network"):
        as_models([], data)
    with pytest.raises(DataError, match="iterator"):
        as_models([model, model], iter(data))
    with pytest.raises(DataError, match="iterator"):
        check_repeatable(iter(data))
