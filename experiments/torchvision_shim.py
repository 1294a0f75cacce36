"""Import of torchvision on machines where its compiled operators do not load, such as with a CPU build of torch.

torchvision looks up two of its operators on import. If they are missing, it is enough to declare their schemas, because
the experiments do not call them. Call `declare_missing_operators` before the first import of torchvision or of packages
that import it (pytorch-ood, transformers). It has no effect if the operators load.
"""

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


@cache
def declare_missing_operators() -> torch.library.Library | None:
    """Declare the missing operators once. The cache keeps the returned library, and with it the declarations, alive."""
    spec = find_spec("torchvision")
    if spec is None or spec.origin is None or _operators_load(Path(spec.origin).parent):
        return None
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(name + _SCHEMA)
    return library


def _operators_load(folder: Path) -> bool:
    """Return whether the operators of torchvision load."""
    try:
        for path in folder.glob("_C*"):
            torch.ops.load_library(path)
    except OSError:
        return False
    return hasattr(torch.ops.torchvision, "nms")
