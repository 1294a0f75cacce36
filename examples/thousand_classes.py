"""A model of 1,000 classes: a few random probes in place of all labels."""

import time

import torch
from scipy.stats import spearmanr
from torch import nn

from ifcomp import IFComp
from ifcomp.tasks.ood import OOD_DAMPING, ood_metrics

CLASSES = 1000
torch.manual_seed(0)
centres = torch.randn(CLASSES, 32)
y = torch.arange(4 * CLASSES) % CLASSES
x = centres[y] + 0.3 * torch.randn(len(y), 32)

model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, CLASSES))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
for _ in range(12):
    for batch in torch.randperm(len(y)).split(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
print(f"accuracy {float((model(x).argmax(1) == y).float().mean()):.3f}")

# fisher="sampled", the default, costs one backward an example; "exact" would cost a thousand.
ifc = IFComp(model, damping=OOD_DAMPING).fit(list(zip(x.split(500), y.split(500), strict=True)))

known = centres[:200] + 0.3 * torch.randn(200, 32)
unknown = torch.randn(200, 32)


def timed(inputs: torch.Tensor, probes: int | None = None) -> tuple[torch.Tensor, float]:
    """Parametric complexity in nats, and the milliseconds it took for an input."""
    started = time.perf_counter()
    complexity = ifc.parametric_complexity(inputs, probes=probes)
    return complexity, 1000 * (time.perf_counter() - started) / len(inputs)


exact, slow = timed(torch.cat([known[:10], unknown[:10]]))
print(f"all {CLASSES} labels: {slow:.0f} ms an input")
print("probes  ms an input  rank correlation with all labels  AUROC known / unknown")
for probes in (2, 8, 32):
    found, quick = timed(torch.cat([known, unknown]), probes)
    agreement = spearmanr(exact, torch.cat([found[:10], found[200:210]])).statistic
    print(f"{probes:6d} {quick:12.2f} {agreement:33.3f} {ood_metrics(found[:200], found[200:]).auroc:22.3f}")
