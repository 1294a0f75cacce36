"""A fit, a scoring run and audits of a small network, for tests of checkpoints."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from ifcomp import Checkpoint, IFComp
from ifcomp.state import fit_together
from ifcomp.tasks.audit import LabelAudit

BATCH_SIZES = (5, 3, 4)
NUM_BATCHES = len(BATCH_SIZES)

#: Covariance matrices of one fit of the layers "hidden" and "head": inputs and outputs.
LINEAR_MATRICES = 4

#: Further matrices of the two fits in `fit`: outputs of the second fit, and of the embedding in both.
OTHER_MATRICES = 4

#: Layers with predictors of labels: counts of tokens, and the inputs of "hidden" and "head".
AUDITED_LAYERS = 3


class Network(nn.Module):
    """Every kind of block: embedding, Kronecker, normalisation, and a parameter that no rule covers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.hidden = nn.Linear(6, 5)
        self.norm = nn.LayerNorm(5)
        self.scale = nn.Parameter(torch.ones(5))
        self.head = nn.Linear(5, 3)
        self.calls = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        return self.head(torch.tanh(self.norm(self.hidden(self.embedding(tokens).mean(1)))) * self.scale)


class Killed(BaseException):
    """Stands for the end of the process; no code handles it."""


#: Type of the fixture ``kill``.
Kill = Callable[..., list[int]]


def network(seed: int = 0) -> Network:
    torch.manual_seed(seed)
    return Network().eval()


def data(seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randint(7, (size, 4), generator=generator), torch.randint(3, (size,), generator=generator))
        for size in BATCH_SIZES
    ]


def fit(path: Path, every: float = 0.0, batches: Any = None, model: Network | None = None) -> list[IFComp]:
    """Fit two predictors together."""
    model = network() if model is None else model
    predictors = [IFComp(model, 0.7, label_samples=2), IFComp(model, 1.0, fisher="exact")]
    with Checkpoint(path, every) as checkpoint:
        fit_together(predictors, data() if batches is None else batches, checkpoint=checkpoint)
    return predictors


def score(path: Path, every: float = 0.0, batches: Any = None) -> pd.DataFrame:
    """Score with a predictor that was fitted without a checkpoint."""
    with Checkpoint(path, every) as checkpoint:
        ifc = IFComp(network()).fit(data())
        return ifc.score(data() if batches is None else batches, damping=1e-3, checkpoint=checkpoint).frame


def audit(path: Path, every: float = 0.0, batches: Any = None, reference: Any = None) -> LabelAudit:
    """Audit labels without a fit."""
    with Checkpoint(path, every) as checkpoint, warnings.catch_warnings(action="ignore"):  # few examples
        data_or_batches = data() if batches is None else batches
        return IFComp(network()).audit(data_or_batches, reference=reference, checkpoint=checkpoint)


def audit_with_reference(path: Path, every: float = 0.0) -> LabelAudit:
    """Audit labels by predictors of other data."""
    return audit(path, every, reference=data(2))


#: Jobs and the number of checkpoints that they write if every batch and matrix is saved.
JOBS: dict[str, tuple[Callable[..., Any], int]] = {
    "fit": (fit, 2 * NUM_BATCHES + LINEAR_MATRICES + OTHER_MATRICES),
    "score": (score, NUM_BATCHES),
    "audit": (audit, 2 * NUM_BATCHES + AUDITED_LAYERS),
    "audit_with_reference": (audit_with_reference, 4 * NUM_BATCHES + AUDITED_LAYERS),
}


def result_bytes(result: list[IFComp] | pd.DataFrame | LabelAudit) -> dict[str, bytes]:
    """Return every value of a result as bytes."""
    if isinstance(result, LabelAudit):
        evidence = result.evidence
        arrays = {f"{member.layer} {member.predictor}": member.probabilities for member in evidence.members}
        arrays |= evidence.neighbours
        return result_bytes(result.frame) | {name: array.tobytes() for name, array in arrays.items()}
    if isinstance(result, pd.DataFrame):
        return {f"{number} {name}": np.asarray(result[name]).tobytes() for number, name in enumerate(result)}
    named = {}
    for number, ifc in enumerate(result):
        assert ifc.factors is not None
        named[f"{number} count"] = bytes([ifc.factors.count])
        for name, block in ifc.factors.blocks.items():
            basis = (block.basis.inputs, block.basis.outputs) if block.basis else ()
            for part, tensor in enumerate((block.second_moments, *basis)):
                if tensor is not None:
                    named[f"{number} {name} {part}"] = tensor.numpy().tobytes()
    return named
