"""Image classifier: wrong labels, OOD inputs and calibrated probabilities."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ifcomp import IFComp

# 1. Your data, model and training. The model returns logits [batch, classes].
torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images / 16).float().view(-1, 1, 8, 8), torch.tensor(labels)
train, test = TensorDataset(x[:1400], y[:1400]), TensorDataset(x[1400:], y[1400:])
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10)
)
optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
for _ in range(8):
    for batch, target in DataLoader(train, batch_size=64, shuffle=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch), target).backward()
        optimizer.step()

# 2. Fit: two passes over the training data, not shuffled.
loader = DataLoader(train, batch_size=256)
ifc = IFComp(model).fit(loader)
print(ifc.coverage)

# 3. Which training labels are suspicious? Most suspicious first, score in nats.
audit = ifc.audit(loader)
print(audit)
print(audit.ranked[["index", "label", "suggested", "score"]].head(3).to_string(index=False))

# 4. Which inputs are unlike the training data? The detector accepts 95 % of held-out digits.
digit = x[1400:1401]
gate = ifc.ood_detector([x[1401:]])
print(gate, gate.predict(torch.cat([digit, 1 - digit, torch.rand_like(digit)])))

# 5. Calibrated probabilities and prediction sets: calibrate on digits that the model was not trained on.
print(ifc.calibrate([(x[1401:], y[1401:])]))
print(ifc.predict_proba(digit).round(decimals=3), ifc.predict_set(digit, coverage=0.95))

# 6. Save the fit, and load it with the same model later.
ifc.save("images.ifcomp")
ifc = IFComp.load("images.ifcomp", model)
