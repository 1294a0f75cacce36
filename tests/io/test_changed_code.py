"""Changed code of a model is noticed, whatever kind of inputs it takes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from resumable_jobs import NUM_BATCHES, Kill, Killed
from torch import Tensor, nn

from ifcomp import Checkpoint, IFComp
from ifcomp.data.batches import as_batch
from ifcomp.errors import FingerprintError, ModelError
from ifcomp.layers.probe import check_probe, take_probe

X, Y = torch.randn(12, 6, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3
DATA = [(X[:5], Y[:5]), (X[5:], Y[5:])]


class Network(nn.Module):
    """A classifier whose code can change while its weights stay."""

    def __init__(self, activation: Any = torch.relu) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden, self.head = nn.Linear(6, 5), nn.Linear(5, 3)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.activation(self.hidden(x)))


def network(activation: Any = torch.relu) -> Network:
    return Network(activation).eval()


def test_changed_code_is_noticed_when_a_fit_is_loaded(tmp_path: Path) -> None:
    IFComp(network()).fit(DATA).save(tmp_path / "run")
    IFComp.load(tmp_path / "run", network())
    for changed in (torch.tanh, lambda x: 1.001 * torch.relu(x), nn.LeakyReLU(0.01)):
        with pytest.raises(FingerprintError, match=r"The factors in .* belong to a model with other code.*fit again"):
            IFComp.load(tmp_path / "run", network(changed))


@pytest.mark.filterwarnings("ignore::ifcomp.errors.IfcompWarning")  # few examples
@pytest.mark.parametrize("verb", ["audit", "score", "prune", "calibrate", "ood_detector", "table", "explain"])
def test_changed_code_is_noticed_by_every_verb_that_reads_data(verb: str) -> None:
    model = network()
    ifc = IFComp(model).fit(DATA)
    many = [(x, y) for x, y in DATA for _ in range(60 // len(x) + 1)]
    gate = ifc.ood_detector(many)
    calls = {"table": lambda: gate.table(DATA), "explain": lambda: ifc.explain(*DATA[0], DATA)}
    model.activation = torch.tanh
    with pytest.raises(FingerprintError, match="The fitted factors belong to a model with other code"):
        calls.get(verb, lambda: getattr(ifc, verb)(many))()


@pytest.mark.parametrize("change", [lambda model: model[0].hidden.weight.add_(1e-4), lambda model: model.train()(X)])
def test_weights_that_change_during_a_fit_are_noticed(change: Any) -> None:
    """Also statistics of normalisation, if the code of the data runs the model in train mode."""
    model = nn.Sequential(network(), nn.BatchNorm1d(3)).eval()

    class Data:
        def __iter__(self) -> Any:
            yield DATA[0]
            with torch.no_grad():
                change(model)
            yield DATA[1]

    with pytest.raises(ModelError, match="The weights changed during the fit: "):
        IFComp(model).fit(Data())


def test_changed_code_is_noticed_by_a_resumed_fit(kill: Kill, tmp_path: Path) -> None:
    def fit(model: Network) -> None:
        with Checkpoint(tmp_path / "partial", 0) as checkpoint:
            IFComp(model).fit(DATA, checkpoint=checkpoint)

    kill(NUM_BATCHES)
    with pytest.raises(Killed):
        fit(network())
    kill(0)
    with pytest.raises(FingerprintError, match=r"The sums in .*partial' belong to a model with other code"):
        fit(network(torch.tanh))
    fit(network())


def test_changed_code_is_noticed_by_resumed_scores(kill: Kill, tmp_path: Path) -> None:
    ifc = IFComp(network()).fit(DATA)

    def score() -> None:
        with Checkpoint(tmp_path / "partial", 0) as checkpoint:
            ifc.score(DATA, checkpoint=checkpoint)

    kill(1)
    with pytest.raises(Killed):
        score()
    kill(0)
    ifc.model.activation = torch.tanh
    ifc._probe = None  # as after a fit that was imported
    with pytest.raises(FingerprintError, match="The rows in"):
        score()


class Mixed(nn.Module):
    """Tokens with a mask, numbers, and a table without a batch axis."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(9, 4), nn.Linear(6, 3)
        self.scale = 1.0

    def forward(self, tokens: Tensor, mask: Tensor, numbers: tuple[Tensor, Tensor], shift: Any = None) -> Tensor:
        pooled = (self.table(tokens) * mask.unsqueeze(2)).sum(1) / mask.sum(1, keepdim=True)
        return self.scale * self.head(torch.cat([pooled, *numbers], 1))


def test_inputs_of_every_kind() -> None:
    """Token numbers stay within their range, and the structure of the inputs is kept."""
    batch = as_batch(
        {
            "tokens": torch.tensor([[3, 8, 0], [1, 2, 2]]),
            "mask": torch.tensor([[True, True, True], [True, False, True]]),
            "numbers": (torch.ones(2, 1), torch.tensor([[0.5], [2.0]])),
            "shift": None,
        }
    )
    model = Mixed().eval()
    probe = take_probe(model, batch)
    check_probe(model, probe, "They")
    assert probe is not None
    for scale, device in ((1.00001, "cpu"), (1.001, "cuda")):  # within the rounding of float32
        model.scale = scale
        check_probe(model, {**probe, "device": device}, "They")
        model.scale = 10 * (scale - 1) + 1
        with pytest.raises(FingerprintError):
            check_probe(model, {**probe, "device": device}, "They")


def test_models_that_cannot_run_on_artificial_inputs_are_not_checked() -> None:
    class Picky(Network):
        def forward(self, x: Tensor) -> Tensor:
            assert bool((x == x.round()).all()), "whole numbers only"
            return super().forward(x)

    model = Picky().eval()
    assert take_probe(model, as_batch(X.round())) is None
    check_probe(model, None, "They")


def test_the_probe_has_no_values_of_the_data() -> None:
    probe = take_probe(network(), as_batch(X))
    assert probe is not None
    form = probe["inputs"]["list"][0]["tuple"][0]
    assert form == {"dtype": "float32", "shape": [4, 6], "low": float(X[:4].min()), "high": float(X[:4].max())}
    assert torch.tensor(probe["logits"]).shape == (4, 3)
