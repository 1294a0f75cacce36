"""Networks of the benchmarks. They are not trained, because time does not depend on the weights."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.suite import Setup
from experiments.models import LeNet, resnet18, resnet20

warnings.filterwarnings("ignore", "The running statistics of", UserWarning)  # untrained networks


@dataclass(frozen=True)
class Network:
    """Network of a benchmark.

    Attributes:
        make: Function that builds the network for K classes.
        tiny: Function that builds a narrower network for tiny runs.
        shape: Shape of one input.
        batch: Number of examples for the forward pass and for the library.
        few: Number of examples for slow references.
        sua: Whether kernel offsets share one input basis (SUA); the paper uses it for ResNets only.
    """

    make: Callable[[int], nn.Module]
    tiny: Callable[[int], nn.Module]
    shape: tuple[int, ...]
    batch: int
    few: int
    sua: bool

    def model(self, classes: int, setup: Setup) -> nn.Module:
        """Set the number of threads and return the network in eval mode with seeded random weights."""
        torch.set_num_threads(setup.threads)
        torch.manual_seed(0)
        return (self.tiny if setup.tiny else self.make)(classes).eval()

    def images(self, count: int) -> Tensor:
        """Return seeded random inputs."""
        return torch.randn(count, *self.shape, generator=torch.Generator().manual_seed(1))


def plain_network(classes: int, width: int = 32) -> nn.Module:
    """Build a CNN of Conv2d and Linear layers, which kronfluence covers; 0.3 million parameters for ten classes."""
    return nn.Sequential(
        *(nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(2 * width, 2 * width, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(32 * width, 4 * width), nn.ReLU(), nn.Linear(4 * width, classes)),
    )


LENET = Network(LeNet, LeNet, (1, 28, 28), batch=512, few=64, sua=False)
RESNET20 = Network(resnet20, resnet20, (3, 32, 32), batch=64, few=16, sua=True)
RESNET18 = Network(resnet18, lambda classes: resnet18(classes, width=4), (3, 32, 32), batch=32, few=8, sua=True)
PLAIN = Network(plain_network, lambda classes: plain_network(classes, 4), (3, 32, 32), batch=100, few=100, sua=False)
