"""Nineteen image corruptions at five severities, after CIFAR-10-C, and five other perturbations for tuning.

The corruptions are computed from the images and a seed, without downloads, for 28x28 grey and 32x32 colour images.
Names and most parameters follow the published corruptions. The parameters differ where a severity would be milder than
the one before it, or was meant for larger images.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from experiments.corruptions import blur, digital, held_out, noise, weather  # noqa: F401  (fill the registry)
from experiments.corruptions.registry import REGISTRY, streams
from ifcomp.errors import DataError, SettingError

#: Corruptions of reported results.
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
#: Perturbations for tuning.
HELD_OUT = ("rotation", "shear", "posterize", "gamma", "cutout")
#: Severity 0 does not change the images.
SEVERITIES = (0, 1, 2, 3, 4, 5)

__all__ = ["CORRUPTIONS", "HELD_OUT", "SEVERITIES", "corrupt"]


def corrupt(images: Tensor, name: str, severity: int, *, seed: int = 0) -> Tensor:
    """Return corrupted copies of uint8 images [N, H, W] or [N, H, W, 3].

    The result depends only on images, name, severity and seed. The result of an image does not depend on the images
    after it. The random numbers are the same at every severity.

    Raises:
        SettingError: If there is no such corruption or severity.
        DataError: If the images have another shape or dtype.
    """
    if name not in (*CORRUPTIONS, *HELD_OUT):
        raise SettingError(f"There is no corruption '{name}'. Choose one of {', '.join((*CORRUPTIONS, *HELD_OUT))}.")
    if severity not in SEVERITIES:
        raise SettingError(f"Severity must be one of {', '.join(map(str, SEVERITIES))}, but is {severity}.")
    if images.dtype != torch.uint8 or not (images.dim() == 3 or (images.dim() == 4 and images.shape[3] == 3)):
        raise DataError(
            f"Images must be uint8 [N, H, W] or [N, H, W, 3], but are {images.dtype} {list(images.shape)}. Corrupt "
            "them before normalisation."
        )
    if severity == 0 or len(images) == 0:
        return images.clone()
    pixels = images.numpy().astype(np.float32).reshape(*images.shape[:3], -1) / 255
    corruption = REGISTRY[name]
    corrupted = corruption.apply(pixels, streams(name, seed), corruption.parameters[severity - 1])
    rounded = np.rint(np.clip(corrupted, 0, 1) * 255).astype(np.uint8)
    return torch.from_numpy(rounded.reshape(images.shape))
