"""The residuals of all labels are dependent, and influence of every label needs one backward fewer than labels."""

from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from ifcomp import IFComp
from ifcomp.curvature.labels import independent_residuals
from ifcomp.layers.capture import Recording

UNEVEN = [[0.97, 0.01, 0.02], [0.2, 0.2, 0.6], [1e-9, 1 - 2e-9, 1e-9], [1 / 3, 1 / 3, 1 / 3], [1.0, 0.0, 0.0]]


@pytest.mark.parametrize("row", UNEVEN)
def test_the_last_residual_is_the_given_sum_of_the_others(row: list[float]) -> None:
    p = torch.tensor([row], dtype=torch.float64)
    residuals, coefficients, labels = independent_residuals(p)
    expected = torch.stack([p[0] - torch.eye(3, dtype=p.dtype)[label] for label in labels[0]])
    torch.testing.assert_close(residuals[:, 0], expected[:-1], rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(coefficients[0] @ residuals[:, 0], expected[-1], rtol=1e-12, atol=1e-15)
    assert row[labels[0, -1]] == max(row)
    assert sorted(labels[0].tolist()) == [0, 1, 2]
    assert coefficients.abs().max() <= 1


def _backwards(classes: int) -> int:
    """How many backwards the influence of one batch takes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, classes))
    x = torch.randn(6, 4)
    ifc = IFComp(model).fit([x], progress=False)
    made: list[Tensor] = []
    whole = Recording._run

    def counted(recording: Recording, cotangent: Tensor, edges: list[GradientEdge]) -> object:
        made.append(cotangent)
        return whole(recording, cotangent, edges)

    with patch.object(Recording, "_run", counted):
        ifc.influence(x)
    return len(made)


@pytest.mark.parametrize("classes", [2, 10, 16])
def test_one_backward_is_saved_where_all_labels_are_worked_on_at_once(classes: int) -> None:
    assert _backwards(classes) == classes - 1


def test_many_labels_are_worked_on_a_few_at_a_time() -> None:
    assert _backwards(17) == 17
