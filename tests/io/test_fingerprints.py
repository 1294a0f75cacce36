"""Fingerprints of models."""

import hashlib

import numpy as np
import pytest
import torch
from torch import nn

from ifcomp.errors import FingerprintError
from ifcomp.io.fingerprints import check_fingerprint, digest_tensors, fingerprint


class Model(nn.Module):
    """A weight and an integer buffer, each with two names."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).view(2, 3))
        self.again = self.weight
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("count_again", self.count)


def digest(value: np.ndarray, dtype: str) -> str:
    """Return the first half of SHA-256 over dtype, shape and bytes."""
    return hashlib.sha256(f"torch.{dtype} {list(value.shape)} ".encode() + value.tobytes()).hexdigest()[:32]


def test_the_fingerprint_is_a_digest_of_dtype_shape_and_bytes() -> None:
    weight, count = np.arange(6, dtype=np.float32).reshape(2, 3), np.array(7)
    expected = {name: digest(weight, "float32") for name in ("weight", "again")}
    assert fingerprint(Model()) == expected | dict.fromkeys(("count", "count_again"), digest(count, "int64"))
    transposed = Model()
    transposed.weight.data = transposed.weight.data.T
    assert fingerprint(transposed)["again"] == digest(np.ascontiguousarray(weight.T), "float32")


def test_differences_are_listed() -> None:
    digests = fingerprint(Model())
    check_fingerprint(digests, Model(), "These")
    other = {name: value for name, value in digests.items() if name != "count"} | {"again": "0", "lost": "1"}
    with pytest.raises(FingerprintError) as caught:
        check_fingerprint(other, Model(), "These")
    assert str(caught.value).splitlines() == [
        "These belong to another model:",
        "  missing in this model: lost",
        "  only in this model: count",
        "  different values: again",
        "Load the weights that were fitted, or fit again.",
    ]


@pytest.mark.parametrize(("count", "names"), [(6, "n0, n1, n2, n3, n4, n5"), (7, "n0, n1, n2, n3, n4, n5 and 1 more")])
def test_at_most_six_names_are_shown(count: int, names: str) -> None:
    with pytest.raises(FingerprintError) as caught:
        check_fingerprint({f"n{number}": "" for number in range(count)}, nn.ReLU(), "These")
    assert str(caught.value).splitlines()[1:-1] == [f"  missing in this model: {names}"]


def test_digests_are_chained() -> None:
    first, second = torch.arange(3), torch.ones(2, 2)
    chained = digest_tensors([second], digest_tensors([first]))
    assert len({chained, digest_tensors([first, second]), digest_tensors([second]), digest_tensors([first])}) == 4
    assert digest_tensors([first, second]) != digest_tensors([second, first])
    assert digest_tensors([first]) != digest_tensors([first.float()]) != digest_tensors([first.float().view(1, 3)])
