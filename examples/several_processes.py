"""Split the work over several processes.

Start it with: torchrun --nproc-per-node 2 examples/several_processes.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

from ifcomp import IFComp
from ifcomp.distributed import data_parallel

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
with data_parallel() as process:  # every process reads the same batches and computes on its shard of each
    ifc = IFComp(model).fit(batches)
    table, audit = ifc.score(batches), ifc.audit(batches)
    if process.rank == 0:
        print(f"{process.world_size} processes, {len(table)} rows on each")
        print(audit.ranked[["index", "label", "suggested", "score"]].head(3).to_string(index=False))
