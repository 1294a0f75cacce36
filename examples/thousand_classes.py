"""Model with 1,000 classes: probes instead of all labels."""

import time

import torch
from scipy.stats import spearmanr
from torch import nn

from ifcomp import IFComp, Relative
from ifcomp.tasks.ood import ood_metrics

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

# fisher="sampled", the default, costs one backward pass per example; "exact" would cost a thousand.
ifc = IFComp(model, damping=Relative(1e-4)).fit(list(zip(x.split(500), y.split(500), strict=True)))

known = centres[:200] + 0.3 * torch.randn(200, 32)
unknown = torch.randn(200, 32)


def timed(inputs: torch.Tensor, probes: int | None = None) -> tuple[torch.Tensor, float]:
    """Return the parametric complexity in nats and the milliseconds per input."""
    started = time.perf_counter()
    complexity = ifc.parametric_complexity(inputs, probes=probes)
    return complexity, 1000 * (time.perf_counter() - started) / len(inputs)


exact, slow = timed(torch.cat([known[:10], unknown[:10]]))
print(f"all {CLASSES} labels: {slow:.0f} ms per input")
print("probes  ms per input  rank correlation with all labels  AUROC known / unknown")
for probes in (2, 8, 32):
    estimate, fast = timed(torch.cat([known, unknown]), probes)
    agreement = spearmanr(exact, torch.cat([estimate[:10], estimate[200:210]])).statistic
    auroc = ood_metrics(estimate[:200], estimate[200:]).auroc
    print(f"{probes:6d} {fast:13.2f} {agreement:33.3f} {auroc:22.3f}")
