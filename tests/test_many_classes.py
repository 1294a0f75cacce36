"""A thousand classes: work and memory grow with the logits and the factors of the last layer only."""

import math

import pytest
import torch
from torch import Tensor

from experiments.models import resnet18
from ifcomp import IFComp
from ifcomp.curvature.sizes import factor_bytes
from ifcomp.layers.recording import Recording
from ifcomp.tasks.ood import OOD_DAMPING
from tracking import Alive

EXAMPLES = 6


def fitted(classes: int, width: int, max_memory: str | None = None) -> tuple[IFComp, Tensor]:
    """A fitted ResNet-18 with random weights, and inputs."""
    torch.manual_seed(0)
    model = resnet18(classes, width=width)
    x = torch.randn(EXAMPLES, 3, 32, 32)
    model(x)  # running statistics
    ifc = IFComp(model.eval(), damping=OOD_DAMPING).fit([x], max_memory=max_memory, progress=False)
    return ifc, x


@pytest.mark.parametrize(("verb", "cotangents"), [("predict_proba", 3), ("bounded_complexity", 17)])
def test_backward_passes_do_not_grow_with_the_number_of_classes(
    verb: str, cotangents: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    original = Recording.gradients

    def counted(self: Recording, inputs: list[Tensor], cotangent: Tensor) -> tuple[Tensor | None, ...]:
        calls.append(len(cotangent))
        return original(self, inputs, cotangent)

    counts = []
    for classes in (40, 400):
        ifc, x = fitted(classes, 2)
        getattr(ifc, verb)(x)  # measures memory and verifies layers
        with monkeypatch.context() as patch:
            patch.setattr(Recording, "gradients", counted)
            getattr(ifc, verb)(x)
        counts.append(sum(calls))
        calls.clear()
    assert counts == [cotangents * EXAMPLES] * 2


def test_memory_grows_with_the_logits_and_the_factors_of_the_last_layer_only() -> None:
    """A tensor [B, K, K], or one [K, K] per cotangent, would exceed the bound many times."""
    peaks, factors = {}, {}
    for classes in (100, 1_000):
        ifc, x = fitted(classes, 4)
        assert ifc._recorder is not None
        factors[classes] = factor_bytes(ifc._recorder.blocks, 4)
        for verb in (ifc.predict_proba, ifc.bounded_complexity):
            verb(x)
            with Alive() as alive:
                verb(x)
            peaks[verb.__name__, classes] = alive.peak
    logits = 17 * EXAMPLES * 900 * 8  # one row of logits per cotangent in float64
    for name in ("predict_proba", "bounded_complexity"):
        growth = peaks[name, 1_000] - peaks[name, 100]
        assert growth < 2 * (factors[1_000] - factors[100]) + 10 * logits
    assert 2 * (factors[1_000] - factors[100]) + 10 * logits < EXAMPLES * 1_000**2 * 4


def test_every_verb_runs_with_a_thousand_classes_in_little_memory() -> None:
    ifc, x = fitted(1_000, 4, max_memory="150MB")
    probability, (complexity, error) = ifc.predict_proba(x), ifc.bounded_complexity(x, return_error=True)
    assert probability.shape == (EXAMPLES, 1_000)
    torch.testing.assert_close(probability.sum(1), torch.ones(EXAMPLES).double())
    assert ((complexity >= 0) & (complexity <= math.log(1_000))).all()
    assert ((error > 0) & (error < 1)).all()
    table = ifc.score([(x, torch.arange(EXAMPLES))], probes=2, max_memory="150MB", progress=False)
    assert len(table) == EXAMPLES


@pytest.mark.second_tier
def test_a_thousand_classes_on_a_full_resnet18_fit_in_one_gigabyte() -> None:
    with Alive() as alive:
        ifc, x = fitted(1_000, 64, max_memory="1GB")
        ifc.predict_proba(x)
        ifc.bounded_complexity(x)
        ifc.score([x], probes=2, max_memory="1GB", progress=False)
    parameters = sum(parameter.nbytes for parameter in ifc.model.parameters())
    assert alive.peak - parameters < 1e9
