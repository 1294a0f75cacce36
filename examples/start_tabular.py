"""Tabular data: wrong labels, OOD rows and calibrated probabilities of a small network."""

import torch
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch import nn

from ifcomp import IFComp
from ifcomp.tasks.calibration import calibration_summary

# 1. Your table and model. Standardise the columns, for the network and for its curvature.
torch.manual_seed(0)
data = load_breast_cancer()
parts = train_test_split(data.data, data.target, test_size=0.5, random_state=0, stratify=data.target)
scaler = StandardScaler().fit(parts[0])
x_train, x_other = (torch.tensor(scaler.transform(part)).float() for part in parts[:2])
y_train, y_other = torch.tensor(parts[2]), torch.tensor(parts[3])
x_validation, x_test, y_validation, y_test = x_other[:200], x_other[200:], y_other[:200], y_other[200:]
y_train[::30] = 1 - y_train[::30]  # 10 wrong labels, to have something to find
model = nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.Adam(model.parameters(), 0.01)
for _ in range(100):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x_train), y_train).backward()
    optimizer.step()

# 2. Fit.
train = [(x_train, y_train)]
ifc = IFComp(model).fit(train)

# 3. Which labels are suspicious? Most suspicious first, score in nats.
audit = ifc.audit(train)
print(audit)
print(audit.ranked[["index", "label", "suggested", "score"]].head(3).to_string(index=False))

# 4. Which rows are out-of-distribution? Here: shuffled columns. The detector accepts 95 % of validation rows.
gate = ifc.ood_detector([x_validation])
print(gate.table([x_test], ood=[x_test[:, torch.randperm(30)]]))

# 5. Calibrated probabilities and prediction sets: calibrate on validation rows, measure on test rows.
print(ifc.calibrate([(x_validation, y_validation)]))
for name, probability in {"softmax": model(x_test).softmax(1).detach(), "ifcomp": ifc.predict_proba(x_test)}.items():
    summary = calibration_summary(probability, y_test)
    print(f"{name:22s} NLL {summary['nll']:.3f} nats, ECE {summary['ece']:.3f}, accuracy {summary['accuracy']:.3f}")
sets = ifc.predict_set(x_test, coverage=0.95)
covered = sets[range(len(y_test)), y_test].double().mean()
print(f"sets with coverage 0.95: {sets.sum(1).double().mean():.2f} classes on average, {covered:.1%} covered")
