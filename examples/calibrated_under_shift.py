"""Calibrate the probabilities of an image classifier under distribution shift."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from ifcomp import IFComp
from ifcomp.tasks.calibration import calibration_summary

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images / 16).float().view(-1, 1, 8, 8), torch.tensor(labels)
order = torch.randperm(len(y))
train, validation, test = ((x[part], y[part]) for part in order.split([1000, 300, 497]))

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
    nn.Flatten(), nn.Linear(512, 10),
)  # fmt: skip
optimizer = torch.optim.Adam(model.parameters(), 3e-3)
for _ in range(20):
    for batch, target in DataLoader(TensorDataset(*train), batch_size=50, shuffle=True):
        optimizer.zero_grad()
        F.cross_entropy(model(batch), target).backward()
        optimizer.step()

# Select temperature and alpha on clean and speckled validation digits. The test digits have other shifts.
specks = (torch.rand_like(validation[0]) < 0.2).float()
speckled = specks * torch.rand_like(specks).round() + (1 - specks) * validation[0]
shifted = [(speckled, validation[1])]
ifc = IFComp(model).fit([train])
calibration = ifc.calibrate([validation], shifted)
print(calibration)

shifts = {
    "clean": test[0],
    "noisy": (test[0] + 0.4 * torch.randn_like(test[0])).clamp(0, 1),
    "blurred": F.avg_pool2d(test[0], 3, stride=1, padding=1),
    "moved": F.pad(test[0], (1, -1)),
}
print("test digits  accuracy   ECE: softmax  temperature  ifcomp   NLL: softmax  temperature  ifcomp")
for name, inputs in shifts.items():
    with torch.no_grad():
        logits = model(inputs).double()
    scaled = (logits / calibration.frame["temperature"][1]).softmax(1)
    summaries = [calibration_summary(p, test[1]) for p in (logits.softmax(1), scaled, ifc.predict_proba(inputs))]
    ece, nll = (" ".join(f"{summary[metric]:12.3f}" for summary in summaries) for metric in ("ece", "nll"))
    print(f"{name:11s} {summaries[0]['accuracy']:9.3f} {ece} {nll}")
