"""Lets torchvision import on machines where its compiled operators do not load, such as with a CPU build of torch.

torchvision looks up two of its operators while it is imported. Where they are missing, declaring their schemas is
enough: nothing here calls them. Call `declare_missing_operators` before the first import of torchvision or of what
imports it (pytorch-ood, transformers); with working operators it does nothing.
"""

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


@cache
def declare_missing_operators() -> torch.library.Library | None:
    """Declare what is missing, once. The declarations last as long as the returned library, which the cache keeps."""
    spec = find_spec("torchvision")
    if spec is None or spec.origin is None or _operators_load(Path(spec.origin).parent):
        return None
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(name + _SCHEMA)
    return library


def _operators_load(folder: Path) -> bool:
    """Whether torchvision's own operators are there: what it will find when it loads them itself."""
    try:
        for path in folder.glob("_C*"):
            torch.ops.load_library(path)
    except OSError:
        return False
    return hasattr(torch.ops.torchvision, "nms")
