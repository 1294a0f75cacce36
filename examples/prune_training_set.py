"""Drop the training examples of lowest stochastic complexity and train again."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from ifcomp import IFComp

images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images / 16).float(), torch.tensor(labels)
order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
x_train, y_train, x_test, y_test = x[order[:1200]], y[order[:1200]], x[order[1200:]], y[order[1200:]]


def trained(kept: Tensor, seed: int) -> nn.Module:
    """Train a network on the kept examples; the number of steps does not depend on their number."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), 4e-3)
    for _ in range(300):
        batch = kept[torch.randint(len(kept), (64,))]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x_train[batch]), y_train[batch]).backward()
        optimizer.step()
    return model


def accuracy(kept: Tensor) -> float:
    """Return the mean test accuracy of three networks."""
    accuracies = [(trained(kept, seed)(x_test).argmax(1) == y_test).float().mean() for seed in (1, 2, 3)]
    return float(sum(accuracies) / 3)


all_examples = torch.arange(len(x_train))
ifc = IFComp(trained(all_examples, 0)).fit([(x_train, y_train)])

print(f"dropped  kept  lowest complexity first  at random\n     0%  1200 {accuracy(all_examples):24.3f} ")
for fraction in (0.3, 0.6):
    index = ifc.prune((x_train, y_train), fraction, balanced=True)
    at_random = torch.randperm(len(x_train), generator=torch.Generator().manual_seed(5))[: len(index)]
    print(f"{fraction:7.0%} {len(index):5d} {accuracy(torch.tensor(index)):24.3f} {accuracy(at_random):10.3f}")
