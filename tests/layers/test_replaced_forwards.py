"""Replaced forwards equal the modules where masks, keywords and ties are unusual."""

import torch
from torch import Tensor, nn
from torch.testing import assert_close

from cases import seeded
from ifcomp import IFComp


class Encoder(nn.Module):
    """A causal transformer on padded tokens. With padding on the left some queries have no visible key."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0)
        self.embedding, self.head = nn.Embedding(5, 4), nn.Linear(4, 3)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        causal = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
        encoded = self.encoder(self.embedding(tokens), mask=causal, src_key_padding_mask=tokens == 0)
        return self.head(encoded[:, -1])


def test_queries_without_a_visible_key() -> None:
    model = seeded(Encoder)().double()
    tokens = torch.randint(1, 5, (4, 5), generator=torch.Generator().manual_seed(0))
    tokens[:, :2] = 0
    logits = model(tokens)
    assert logits.isfinite().all()
    ifc = IFComp(model, fisher="exact", damping=1e-2).fit([tokens])
    recorder = ifc._recorder
    assert recorder is not None
    with recorder.attached():
        assert_close(model(tokens), logits)
    assert ifc.influence(tokens).isfinite().all()


class NamedInput(nn.Module):
    """A norm that is called by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.RMSNorm(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x=x))


def test_inputs_by_keyword() -> None:
    model = seeded(NamedInput)().double()
    x = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ifc = IFComp(model).fit([x])
    assert {row.name: row.treatment for row in ifc.coverage.rows} == {"norm": "diagonal", "head": "EKFAC"}


def test_ties_of_different_rows_in_a_maximum() -> None:
    model = nn.Sequential(nn.EmbeddingBag(4, 2, mode="max"), nn.Linear(2, 3)).double()
    nn.init.zeros_(model[0].weight)
    tokens = torch.tensor([[0, 1], [2, 3], [1, 2]])
    ifc = IFComp(model, fisher="exact", damping=1e-2).fit([tokens])
    recorder = ifc._recorder
    assert recorder is not None
    expected = torch.autograd.grad(model(tokens).sum(), model[0].weight)[0]
    with recorder.attached():
        assert_close(torch.autograd.grad(model(tokens).sum(), model[0].weight)[0], expected)
