"""Whole networks of real size against explicit per-example gradients: LeNet, and the CIFAR ResNet-20.

With ``IFCOMP_DATA`` set the ResNet has its pretrained weights and sees real images; else weights and images are random.
"""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.testing import assert_close

from benchmarks.references import paper_influence
from benchmarks.suites.influence import reference_factors
from experiments.models import LeNet, resnet20
from ifcomp import IFComp, Relative

DATA = os.environ.get("IFCOMP_DATA")


def lenet() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return LeNet(), torch.randn(12, 1, 28, 28)


def pretrained_resnet20() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = resnet20()
    if DATA is None:
        return model, torch.randn(12, 3, 32, 32)
    model.load_state_dict(load_file(Path(DATA) / "weights" / "resnet20-12fca82f.safetensors"))
    images = np.load(Path(DATA) / "cifar10" / "x_test.npy", mmap_mode="r")[:12]
    pixels = torch.from_numpy(np.array(images)).permute(0, 3, 1, 2) / 255
    mean, deviation = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return model, (pixels - mean[:, None, None]) / deviation[:, None, None]


@pytest.mark.parametrize(
    ("beta", "dtype", "tolerance"), [(0.1, torch.float64, 1e-9), (1.0, torch.float32, 1e-4)], ids=str
)
@pytest.mark.parametrize("make", [lenet, pretrained_resnet20])
def test_influence_equals_that_of_explicit_gradients(
    make: Callable[[], tuple[nn.Module, Tensor]], beta: float, dtype: torch.dtype, tolerance: float
) -> None:
    model, x = make()
    model, x = model.to(dtype).eval(), x.to(dtype)
    ifc = IFComp(model, beta, sua=True, fisher="exact", damping=Relative(0.1)).fit([x])
    explicit = paper_influence(model.double(), x[:3].double(), reference_factors(ifc, torch.float64), beta)
    model.to(dtype)
    assert_close(ifc.influence(x[:3]), explicit, rtol=tolerance, atol=tolerance * float(explicit.mean()))
