"""Audit a trained PyTorch classifier with stochastic data complexity and Boltzmann influence functions.

One fit of the curvature finds wrong training labels, unfamiliar inputs and predictions that are too confident.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ifcomp._version import __version__

if TYPE_CHECKING:
    from ifcomp.curvature.factors import Factors, Relative
    from ifcomp.detection import OODDetector
    from ifcomp.explanation import Explanation
    from ifcomp.io.checkpoints import Checkpoint
    from ifcomp.layers.coverage import Coverage
    from ifcomp.predictor import IFComp
    from ifcomp.scores import ScoreTable
    from ifcomp.tasks.audit import LabelAudit
    from ifcomp.tasks.calibration_result import Calibration
    from ifcomp.tasks.ood_table import OODTable

__all__ = [
    "Calibration",
    "Checkpoint",
    "Coverage",
    "Explanation",
    "Factors",
    "IFComp",
    "LabelAudit",
    "OODDetector",
    "OODTable",
    "Relative",
    "ScoreTable",
    "__version__",
]

#: Module of each public name. Modules are imported on first use, so that ``ifcomp --help`` does not wait for torch.
_HOMES = {
    "Calibration": "ifcomp.tasks.calibration_result",
    "Checkpoint": "ifcomp.io.checkpoints",
    "Coverage": "ifcomp.layers.coverage",
    "Explanation": "ifcomp.explanation",
    "Factors": "ifcomp.curvature.factors",
    "IFComp": "ifcomp.predictor",
    "LabelAudit": "ifcomp.tasks.audit",
    "OODDetector": "ifcomp.detection",
    "OODTable": "ifcomp.tasks.ood_table",
    "Relative": "ifcomp.curvature.factors",
    "ScoreTable": "ifcomp.scores",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ifcomp' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
