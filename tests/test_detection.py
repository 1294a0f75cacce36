"""`ood_detector`: members against oracles, thresholds, settings that must not be combined, storage, and digits."""

import copy
import json
import math
import pickle
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from scipy.stats import spearmanr
from torch import Tensor, nn

from ifcomp import IFComp
from ifcomp.curvature.reference import MAX_ELEMENTS, MAX_REFERENCE, reference_size
from ifcomp.detection import MIN_HELD_OUT
from ifcomp.errors import (
    DataError,
    EmptyDataError,
    FingerprintError,
    IfcompWarning,
    ModelError,
    NotFittedError,
    SettingError,
    StorageError,
)
from ifcomp.evidence.neighbours import nearest_units
from ifcomp.io.tensor_files import write_tensors
from ifcomp.tasks.ood import OOD_DAMPING
from tasks.digits import images_and_labels, train_network
from tasks.surprisal import slow_surprisal

MEMBERS = ("complexity", "energy", "neighbours")


def network(dtype: torch.dtype = torch.float64, classes: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, classes)).to(dtype)


def inputs(count: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(count, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@cache
def fitted() -> IFComp:
    return IFComp(network()).fit([inputs(400, 1)], progress=False)


def held_out(count: int = 250) -> list[Tensor]:
    return list(inputs(count, 2).split(64))


def oracle_distance(features: np.ndarray, reference: np.ndarray, rank: int) -> list[float]:
    """The distance to every reference example, sorted."""
    found = []
    for row in features:
        unit = row / math.sqrt(sum(value**2 for value in row))
        distances = [math.dist(unit, other / np.linalg.norm(other)) for other in reference]
        found.append(sorted(distances)[rank - 1])
    return found


def test_members_equal_their_definitions() -> None:
    ifc = fitted()
    parts = ifc.ood_detector(held_out()).parts(inputs(30, 3))
    assert tuple(parts) == MEMBERS
    logits = ifc.model(inputs(30, 3)).detach().numpy()
    np.testing.assert_allclose(parts["energy"], [-math.log(sum(map(math.exp, row))) for row in logits], rtol=1e-12)
    torch.testing.assert_close(parts["complexity"], ifc.bounded_complexity(inputs(30, 3), damping=OOD_DAMPING))
    body = ifc.model[:4]
    features, reference = (body(x).detach().numpy() for x in (inputs(30, 3), inputs(400, 1)))
    np.testing.assert_allclose(parts["neighbours"], oracle_distance(features, reference, 50), rtol=1e-9)


def test_the_score_is_the_log_of_the_weighted_mean_of_inverse_p_values() -> None:
    gate, ifc = fitted().ood_detector(held_out()), fitted()
    own, new = (
        {name: values.tolist() for name, values in gate.parts(x).items()}
        for x in (torch.cat(held_out()), inputs(20, 3))
    )
    softmax = ifc.model(torch.cat(held_out())).softmax(1).amax(1).detach().numpy()
    rho = spearmanr(own["complexity"], -softmax).statistic
    weights = {"complexity": 1 - rho**2, "energy": 1.0, "neighbours": 1.0}
    expected = []
    for row in range(20):
        total = sum(weights[name] * math.exp(slow_surprisal(new[name][row], own[name])) for name in MEMBERS)
        expected.append(math.log(total / (3 - rho**2)))
    np.testing.assert_allclose(gate.score(inputs(20, 3)), expected, rtol=1e-9)
    assert gate.predict(inputs(20, 3)).tolist() == [value > gate.threshold for value in expected]
    assert gate.score(inputs(20, 3)).dtype == torch.float64


@pytest.mark.parametrize("tpr", [0.5, 0.95, 1.0])
def test_the_threshold_accepts_the_share_of_held_out_inputs(tpr: float) -> None:
    gate = fitted().ood_detector(held_out(200), tpr)
    accepted = float((~gate.predict(torch.cat(held_out(200)))).double().mean())
    assert tpr <= accepted < tpr + 0.02
    assert gate.settings["held_out_examples"] == 200


@pytest.mark.parametrize("score", MEMBERS)
def test_a_single_member_is_used_in_its_own_unit(score: str) -> None:
    ifc = fitted()
    gate = ifc.ood_detector(held_out(), score=score)
    assert gate.members == (score,)
    torch.testing.assert_close(gate.score(inputs(9, 4)), ifc.ood_detector(held_out()).parts(inputs(9, 4))[score])
    assert repr(gate).startswith(f"OODDetector({score}, threshold ")


@pytest.mark.parametrize("score", MEMBERS)
def test_an_input_at_the_threshold_is_accepted(score: str) -> None:
    x = inputs(200, 4)
    gate = fitted().ood_detector([x], score=score)
    assert float(gate.score(x).sort().values[189]) == gate.threshold
    assert int(gate.predict(x).sum()) == 10


def test_distances_by_hand() -> None:
    reference = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    queries = torch.tensor([[1.0, 0.0], [0.6, 0.8]])
    distances = nearest_units(queries, reference, 3).distances
    assert distances[:, 0].tolist() == pytest.approx([0, math.sqrt(0.4)], abs=1e-6)
    assert distances[:, 2].tolist() == pytest.approx([2, math.sqrt(3.2)])


# The reference set ---------------------------------------------------------------------------------------------------


def test_the_reference_set_is_normalised_and_does_not_depend_on_batches() -> None:
    one, many = (IFComp(network()).fit(list(inputs(90, 1).split(size)), progress=False) for size in (90, 7))
    features = one.model[:4](inputs(90, 1)).detach()
    expected = features / features.norm(dim=1, keepdim=True)
    for ifc in (one, many):
        assert ifc.factors is not None
        torch.testing.assert_close(ifc.factors.reference, expected)


def test_large_data_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reference_size(100, 84) == 100
    assert reference_size(60_000, 84) == MAX_REFERENCE == 20_000
    assert reference_size(60_000, 4096) == MAX_ELEMENTS // 4096 == 4096
    assert reference_size(5, 10**9) == 1
    monkeypatch.setattr("ifcomp.curvature.reference.MAX_REFERENCE", 40)
    samples = [IFComp(network(), seed=seed).fit([inputs(90, 1)], progress=False).factors for seed in (0, 0, 1)]
    references = [factors.reference for factors in samples if factors is not None and factors.reference is not None]
    assert [len(reference) for reference in references] == [40, 40, 40]
    assert torch.equal(references[0], references[1])
    assert not torch.equal(references[0], references[2])
    features = network()[:4](inputs(90, 1)).detach()
    unit = features / features.norm(dim=1, keepdim=True)
    places = [int((unit - row).norm(dim=1).argmin()) for row in references[0]]
    assert places == sorted(set(places))
    assert max((unit[place] - row).norm() for place, row in zip(places, references[0], strict=True)) < 1e-12


def test_the_rank_of_the_neighbour_is_half_the_size_of_a_class_in_small_data() -> None:
    ifc = IFComp(network()).fit([inputs(90, 1)], progress=False)
    assert ifc.ood_detector(held_out()).settings["neighbours"] == 15
    assert fitted().ood_detector(held_out()).settings["neighbours"] == 50
    assert fitted().ood_detector(held_out()).settings["reference_examples"] == 400


# Settings that must not be combined ----------------------------------------------------------------------------------


def test_a_detector_of_another_fit_is_refused() -> None:
    ifc = IFComp(network()).fit([inputs(100, 1)], progress=False)
    gate = ifc.ood_detector(held_out())
    assert ifc.detector is not None
    assert ifc.detector.threshold == gate.threshold
    ifc.fit([inputs(110, 1)], progress=False)
    assert ifc.detector is None
    for call in (gate.score, gate.predict, gate.parts, lambda x: gate.table([x])):
        with pytest.raises(
            SettingError, match=r"belongs to another model or fit: fit .* training_examples 100, not 110"
        ):
            call(inputs(3))


def test_a_changed_model_is_refused() -> None:
    model = network()
    gate = IFComp(model).fit([inputs(100, 1)], progress=False).ood_detector(held_out())
    with torch.no_grad():
        model[0].weight.mul_(1.5)
    with pytest.raises(FingerprintError, match=r"0\.weight"):
        gate.score(inputs(3))


def test_damping_of_the_predictor_does_not_matter() -> None:
    scores = []
    for damping in (0.3, 1e-6):
        ifc = IFComp(network(), damping=damping).fit([inputs(100, 1)], progress=False)
        gate = ifc.ood_detector(held_out())
        ifc.predict_proba(inputs(2))  # another damping in between
        scores.append(gate.score(inputs(9)))
        assert gate.settings["damping"] == repr(OOD_DAMPING)
    assert torch.equal(*scores)


def test_unusable_calls_are_refused() -> None:
    with pytest.raises(NotFittedError, match="fit"):
        IFComp(network()).ood_detector(held_out())
    ifc = fitted()
    with pytest.raises(SettingError, match="tpr"):
        ifc.ood_detector(held_out(), tpr=0)
    with pytest.raises(SettingError, match="score must be"):
        ifc.ood_detector(held_out(), score="softmax")
    with pytest.raises(EmptyDataError):
        ifc.ood_detector([])
    with pytest.raises(DataError, match=f"at least {MIN_HELD_OUT} held-out examples, but got 19"):
        ifc.ood_detector([inputs(19)])
    with pytest.warns(IfcompWarning, match="20 held-out examples are few"):
        ifc.ood_detector([inputs(20)])


def test_factors_of_another_source_have_no_neighbours() -> None:
    factors = fitted().factors
    assert factors is not None
    made = IFComp.from_factors(network(), copy.copy(factors))
    made.ood_detector(held_out())
    bare = IFComp.from_factors(network(), type(factors)(factors.blocks, factors.count, 3, factors.settings))
    with pytest.raises(NotFittedError, match="no reference set"):
        bare.ood_detector(held_out())
    assert bare.ood_detector(held_out(), score=("complexity", "energy")).members == ("complexity", "energy")


class Scaled(nn.Module):
    """Logits are not the output of a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = 3 * self.inner(x)
        return logits


def test_a_model_without_penultimate_features_uses_the_other_members() -> None:
    ifc = IFComp(Scaled()).fit([inputs(100, 1)], progress=False)
    assert ifc.factors is not None
    assert ifc.factors.reference is None
    with pytest.warns(IfcompWarning, match="leaves out neighbours: the logits of the model are not the output of"):
        gate = ifc.ood_detector(held_out())
    assert gate.members == ("complexity", "energy")
    assert "without neighbours: the logits of the model" in repr(gate)
    with pytest.raises(ModelError, match="score= names neighbours"):
        ifc.ood_detector(held_out(), score="neighbours")


def test_many_classes_use_sampled_bounded_complexity() -> None:
    ifc = IFComp(network(classes=33)).fit([inputs(100, 1)], progress=False)
    gate = ifc.ood_detector(held_out())
    assert gate.members == MEMBERS
    x = inputs(9, 5)
    expected = ifc.bounded_complexity(x, damping=OOD_DAMPING)
    torch.testing.assert_close(gate.parts(x)["complexity"], expected)
    assert not torch.allclose(expected, ifc.bounded_complexity(x, exact=True, damping=OOD_DAMPING))


# Storage -------------------------------------------------------------------------------------------------------------


def test_one_file_contains_the_detector(tmp_path: Path) -> None:
    ifc = IFComp(network()).fit([inputs(100, 1)], progress=False)
    gate = ifc.ood_detector(held_out(), 0.9)
    ifc.save(tmp_path / "run")
    loaded = IFComp.load(tmp_path / "run", network()).detector
    assert loaded is not None
    assert (loaded.threshold, loaded.members, loaded.settings) == (gate.threshold, gate.members, gate.settings)
    torch.testing.assert_close(loaded.score(inputs(9, 5)), gate.score(inputs(9, 5)))
    assert loaded.predict(inputs(1, 5)).shape == (1,)
    IFComp(network()).fit([inputs(100, 1)], progress=False).save(tmp_path / "plain")
    assert IFComp.load(tmp_path / "plain", network()).detector is None


def test_pickles_and_copies_keep_the_detector() -> None:
    ifc = IFComp(network()).fit([inputs(100, 1)], progress=False)
    expected = ifc.ood_detector(held_out()).score(inputs(4))
    for made in (copy.deepcopy(ifc), pickle.loads(pickle.dumps(ifc))):  # noqa: S301
        torch.testing.assert_close(made.detector.score(inputs(4)), expected)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    ifc = IFComp(network()).fit([inputs(100, 1)], progress=False)
    ifc.ood_detector(held_out())
    ifc.save(tmp_path / "run")

    def rewrite(change: dict[str, Any], reference: Tensor | None = None) -> None:
        with safe_open(tmp_path / "run", "pt") as file:
            metadata = json.loads(file.metadata()["ifcomp"])
        metadata["results"]["detector"] |= change
        tensors = load_file(tmp_path / "run")
        tensors["reference"] = tensors["reference"] if reference is None else reference
        write_tensors(tmp_path / "damaged", tensors, "ifcomp", metadata)

    for change in ({"tpr": 7}, {"held_out": {"energy": [None]}}, {"settings": {"fit": "other"}}):
        rewrite(change)
        with pytest.raises(StorageError, match=r"Cannot read the detector in .*: it is damaged"):
            IFComp.load(tmp_path / "damaged", network())
    for wrong in (torch.full((4, 6), 3.0), torch.full((4, 6), math.nan), torch.ones(6), torch.ones(4, 6).int()):
        rewrite({}, wrong)
        with pytest.raises(StorageError, match="reference set"):
            IFComp.load(tmp_path / "damaged", network())
    rewrite({}, torch.eye(6)[:, :4].contiguous()[:2])
    with pytest.raises(NotFittedError, match="reference set"):
        IFComp.load(tmp_path / "damaged", network()).ood_detector(held_out())


# Tables --------------------------------------------------------------------------------------------------------------


def test_tables_of_data_with_unknown_labels() -> None:
    gate = fitted().ood_detector(held_out())
    table = gate.table([(inputs(10, 3), torch.full((10,), 99)), (inputs(5, 4), torch.full((5,), -1))])
    assert table.frame["index"].tolist() == list(range(15))
    columns = ["index", "prediction", "confidence", "score", *MEMBERS, "is_ood"]
    assert list(table.frame.columns) == columns
    np.testing.assert_allclose(table.frame["score"], gate.score(torch.cat([inputs(10, 3), inputs(5, 4)])))
    probability = fitted().model(inputs(10, 3)).softmax(1).detach().max(1)
    np.testing.assert_allclose(table.frame["confidence"][:10], probability.values)
    assert table.frame["prediction"][:10].tolist() == probability.indices.tolist()
    assert table.settings["fit"] == gate.settings["fit"]
    assert table.threshold == gate.threshold
    assert "<td>damping</td>" in gate._repr_html_()
    assert len(gate.plot().axes[0].patches) == 1


def test_tables_list_the_nearest_training_examples() -> None:
    gate = fitted().ood_detector(held_out())
    table = gate.table([inputs(9, 3), inputs(400, 1)[17:18]])
    body = fitted().model[:4]
    features, reference = (body(x).detach().numpy() for x in (inputs(9, 3), inputs(400, 1)))
    for row, found in zip(features, table.nearest, strict=False):
        cosines = [row @ other / np.linalg.norm(other) for other in reference]
        assert found.tolist() == sorted(range(400), key=lambda at: -cosines[at])[:4]
    assert table.nearest[9][0] == 17  # a training example is its own neighbour
    assert fitted().ood_detector(held_out(), score="energy").table([inputs(9, 3)]).nearest is None


def test_nearest_examples_of_a_sampled_reference_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ifcomp.curvature.reference.MAX_REFERENCE", 100)
    ifc = IFComp(network()).fit([inputs(400, 1)], progress=False)
    assert len(ifc.factors.reference) == 100
    nearest = ifc.ood_detector(held_out()).table([inputs(400, 1)]).nearest
    kept = [index for index in range(400) if nearest[index][0] == index]
    assert len(kept) == 100
    assert set(nearest.flatten()) <= set(kept)


def test_digits_and_inverted_digits() -> None:
    """Energy mistakes inverted digits for typical ones; the joined score does not."""
    images, labels = images_and_labels()
    ifc = IFComp(train_network(images[:800], labels[:800])).fit([images[:800]], progress=False)
    gate = ifc.ood_detector([images[800:1300]])
    table = gate.table([images[1300:]], ood=[1 - images[1300:]])
    assert table.frame["is_ood"].mean() < 0.12
    assert table.ood_scores is not None
    assert (table.ood_scores > gate.threshold).mean() > 0.9
    assert table.comparison is not None
    aurocs = table.comparison.set_index("score")["auroc"]
    assert aurocs["joined"] > 0.97
    assert list(aurocs.index) == ["joined", *MEMBERS, "max softmax"]
    assert gate.table([images[1300:]]).comparison is None
