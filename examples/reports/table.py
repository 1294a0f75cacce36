"""A CSV table with a column "label", and a trained network: from the file to a report."""

import pandas as pd
import torch
from torch import nn

from ifcomp import IFComp

table = pd.read_csv("table.csv")
model = nn.Sequential(nn.BatchNorm1d(30), nn.Linear(30, 32), nn.ReLU(), nn.Linear(32, 2))
model.load_state_dict(torch.load("table.pt", weights_only=True))
ifc = IFComp(model.eval()).fit(table)
audit = ifc.audit(table)
audit.to_csv("audit.csv")
ifc.report("report.html", audit=audit)
print(audit)
