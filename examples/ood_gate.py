"""Refuse out-of-distribution inputs in a service."""

import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from ifcomp import IFComp, OODDetector

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images / 16).float(), torch.tensor(labels)
train, held_out, live = torch.randperm(len(y)).split([1000, 300, 497])

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.Adam(model.parameters(), 3e-3)
for _ in range(60):
    for batch in train[torch.randperm(len(train))].split(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()

# Offline: fit, build the detector that accepts 95 % of held-out inputs, and save both in one file.
ifc = IFComp(model).fit([(x[train], y[train])])
print(ifc.ood_detector([x[held_out]], tpr=0.95))
run = Path(tempfile.mkdtemp()) / "digits.ifcomp"
ifc.save(run)

# In the service: load the file once, then check every input.
gate = IFComp.load(run, model).detector
assert gate is not None


def answer(gate: OODDetector, inputs: Tensor) -> list[int | None]:
    """Return the predicted class of each input, or None for OOD inputs."""
    classes = model(inputs).argmax(1)
    return [None if refused else int(found) for refused, found in zip(gate.predict(inputs), classes, strict=True)]


requests = {
    "digits": x[live],
    "inverted digits": 1 - x[live],
    "shuffled pixels": x[live][:, torch.randperm(64)],
    "uniform noise": torch.rand(497, 64),
}
for name, inputs in requests.items():
    refused = sum(predicted is None for predicted in answer(gate, inputs))
    print(f"{name:16s} {refused:3d} of {len(inputs)} refused")
print(gate.table([x[live]], ood=[1 - x[live]]))
