"""`IFComp.from_factors`: factors made elsewhere give the same scores, and those of another model are refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cases import LAYER_CASES, MODEL_CASES
from ifcomp import IFComp, Relative
from ifcomp.errors import FingerprintError

CASES = {case.name: case for case in [*LAYER_CASES, *MODEL_CASES]}

WHOLE = [
    ("linear", {}),
    ("lenet", {"sua": True}),
    ("vision_transformer", {"damping": 1e-3}),
    ("embedding_positions_flat", {"damping": Relative(0.5)}),
    ("attention_cross", {}),
]


def fitted(name: str, **options: Any) -> IFComp:
    case = CASES[name]
    return IFComp(case.make(), fisher="exact", beta=0.7, **options).fit([case.sample(7, seed=1)])


@pytest.mark.parametrize(("name", "options"), WHOLE, ids=[name for name, _ in WHOLE])
def test_the_same_factors_give_the_same_scores(name: str, options: dict[str, Any]) -> None:
    ifc, inputs = fitted(name, **options), CASES[name].sample(5)
    again = IFComp.from_factors(CASES[name].make(), ifc.factors, **options)
    assert again.settings == ifc.settings
    assert torch.equal(again.influence(inputs), ifc.influence(inputs))
    assert str(again.coverage) == str(ifc.coverage)


@pytest.mark.parametrize(
    ("name", "layers"),
    [("lenet", "last"), ("vision_transformer", ["mlp.*", "norm1"]), ("embedding_positions_flat", ["position"])],
    ids=str,
)
def test_factors_of_some_layers_score_with_these(name: str, layers: str | list[str], tmp_path: Path) -> None:
    ifc, inputs = fitted(name, layers=layers), CASES[name].sample(5)
    with pytest.raises(FingerprintError, match="parameters without factors"):
        IFComp.from_factors(CASES[name].make(), ifc.factors)
    again = IFComp.from_factors(CASES[name].make(), ifc.factors, partial=True)
    assert torch.equal(again.influence(inputs), ifc.influence(inputs))
    again.save(tmp_path / "run.ifcomp")
    loaded = IFComp.load(tmp_path / "run.ifcomp", CASES[name].make())
    assert torch.equal(loaded.influence(inputs), ifc.influence(inputs))


@pytest.mark.parametrize("partial", [False, True])
def test_factors_of_other_layers_are_refused(partial: bool) -> None:
    ifc = fitted("linear")
    factors = replace(ifc.factors, blocks={"there": next(iter(ifc.factors.blocks.values()))})
    with pytest.raises(FingerprintError, match="factors without a layer: there"):
        IFComp.from_factors(ifc.model, factors, partial=partial)


@pytest.mark.parametrize("partial", [False, True])
def test_factors_of_another_shape_are_refused(partial: bool) -> None:
    ifc = fitted("lenet", sua=True)
    with pytest.raises(FingerprintError, match=r"factors of another shape: 0, 4\n.*sua="):
        IFComp.from_factors(ifc.model, ifc.factors, partial=partial, sua=False)


@pytest.mark.parametrize("name", ["vision_transformer", "embedding_positions_flat"])
def test_a_model_that_was_moved_is_scored_as_before(name: str) -> None:
    """Parameters get new memory, as on another device; a first batch of one example must do."""
    ifc, inputs = fitted(name), CASES[name].sample(5).split(1)
    before, coverage = torch.cat([ifc.influence(example) for example in inputs]), str(ifc.coverage)
    ifc.model.double().float()
    assert torch.equal(torch.cat([ifc.influence(example) for example in inputs]), before)
    assert str(ifc.coverage) == coverage
