"""Share the work between processes.

Start it with: torchrun --nproc-per-node 2 examples/several_processes.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

from ifcomp import IFComp
from ifcomp.distributed import sharing

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images / 16).float(), torch.tensor(labels)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.Adam(model.parameters(), 0.01)
for _ in range(50):  # every process has the same model; yours would load its weights here
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()

batches = list(zip(x.split(300), y.split(300), strict=True))
with sharing() as ranks:  # every process goes over the same batches, and works on its own slice of each
    table = IFComp(model).fit(batches).score(batches)
    if ranks.rank == 0:
        top = table.frame.nlargest(3, "stochastic_complexity")
        print(f"{ranks.world} processes, {len(table)} rows on each")
        print(top[["index", "label", "suggested_label", "stochastic_complexity"]].to_string(index=False))
