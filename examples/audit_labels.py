"""Find the wrong labels in the training data of an image classifier."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ifcomp import IFComp
from ifcomp.tasks.mislabel import AUDIT_DAMPING, audit_labels

torch.manual_seed(0)
images, truth = load_digits(return_X_y=True)
x = torch.tensor(images / 16).float().view(-1, 1, 8, 8)
truth = torch.tensor(truth)

# Flip 90 of the 1,797 labels.
y = truth.clone()
wrong = torch.randperm(len(y))[:90]
y[wrong] = (y[wrong] + torch.randint(1, 10, (90,))) % 10

# Your model and training. Wrong labels are memorised late, so audit a model that was stopped early.
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(),
    nn.Linear(512, 10),
)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
train = TensorDataset(x, y)
for _ in range(4):
    for batch, labels in DataLoader(train, batch_size=64, shuffle=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch), labels).backward()
        optimizer.step()

# Fit, score and audit.
loader = DataLoader(train, batch_size=256)  # not shuffled, so that row i is example i
ifc = IFComp(model).fit(loader)
audit = audit_labels(ifc.score(loader, damping=AUDIT_DAMPING))

suspects = audit.suspects
num_wrong = (y != truth).numpy()[suspects["index"]].sum()
print(f"{len(suspects)} suspects, {num_wrong} of them wrong; 90 of {len(y):,} labels are wrong.")
print(suspects[["index", "label", "suggested_label", "label_complexity"]].head().to_string(index=False))
