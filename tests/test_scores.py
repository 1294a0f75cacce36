"""Columns of `ScoreTable` against values computed from the logits and the dense logit kernel."""

import numpy as np
import pytest
import torch
from torch import nn

from ifcomp import IFComp, scoring
from ifcomp.complexity import label_complexity
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


@pytest.mark.parametrize("probes", [None, 2])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_label_complexity_is_the_pnml_codelength_of_two_labels(beta: float, probes: int | None) -> None:
    """The mean added probability of training examples is 0.5 for any alpha of the call."""
    inputs, model = INPUTS.double(), make().double()
    ifc = IFComp(model, beta, fisher="exact").fit([(inputs, LABELS)])
    frame = ifc.score([(inputs, LABELS)], alpha=7.0, probes=probes).frame
    mean_influence = ifc.score([inputs]).column("expected_influence").mean()
    kernels, logits = ifc.logit_kernel(inputs).numpy(), model(inputs).detach().numpy()
    for row, kernel, logit in zip(frame.itertuples(), kernels, logits, strict=True):
        pair = [row.label, row.suggested_label]
        p = np.exp(beta * logit[pair]) / np.exp(beta * logit[pair]).sum()
        residuals = p - np.eye(2)  # row y is p - e_y
        influence = [residual @ kernel[np.ix_(pair, pair)] @ residual for residual in residuals]
        added = 0.5 / mean_influence * (p @ influence)
        assert row.label_complexity == pytest.approx(-np.log((p[0] + added / 2) / (1 + added)), rel=1e-6)


def test_label_complexity_by_hand() -> None:
    """The label has 1/4 of the pair. Added probability 0.5 / 3 * 3/16 * 32 = 1: (1/4 + 1/2) / 2 = 3/8."""
    error, other = (-torch.tensor([share], dtype=torch.float64).log() for share in (0.2, 0.6))
    assert label_complexity(error, other, torch.tensor([32.0]), 3.0).item() == pytest.approx(-np.log(3 / 8))
    assert label_complexity(other, error, torch.tensor([32.0]), 3.0).item() == pytest.approx(-np.log(5 / 8))
    gaps = torch.tensor([60.0, -60.0, 0.0, 1e6, -1e6], dtype=torch.float64)
    actual = label_complexity(gaps, torch.zeros(5), torch.zeros(5), 1.0).tolist()
    assert actual == pytest.approx([60.0, np.exp(-60), np.log(2), 1e6, 0.0], rel=1e-9, abs=0)  # no underflow


def test_label_complexity_never_prefers_the_less_probable_label() -> None:
    gaps = torch.linspace(-5, 5, 11, dtype=torch.float64)
    for contrast in (0.0, 1.0, 1e3, 1e9):
        excess = label_complexity(gaps, torch.zeros(11), torch.full((11,), contrast), 1.0) - np.log(2)
        assert torch.equal(torch.where(excess.abs() > 1e-12, excess, 0.0).sign(), gaps.sign())


def test_missing_columns_are_named_with_a_remedy() -> None:
    ifc = IFComp(make(), fisher="exact").fit([(INPUTS, LABELS)])
    table = ifc.score([(INPUTS, LABELS)], probes=2)
    assert table.column("label").tolist() == LABELS.tolist()
    with pytest.raises(DataError, match=r"'regret'.*without probes"):
        table.column("regret")
    with pytest.raises(DataError, match=r"'label'.*Score data with labels"):
        ifc.score([INPUTS]).column("label")


def test_rows_are_merged_into_few_parts_in_order() -> None:
    parts: list[dict[str, torch.Tensor]] = []
    rows = 0
    for batch in range(1000):
        size = 1 + batch % 7
        scoring._append(parts, {"index": torch.arange(rows, rows + size), "value": torch.arange(rows, rows + size) / 2})
        rows += size
        assert len(parts) <= rows.bit_length()
    index = torch.cat([part["index"] for part in parts])
    assert torch.equal(index, torch.arange(rows))
    assert torch.equal(torch.cat([part["value"] for part in parts]), index / 2)


@pytest.mark.parametrize("sizes", [(10, 10), (20, 10), (10, 20)])
def test_labels_must_be_given_for_all_batches_or_none(sizes: tuple[int, int]) -> None:
    ifc = IFComp(make()).fit([INPUTS])
    with pytest.raises(DataError, match="Some batches have labels and others have none"):
        ifc.score([(INPUTS[: sizes[0]], LABELS[: sizes[0]]), INPUTS[: sizes[1]]])
