"""Self-influence against the dense oracle, and against the column of a score table."""

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from cases import MODEL_CASES
from comparison import as_type, fitted, oracle_blocks, oracle_influence
from experiments.baselines.self_influence import self_influence
from ifcomp import IFComp, Relative
from ifcomp.errors import EmptyDataError, LabelError, NotFittedError, SettingError

CASE = next(case for case in MODEL_CASES if case.name == "lenet")
X = as_type(CASE.sample(5), torch.float64)
Y = torch.tensor([0, 1, 2, 3, 1])


def test_it_is_the_influence_of_the_given_label() -> None:
    ifc = fitted(CASE)
    explicit = oracle_influence(ifc, ifc.model, oracle_blocks(CASE), X, 1e-3)
    found = self_influence(ifc, [(X[:2], Y[:2]), (X[2:], Y[2:])])
    assert_allclose(found, explicit[np.arange(5), Y], rtol=1e-9)


@pytest.mark.parametrize("damping", [None, Relative(0.3), 0.5])
def test_it_is_the_column_of_a_score_table(damping: float | Relative | None) -> None:
    ifc = fitted(CASE)
    column = ifc.score([(X, Y)], damping=damping).frame["influence"]
    assert_allclose(self_influence(ifc, [(X, Y)], damping=damping), column, rtol=1e-12)


def test_what_it_refuses() -> None:
    ifc = fitted(CASE)
    with pytest.raises(SettingError, match=r"beta is 0\.5"):
        self_influence(fitted(CASE, beta=0.5), [(X, Y)])
    with pytest.raises(NotFittedError):
        self_influence(IFComp(ifc.model), [(X, Y)])
    with pytest.raises(LabelError, match="labels are needed"):
        self_influence(ifc, [X])
    with pytest.raises(EmptyDataError, match="no example"):
        self_influence(ifc, [])
