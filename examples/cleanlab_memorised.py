"""Give cleanlab the pooled probabilities of one memorised network instead of cross-validated ones."""

import torch
from cleanlab import Datalab
from cleanlab.filter import find_label_issues
from sklearn.datasets import load_digits
from torch import nn

from ifcomp import IFComp

torch.manual_seed(0)
images, truth = load_digits(return_X_y=True)
x, truth = torch.tensor(images / 16).float(), torch.tensor(truth)

# Flip 180 of the 1,797 labels. Train until the network has memorised them.
y = truth.clone()
flipped = torch.randperm(len(y))[:180]
y[flipped] = (y[flipped] + torch.randint(1, 10, (180,))) % 10
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
for _ in range(100):
    for rows in torch.randperm(len(y)).split(64):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
model.eval()

# The probabilities of the network are in-sample. The predictors of the audit leave out the example that they predict.
audit = IFComp(model).audit([(x, y)])
with torch.no_grad():
    in_sample = model(x).double().softmax(1).numpy()
print(f"accuracy of the network on the given labels: {(in_sample.argmax(1) == y.numpy()).mean():.3f}")

labels, wrong = y.numpy(), (y != truth).numpy()
for name, pred_probs in {"in-sample": in_sample, "audit.pred_probs": audit.pred_probs}.items():
    issues = find_label_issues(labels, pred_probs)
    print(f"{name:17s} {issues.sum():4d} label issues, {(issues & wrong).sum():4d} of the 180 wrong labels among them")

# Datalab takes the same array, and so does CleanLearning().find_label_issues.
lab = Datalab({"y": labels}, label_name="y", verbosity=0)
lab.find_issues(pred_probs=audit.pred_probs, issue_types={"label": {}})
print(lab.get_issues("label").sort_values("label_score").head(3).round(3).to_string())
