"""Images made worse in nineteen ways and five degrees, after CIFAR-10-C, and five other ways to tune on.

Everything is made from the images and a seed: no downloads, 28x28 grey and 32x32 colour alike. The published
corruptions have given the names and, for small images, most of the parameters; where a degree would have been milder
than the one before it, or a larger image was meant, the parameters are our own.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from experiments.corruptions import blur, digital, held_out, noise, weather  # noqa: F401  (fill the registry)
from experiments.corruptions.registry import REGISTRY, streams
from ifcomp.errors import DataError, SettingError

#: What results are reported on.
CORRUPTIONS = (
    "gaussian_noise",
    "shot_noise",
    "impulse_noise",
    "speckle_noise",
    "defocus_blur",
    "glass_blur",
    "motion_blur",
    "zoom_blur",
    "gaussian_blur",
    "snow",
    "frost",
    "fog",
    "brightness",
    "spatter",
    "contrast",
    "elastic_transform",
    "pixelate",
    "jpeg_compression",
    "saturate",
)
#: What settings may be tuned on.
HELD_OUT = ("rotation", "shear", "posterize", "gamma", "cutout")
#: Severity 0 leaves images as they are.
SEVERITIES = (0, 1, 2, 3, 4, 5)

__all__ = ["CORRUPTIONS", "HELD_OUT", "SEVERITIES", "corrupt"]


def corrupt(images: Tensor, name: str, severity: int, *, seed: int = 0) -> Tensor:
    """Corrupted copies of uint8 images [N, H, W] or [N, H, W, 3], in the same form.

    The same images, name, severity and seed give the same result; an image's result does not depend on the images that
    follow it. The random numbers are the same at every severity.

    Raises:
        SettingError: If there is no such corruption or severity.
        DataError: If the images are of another form.
    """
    if name not in (*CORRUPTIONS, *HELD_OUT):
        raise SettingError(f"There is no corruption '{name}'. Choose one of {', '.join((*CORRUPTIONS, *HELD_OUT))}.")
    if severity not in SEVERITIES:
        raise SettingError(f"Severity must be one of {', '.join(map(str, SEVERITIES))}, but is {severity}.")
    if images.dtype != torch.uint8 or not (images.dim() == 3 or (images.dim() == 4 and images.shape[3] == 3)):
        raise DataError(
            f"Images must be uint8 [N, H, W] or [N, H, W, 3], but are {images.dtype} {list(images.shape)}. Corrupt "
            "them before they are normalised."
        )
    if severity == 0 or len(images) == 0:
        return images.clone()
    pixels = images.numpy().astype(np.float32).reshape(*images.shape[:3], -1) / 255
    found = REGISTRY[name]
    changed = found.apply(pixels, streams(name, seed), found.parameters[severity - 1])
    rounded = np.rint(np.clip(changed, 0, 1) * 255).astype(np.uint8)
    return torch.from_numpy(rounded.reshape(images.shape))
