"""Share fit and scoring between processes.

Run with: torchrun --nproc-per-node 2 examples/several_processes.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

from ifcomp import IFComp
from ifcomp.distributed import sharing
from ifcomp.tasks.mislabel import AUDIT_DAMPING, audit_labels

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images / 16).float(), torch.tensor(labels)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.Adam(model.parameters(), 0.01)
for _ in range(50):  # every process needs the same weights; load yours here
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()

batches = list(zip(x.split(300), y.split(300), strict=True))
with sharing() as ranks:  # every process reads the same batches and works on one slice of each
    table = IFComp(model).fit(batches).score(batches, damping=AUDIT_DAMPING)
    if ranks.rank == 0:
        print(f"{ranks.world} processes, {len(table)} rows on each")
        print(audit_labels(table).suspects.iloc[:3, 1:6].to_string(index=False))
