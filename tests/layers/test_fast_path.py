"""Transformers of PyTorch with padding masks: their fast path under ``no_grad`` makes nested tensors."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from cases import Case, encoder_layer, fields, normal, padding, seeded, weight
from comparison import as_type, fitted, oracle_blocks, oracle_influence
from ifcomp import IFComp


class PaddedEncoder(nn.Module):
    """An `nn.TransformerEncoder` with padded tokens and a parameter without a rule; the mean over all tokens."""

    def __init__(self, batch_first: bool = True, masked: bool = True) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 6, batch_first=batch_first, dropout=0.0)
        self.scale, self.head = nn.Parameter(torch.ones(4)), nn.Linear(4, 3)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=batch_first)
        self.batch_first, self.masked = batch_first, masked

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        x = x * self.scale if self.batch_first else (x * self.scale).transpose(0, 1)
        encoded = self.encoder(x, src_key_padding_mask=padding)
        encoded = encoded if self.batch_first else encoded.transpose(0, 1)
        if not self.masked:
            return self.head(encoded.mean(1))
        return self.head(encoded.masked_fill(padding.unsqueeze(-1), 0.0).sum(1) / (~padding).sum(1, keepdim=True))


@contextmanager
def slow_path() -> Iterator[None]:
    """Run transformers as autograd does."""
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def encoder_case(batch_first: bool, masked: bool) -> Case:
    """The case of an encoder."""
    layers = (encoder_layer(f"encoder.layers.{number}.", 4) for number in range(2))
    return Case(
        "encoder",
        seeded(partial(PaddedEncoder, batch_first, masked)),
        fields(x=normal(5, 4), padding=padding(5)),
        3,
        (*(block for blocks in layers for block in blocks), weight("head")),
        ("scale",),
    )


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_padded_encoders_are_exact(batch_first: bool, masked: bool) -> None:
    case = encoder_case(batch_first, masked)
    ifc = fitted(case)
    inputs = as_type(case.sample(5), torch.float64)
    with slow_path():
        expected = oracle_influence(ifc, ifc.model, oracle_blocks(case), inputs, 1e-3)
    assert_close(ifc.influence(inputs), expected, rtol=1e-9, atol=0)
    assert torch.backends.mha.get_fastpath_enabled()


def test_encoders_below_the_selected_layer() -> None:
    case = encoder_case(batch_first=True, masked=True)
    ifc = fitted(case, layers="last")
    inputs = as_type(case.sample(5), torch.float64)
    with slow_path():
        expected = oracle_influence(ifc, ifc.model, [weight("head")], inputs, 1e-3)
    assert_close(ifc.influence(inputs), expected, rtol=1e-9, atol=0)


def test_frozen_attention_in_float32() -> None:
    case = encoder_case(batch_first=True, masked=False)
    model, inputs = case.make(), case.sample(6)
    model.encoder.requires_grad_(False)
    ifc = IFComp(model, fisher="exact").fit([inputs])
    whole = ifc.influence(inputs)
    single = torch.cat([ifc.influence({name: value[i : i + 1] for name, value in inputs.items()}) for i in range(6)])
    assert_close(whole, single, rtol=1e-4, atol=1e-6)
