"""The label that is left out of the backwards, and gradients that are taken on the way: the same as all at once."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ifcomp import IFComp, Relative
from ifcomp.curvature import rotation
from ifcomp.data.batches import as_batch
from ifcomp.influence import forms
from ifcomp.layers.backward import Gradients
from ifcomp.layers.block import RecordedBlock


def grouped() -> tuple[IFComp, Tensor]:
    torch.manual_seed(0)
    twice = nn.Conv2d(4, 4, 3, padding=1, groups=2)
    model = nn.Sequential(
        *(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), twice, nn.Tanh(), twice, nn.Tanh()),
        *(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(16, 5)),
    )
    model, x = model.double().eval(), torch.randn(6, 2, 8, 8, dtype=torch.float64)
    return IFComp(model, fisher="exact", damping=Relative(0.1)).fit([x]), x


def wide() -> tuple[IFComp, Tensor]:
    """More columns (73, with zeros 80) than positions (16)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 4, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(64, 5))
    x = torch.randn(6, 8, 4, 4, dtype=torch.float64)
    return IFComp(model.double(), fisher="exact", damping=Relative(0.1)).fit([x]), x


@pytest.mark.parametrize(
    ("network", "slab"),
    [
        (grouped, 100),  # the gradients of some labels
        (wide, 640),  # some columns of all labels
        (grouped, 1 << 19),  # all
    ],
)
@pytest.mark.parametrize("positions", [1, 10**9])
def test_the_last_label_is_a_sum_of_gradients_or_of_output_gradients(
    positions: int, network: Callable[[], tuple[IFComp, Tensor]], slab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ifc, x = network()
    kernel = ifc.logit_kernel(x)
    probability = torch.softmax(ifc.model(x).detach(), 1)
    residuals = probability.unsqueeze(1) - torch.eye(5, dtype=torch.float64)  # [B, K, K]
    expected = torch.einsum("byk,bkl,byl->by", residuals, kernel, residuals)
    monkeypatch.setattr(forms, "_MANY_POSITIONS", positions)
    monkeypatch.setattr(rotation, "SLAB_ENTRIES", slab)
    monkeypatch.setattr(forms, "choose_kernel", lambda *_: "direct")
    torch.testing.assert_close(ifc.influence(x), expected, rtol=1e-9, atol=0)


def test_streamed_gradients_are_those_of_one_backward() -> None:
    ifc, x = grouped()
    session = ifc._session
    assert session is not None
    with session.attached():
        recording = session.record(as_batch(x))
        cotangent = torch.randn(6, 5, dtype=torch.float64)
        together = recording.backward(cotangent)
        taken: list[str] = []

        def take(block: RecordedBlock, gradients: Gradients) -> None:
            pairs = zip(
                recording.output_gradients(block, gradients), recording.output_gradients(block, together), strict=True
            )
            assert all(torch.equal(one, other) and one.any() for one, other in pairs)
            taken.append(block.name)

        recording.stream(cotangent, session.recorded, take)
    assert taken == ["9", "3", "1", "0"]
