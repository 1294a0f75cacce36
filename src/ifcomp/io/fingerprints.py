"""Digests of tensors, and fingerprints that tie saved results to a model."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from ifcomp.errors import FingerprintError

#: Hexadecimal digits of each digest in a fingerprint.
_FINGERPRINT_DIGITS = 32

#: Largest number of names in each line of a message.
_MAX_NAMES = 6


def digest_tensors(tensors: Iterable[Tensor], previous: str = "") -> str:
    """Return the SHA-256 digest of the dtypes, shapes and bytes of tensors, and of a previous digest."""
    digest = hashlib.sha256(previous.encode())
    for value in tensors:
        value = value.detach().cpu().contiguous()
        digest.update(f"{value.dtype} {list(value.shape)} ".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def fingerprint(model: nn.Module) -> dict[str, str]:
    """Return the digest of every parameter and buffer by name."""
    tensors = itertools.chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    )
    return {name: digest_tensors([value])[:_FINGERPRINT_DIGITS] for name, value in tensors}


def check_fingerprint(expected: Mapping[str, str], model: nn.Module, what: str) -> None:
    """Check that a model has the expected fingerprint.

    Args:
        expected: Fingerprint of the model that ``what`` belongs to.
        model: The model to check.
        what: Subject of the message, in the plural.

    Raises:
        FingerprintError: If parameters or buffers are missing, new or different; lists them.
    """
    actual = fingerprint(model)
    if actual == dict(expected):
        return
    lines = []
    for title, names in (
        ("missing in this model", expected.keys() - actual.keys()),
        ("only in this model", actual.keys() - expected.keys()),
        ("different values", {name for name in expected.keys() & actual.keys() if expected[name] != actual[name]}),
    ):
        if names:
            shown = ", ".join(sorted(names)[:_MAX_NAMES])
            more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
            lines.append(f"  {title}: {shown}{more}")
    raise FingerprintError(
        f"{what} belong to another model:\n" + "\n".join(lines) + "\nLoad the weights that were fitted, or fit again."
    )


def short_digest(fingerprint: Mapping[str, str]) -> str:
    """A digest of a fingerprint."""
    return hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()[:16]


def tensor_checksums(model: nn.Module) -> list[tuple[int, int, complex]]:
    """Address, version counter and sum of every tensor of the model: a fast check for changes."""
    tensors = (*model.parameters(), *model.buffers())
    sums = [value.detach().sum() for value in tensors]
    totals: dict[int, complex] = {}
    for dtype in {total.dtype for total in sums}:  # one synchronisation per type on a GPU, which may lack complex128
        places = [place for place, total in enumerate(sums) if total.dtype == dtype]
        stacked = torch.stack([sums[place].to(tensors[0].device) for place in places])
        totals |= zip(places, map(complex, stacked.cpu().tolist()), strict=True)
    return [(value.data_ptr(), value._version, totals[place]) for place, value in enumerate(tensors)]
