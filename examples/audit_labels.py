"""Find the wrong labels of an image classifier that has memorised them."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ifcomp import IFComp
from ifcomp.tasks.metrics import auroc

torch.manual_seed(0)
images, truth = load_digits(return_X_y=True)
x = torch.tensor(images / 16).float().view(-1, 1, 8, 8)
truth = torch.tensor(truth)

# Flip 360 of the 1,797 labels.
y = truth.clone()
flipped = torch.randperm(len(y))[:360]
y[flipped] = (y[flipped] + torch.randint(1, 10, (360,))) % 10
wrong = (y != truth).numpy()

# Your model and training. There is no early stopping: the model memorises the wrong labels.
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(),
    nn.Linear(512, 10),
)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
train = TensorDataset(x, y)
for _ in range(60):
    for batch, labels in DataLoader(train, batch_size=64, shuffle=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch), labels).backward()
        optimizer.step()
model.eval()

# Audit. No fit is needed.
loader = DataLoader(train, batch_size=256)  # not shuffled, so that row i is example i
audit = IFComp(model).audit(loader)
print(audit.headline)
print(audit.suspects.head().round(3).to_string(index=False))

# The loss of the same model, for comparison.
with torch.no_grad():
    loss = nn.functional.cross_entropy(model(x), y, reduction="none")
scores = {"audit": audit.frame["score"].to_numpy(), "loss": loss.numpy()}
print("score  AUROC  wrong among the 360 most suspicious")
for name, score in scores.items():
    print(f"{name:5s} {auroc(score, wrong):6.3f} {wrong[score.argsort()[::-1][:360]].sum():6d}")

# Which layers contradict the first suspect?
first = int(audit.suspects["index"].iloc[0])
print(audit.why(first)[["layer", "predictor", "weight", "p_label", "p_suggested"]].round(2))
