"""``torch.autocast`` around a call applies to the forward pass; factors and results are not cast."""

from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from experiments.models import LeNet
from ifcomp import Checkpoint, IFComp, Relative
from ifcomp.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:TF32 acceleration", "ignore:In CPU autocast")


@pytest.fixture(autouse=True)
def plain_kernels() -> Iterator[None]:
    """Disable oneDNN. It uses matrix units (AMX) if the CPU reports them, which some virtual machines forbid."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield


class Net(nn.Module):
    """Convolution, norms, attention, a positional parameter without a rule, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.norm = nn.Conv2d(1, 16, 7, stride=7), nn.BatchNorm2d(16)
        self.attention, self.after = nn.MultiheadAttention(16, 2, batch_first=True), nn.LayerNorm(16)
        self.position, self.head = nn.Parameter(0.1 * torch.randn(16, 16)), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(self.patch(x)).flatten(2).transpose(1, 2) + self.position
        logits: Tensor = self.head(self.after(tokens + self.attention(tokens, tokens, tokens)[0]).mean(1))
        return logits


def trained(make: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model, x = make(), images(200)
    labels = (x.mean((1, 2, 3)) * 40).long().clamp(0, 9)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(15):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), labels).backward()
        optimizer.step()
    return model.eval()


def images(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(count, 1, 28, 28, generator=generator) * torch.rand(count, 1, 1, 1, generator=generator) / 2


def both(model: nn.Module, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Influence without and with autocast, from fits with the same labels."""
    data, inputs = [(images(64), torch.arange(64) % 10)], images(20)
    plain = IFComp(model, fisher="empirical", damping=Relative(1.0)).fit(data).influence(inputs)
    with torch.autocast("cpu", dtype):
        with torch.no_grad():
            model(inputs)  # autocast now caches copies of weights without a graph
        ifc = IFComp(model, fisher="empirical", damping=Relative(1.0)).fit(data)
        cast = ifc.influence(inputs)
    assert all(block.dtypes == {torch.float32} for block in ifc.factors.blocks.values())
    assert cast.dtype == torch.float64
    return plain, cast


#: Largest median and 95 % quantile of relative errors.
TOLERANCES = {torch.bfloat16: (0.02, 0.15), torch.float16: (0.002, 0.01)}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("make", [LeNet, Net])
def test_influence_equals_that_of_full_precision_up_to_rounding(make: type[nn.Module], dtype: torch.dtype) -> None:
    """Logits have 8 or 11 bits, so small residuals of nearly certain labels are inaccurate."""
    plain, cast = both(trained(make), dtype)
    error = (cast - plain).abs() / plain
    median, quantile = TOLERANCES[dtype]
    assert 0 < float(error.median()) < median
    assert float(error.quantile(0.95)) < quantile


def test_only_the_forward_pass_is_cast() -> None:
    """A model that disables autocast has the same results with and without it, to the bit."""
    inner = trained(Net)

    class WithoutAutocast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                logits: Tensor = self.inner(x)
                return logits

    data, labels = images(30), torch.arange(30) % 10
    expected = IFComp(WithoutAutocast()).fit([data])
    with torch.autocast("cpu", torch.bfloat16):
        ifc = IFComp(WithoutAutocast()).fit([data])
        assert torch.equal(ifc.influence(data), expected.influence(data))
        explained = ifc.explain(data[:3], labels[:3], [(data, labels)]).frame
        scores = ifc.score([(data, labels)]).frame
    pd.testing.assert_frame_equal(explained, expected.explain(data[:3], labels[:3], [(data, labels)]).frame)
    pd.testing.assert_frame_equal(scores, expected.score([(data, labels)]).frame)


def test_a_fit_is_not_resumed_in_another_precision(tmp_path: Path) -> None:
    model, data = trained(Net), list(images(20).split(5))

    def stopped() -> Iterator[Tensor]:
        yield from data[:2]
        raise OSError("stopped")

    class Stops:
        def __iter__(self) -> Iterator[Tensor]:
            return stopped()

    with pytest.raises(OSError, match="stopped"), Checkpoint(tmp_path / "partial", every=0) as checkpoint:
        IFComp(model).fit(Stops(), checkpoint=checkpoint)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(CheckpointError, match="autocast"),
        Checkpoint(tmp_path / "partial", every=0) as checkpoint,
    ):
        IFComp(model).fit(data, checkpoint=checkpoint)
