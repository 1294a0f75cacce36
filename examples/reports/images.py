"""A folder of images with one subfolder per class, and a trained network: from files to a report."""

import torch
from torch import nn

from ifcomp import IFComp
from ifcomp.data.sources import SourceOptions, open_source

images = open_source("images", SourceOptions(image_size=8, grey=True))
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
model.load_state_dict(torch.load("images.pt", weights_only=True))
ifc = IFComp(model.eval()).fit(images.batches())
audit = ifc.audit(images.batches()).with_names(images.class_names, images.names)
audit.to_csv("audit.csv")
ifc.report("report.html", audit=audit, previews=images.preview)
print(audit)
