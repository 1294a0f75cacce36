"""Columns of a table against the model's own distribution."""

import numpy as np
import pytest
import torch
from torch import nn

from ifcomp import IFComp
from ifcomp.errors import DataError

INPUTS = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(30) % 3


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


@pytest.mark.parametrize("probes", [None, 2])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_the_suggested_label_is_the_most_probable_other_class(beta: float, probes: int | None) -> None:
    model = make()
    frame = IFComp(model, beta, fisher="exact").fit([(INPUTS, LABELS)]).score([(INPUTS, LABELS)], probes=probes).frame
    logits = model(INPUTS).detach().double()
    for row, logit in zip(frame.itertuples(), logits.tolist(), strict=True):
        best = max((value, name) for name, value in enumerate(logit) if name != row.label)[1]
        assert row.suggested_label == best
        weights = np.exp(beta * np.array(logit))
        assert row.suggested_probability == pytest.approx(weights[best] / weights.sum(), rel=1e-6)
        assert row.error == pytest.approx(-np.log(weights[row.label] / weights.sum()), rel=1e-6)


def test_missing_columns_are_named_with_a_remedy() -> None:
    ifc = IFComp(make(), fisher="exact").fit([(INPUTS, LABELS)])
    table = ifc.score([(INPUTS, LABELS)], probes=2)
    assert table.column("label").tolist() == LABELS.tolist()
    with pytest.raises(DataError, match=r"'regret'.*without probes"):
        table.column("regret")
    with pytest.raises(DataError, match=r"'label'.*Score data with labels"):
        ifc.score([INPUTS]).column("label")
