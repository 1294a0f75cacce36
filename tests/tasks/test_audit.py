"""The table, headline and explanation of label audits of given distributions."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from ifcomp.errors import IfcompWarning, SettingError
from ifcomp.evidence.members import MODEL, Evidence, Member
from ifcomp.tasks.audit import DESCRIPTIONS, LabelAudit, audit_evidence

COLUMNS = ["index", "label", "suggested", "score", "p_label", "p_suggested", "is_suspect"]


def distributions(predicted: np.ndarray, classes: int, seed: int, confidence: float = 3.0) -> np.ndarray:
    """Random distributions whose mode is the given class in most rows."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(len(predicted), classes)) + confidence * np.eye(classes)[predicted]
    exponentials = np.exp(logits)
    return exponentials / exponentials.sum(1, keepdims=True)


def evidence_of(
    labels: np.ndarray, predicted: np.ndarray, *, model: np.ndarray | None = None, is_left_out: bool = True
) -> Evidence:
    """Two layers that predict ``predicted``; the model predicts ``model``, by default the same."""
    classes = int(max(labels.max(), predicted.max())) + 1
    members = [
        Member(layer, predictor, distributions(predicted, classes, seed))
        for seed, (layer, predictor) in enumerate((name, kind) for name in "ab" for kind in ("votes", "readout"))
    ]
    members.append(Member(MODEL, MODEL, distributions(predicted if model is None else model, classes, 9)))
    generator = np.random.default_rng(5)
    neighbours = {name: generator.integers(0, len(labels), (len(labels), 3)) for name in "ab"}
    return Evidence(labels, members, neighbours, labels, is_left_out)


def noisy(count: int = 200, classes: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Labels of which every tenth is wrong, and the truth."""
    truth = np.random.default_rng(0).integers(0, classes, count)
    return np.where(np.arange(count) % 10 == 0, (truth + 1) % classes, truth), truth


def audit_of(labels: np.ndarray, predicted: np.ndarray, **options: Any) -> LabelAudit:
    return audit_evidence(evidence_of(labels, predicted, **options), {"seed": 0})


def audit_of_distribution(pooled: np.ndarray, labels: np.ndarray) -> LabelAudit:
    """Three equal members, so that the pool is the distribution itself."""
    members = [Member("a", "votes", pooled), Member("a", "readout", pooled), Member(MODEL, MODEL, pooled)]
    neighbours = {"a": np.zeros((len(labels), 1), dtype=int)}
    return audit_evidence(Evidence(labels, members, neighbours, labels, True), {})


# The table ----------------------------------------------------------------------------------------------------------


def test_the_table_has_one_row_per_example_in_the_order_of_the_data() -> None:
    labels, truth = noisy()
    audit = audit_of(labels, truth)
    assert set(COLUMNS) <= set(audit.frame.columns) <= set(DESCRIPTIONS)
    assert list(audit.frame.columns)[: len(COLUMNS)] == COLUMNS
    assert audit.frame["index"].tolist() == list(range(200))
    assert audit.frame["label"].tolist() == labels.tolist()
    assert audit.frame["is_suspect"].dtype == bool
    assert audit.settings == {"seed": 0}


def test_scores_compare_the_suggestion_with_the_given_label() -> None:
    labels, truth = noisy()
    audit = audit_of(labels, truth)
    weights = audit.weights["weight"].to_numpy()
    members = [member.probabilities for member in audit.evidence.members]
    for index, row in enumerate(audit.frame.itertuples()):
        pooled = sum(weight * member[index] for weight, member in zip(weights, members, strict=True)) / weights.sum()
        np.testing.assert_allclose(audit.pred_probs[index], pooled, rtol=1e-9)
        others = {label: value for label, value in enumerate(pooled) if label != labels[index]}
        assert row.suggested == max(others, key=others.__getitem__)
        assert row.p_label == pytest.approx(pooled[labels[index]])
        assert row.p_suggested == pytest.approx(others[row.suggested])
        assert row.score == pytest.approx(np.log(row.p_suggested) - np.log(row.p_label))
    is_contradicted = audit.frame["score"] > 0
    assert (is_contradicted == (audit.pred_probs.argmax(1) != labels)).all()


def test_probabilities_in_scores_are_at_least_one_millionth() -> None:
    tiny = 1e-9
    pooled = np.array([[1 - 2 * tiny, tiny, tiny], [tiny, 1 - 2 * tiny, tiny], [0.2, 0.3, 0.5]] * 4)
    frame = audit_of_distribution(pooled, np.array([0, 0, 2] * 4)).frame
    assert frame["score"][0] == pytest.approx(np.log(1e-6), rel=1e-6)
    assert frame["score"][1] == pytest.approx(-np.log(1e-6), rel=1e-6)
    assert frame["score"][2] == pytest.approx(np.log(0.3 / 0.5))
    assert frame["p_label"][1] == pytest.approx(tiny)  # not clipped
    assert np.isfinite(audit_of_distribution(np.eye(3)[[1, 1, 2] * 4], np.array([0, 1, 2] * 4)).frame["score"]).all()


def test_suspects_are_sorted_by_their_score() -> None:
    labels, truth = noisy()
    audit = audit_of(labels, truth)
    suspects = audit.suspects
    assert len(suspects) > 0
    assert suspects["is_suspect"].all()
    assert len(suspects) == audit.frame["is_suspect"].sum()
    assert (np.diff(suspects["score"]) <= 0).all()
    assert (suspects["score"] > 0).all()
    planted = set(np.flatnonzero(labels != truth))
    assert len(planted & set(suspects["index"])) > 0.9 * len(suspects)
    pd.testing.assert_frame_equal(suspects, audit.frame.loc[suspects.index])


def test_the_ranking_has_all_rows_and_ends_with_those_without_score() -> None:
    labels, truth = noisy()
    labels[17] = 4  # the only one of its class
    audit = audit_of(labels, truth)
    assert sorted(audit.ranked["index"]) == list(range(200))
    assert audit.ranked["index"].iloc[-1] == 17
    assert (np.diff(audit.ranked["score"].iloc[:-1]) <= 0).all()


def test_a_class_with_one_example_is_not_scored() -> None:
    """No other example can support its label. In a reference one example of the class suffices."""
    labels, truth = noisy()
    labels[17] = 4
    frame = audit_of(labels, truth).frame
    assert np.isnan(frame["score"][17])
    assert not frame["is_suspect"][17]
    assert frame["score"].drop(17).notna().all()
    evidence = evidence_of(labels, truth, is_left_out=False)
    assert audit_evidence(evidence, {}).frame["score"].notna().all()
    others = Evidence(evidence.labels, evidence.members, evidence.neighbours, truth, False)
    assert np.flatnonzero(audit_evidence(others, {}).frame["score"].isna()).tolist() == [17]


def test_memorised_is_the_difference_of_accuracies() -> None:
    labels, truth = noisy()
    audit = audit_of(labels, truth, model=labels)
    accuracies = [
        np.mean(found.argmax(1) == labels) for found in (audit.evidence.members[-1].probabilities, audit.pred_probs)
    ]
    assert audit.memorised == pytest.approx(accuracies[0] - accuracies[1])


# Explanation --------------------------------------------------------------------------------------------------------


def test_why_lists_the_evidence_of_every_member() -> None:
    labels, truth = noisy()
    audit = audit_of(labels, truth)
    for index in (0, 10, 199):
        rows = audit.why(index)
        assert list(rows["layer"]) == ["a", "a", "b", "b", MODEL]
        assert list(rows["predictor"]) == ["votes", "readout", "votes", "readout", MODEL]
        assert rows["weight"].tolist() == audit.weights["weight"].tolist()
        suggested = audit.frame["suggested"][index]
        for row, member in zip(rows.itertuples(), audit.evidence.members, strict=True):
            assert row.p_label == member.probabilities[index, labels[index]]
            assert row.p_suggested == member.probabilities[index, suggested]
            near = audit.evidence.neighbours[member.layer][index].tolist() if member.predictor == "votes" else []
            assert row.neighbours == near
            assert row.neighbour_labels == [labels[position] for position in near]


@pytest.mark.parametrize("index", [-1, 200])
def test_why_refuses_positions_outside_the_data(index: int) -> None:
    with pytest.raises(SettingError, match=r"index must be in 0 ... 199"):
        audit_of(*noisy()).why(index)


# Summary and files --------------------------------------------------------------------------------------------------


def test_the_headline_of_a_plain_audit() -> None:
    labels, truth = noisy()
    audit = audit_of(labels, truth)
    expected = f"{len(audit.suspects)} of 200 labels are suspects; the estimated noise rate is {audit.noise_rate:.1%}."
    assert audit.headline == expected


def test_the_headline_of_a_memorised_audit_names_the_layers_that_carry_it() -> None:
    labels, truth = noisy()
    audit = audit_of(labels, truth, model=labels)
    assert audit.memorised > 0.05
    points = round(100 * audit.memorised)
    assert audit.headline.startswith(
        f"The model has memorised labels: its accuracy on them is {points} points above that of its layers. The audit "
        "relies on 2 of 2 layers (a, b). "
    )


def test_an_accurate_model_on_clean_labels_may_have_memorised_them() -> None:
    """Uncertain layers contradict some labels. The model predicts all of them."""
    truth = noisy()[1]
    evidence = evidence_of(truth, truth)
    uncertain = [replace(member, probabilities=distributions(truth, 4, 0, 2.0)) for member in evidence.members]
    model = Member(MODEL, MODEL, np.eye(4)[truth])
    audit = audit_evidence(replace(evidence, members=[*uncertain[:-1], model]), {})
    assert audit.memorised > 0.05
    assert audit.headline.startswith("The model may have memorised labels: ")


def test_the_headline_of_a_model_that_is_less_accurate_than_its_layers() -> None:
    """The order of the classes, for instance, differs between model and data."""
    labels, truth = noisy()
    audit = audit_of(labels, truth, model=(truth + 1) % (truth.max() + 1))
    points = round(-100 * audit.memorised)
    assert points > 50
    assert audit.headline.startswith(
        f"The accuracy of the model on these labels is {points} points below that of its layers: check the "
    )


def test_the_headline_without_suspects_mentions_memorised_labels() -> None:
    _, truth = noisy()
    audit = audit_of(truth, truth, model=truth)
    assert audit.suspects.empty
    assert audit.headline.startswith("0 of 200 labels are suspects")
    assert "does not find wrong labels that every layer has memorised" in audit.headline


def test_the_headline_of_contradicted_labels_advises_to_check_the_order_of_the_classes() -> None:
    labels, truth = noisy()
    audit = audit_of((labels + 1) % 4, truth)
    share = np.mean(audit.frame["score"] > 0)
    assert share > 0.5
    assert audit.headline.startswith(f"The layers contradict {share:.0%} of the labels: check the preprocessing")
    assert "order of the classes" in audit.headline


def test_a_model_that_predicts_the_labels_matches_the_data() -> None:
    """It has memorised labels that its layers cannot predict: hard or wrong ones, but not of another model."""
    labels, truth = noisy()
    given = (labels + 1) % 4
    audit = audit_of(given, truth, model=given)
    assert np.mean(audit.frame["score"] > 0) > 0.5
    assert audit.mismatch is None
    assert "check the preprocessing" not in audit.headline
    assert audit_of(given, truth).mismatch is not None


def test_the_repr_counts_suspects() -> None:
    audit = audit_of(*noisy())
    assert repr(audit) == (
        f"LabelAudit({len(audit.suspects)} suspects among 200 labels, noise rate {audit.noise_rate:.1%}, memorised "
        f"{max(0, audit.memorised):.1%})"
    )


def test_the_table_is_written_as_csv(tmp_path: Path) -> None:
    labels, truth = noisy()
    labels[17] = 4
    audit = audit_of(labels, truth)
    audit.to_csv(tmp_path / "audit.csv")
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "audit.csv"), audit.frame)
    assert [path.name for path in tmp_path.iterdir()] == ["audit.csv"]


def test_the_plot_shows_weight_and_echo_of_every_layer() -> None:
    audit = audit_of(*noisy())
    figure = audit.plot()
    assert isinstance(figure, Figure)
    for axes, column in zip(figure.axes, ("weight", "echo"), strict=True):
        assert sorted(bar.get_width() for bar in axes.patches) == pytest.approx(sorted(audit.weights[column]))
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["a", "b", MODEL]


def test_few_carrying_members_are_a_warning() -> None:
    """Two members contradict a tenth of the labels, one contradicts all labels, and the model predicts all labels."""
    labels, truth = noisy(400)
    members = [Member("a", kind, distributions(truth, 4, seed)) for seed, kind in enumerate(("votes", "readout"))]
    contrary = distributions((truth + 2) % 4, 4, 7, confidence=9.0)
    members += [Member("b", "votes", contrary), Member(MODEL, MODEL, np.eye(4)[labels])]
    evidence = Evidence(labels, members, {}, labels, True)
    with pytest.warns(IfcompWarning, match=r"The audit relies on only 2 of 4 predictors: a \(votes\), a \(readout\)\."):
        audit_evidence(evidence, {})


def test_the_headline_names_an_input_without_information() -> None:
    """The raw input predicts the class frequencies at best."""
    labels, truth = noisy()
    evidence = evidence_of(labels, truth)
    frequencies = np.bincount(labels, minlength=4) / len(labels)
    blind = 0.9 * np.tile(frequencies, (len(labels), 1)) + 0.1 * np.roll(np.eye(4)[labels], 1, 1)
    for array, is_named in ((blind, True), (distributions(truth, 4, 0), False)):
        untrained = [Member("input", kind, array, is_trained=False) for kind in ("votes", "readout")]
        audit = audit_evidence(replace(evidence, members=[*untrained, *evidence.members]), {})
        assert ("The input alone predicts the labels no better" in audit.headline) == is_named


def of_reference(balanced: np.ndarray, labels: np.ndarray, reference: np.ndarray) -> LabelAudit:
    """The audit of distributions for balanced classes, as predictors on this reference return them."""
    frequencies = np.bincount(reference) / len(reference)
    members = []
    for seed, name in enumerate(("input", "a", MODEL)):
        distribution = balanced[seed] * frequencies
        members.append(Member(name, "votes", distribution / distribution.sum(1, keepdims=True), name != "input"))
    neighbours = {name: np.zeros((len(labels), 1), dtype=int) for name in ("input", "a")}
    return audit_evidence(Evidence(labels, members, neighbours, reference, False), {})


def test_weights_hardly_depend_on_the_class_frequencies_of_the_reference() -> None:
    """The predictors change with the frequencies of the reference, but not what they know."""
    labels, truth = noisy()
    balanced = [distributions(truth, 4, seed, confidence) for seed, confidence in enumerate((0.5, 2.0, 3.0))]
    one, other = (of_reference(balanced, labels, np.repeat(np.arange(4), sizes)) for sizes in (50, [170, 10, 10, 10]))
    np.testing.assert_allclose(one.weights["weight"], other.weights["weight"], atol=0.1)


def test_an_informative_input_with_a_balanced_reference_is_recognised_on_data_of_one_frequent_class() -> None:
    """Its likelihood is below that of the frequencies of the data, which it does not know."""
    labels = np.repeat(np.arange(4), [194, 2, 2, 2])
    balanced = [distributions(labels, 4, seed, 1.0) for seed in range(3)]
    audit = of_reference(balanced, labels, np.arange(80) % 4)
    assert np.log(audit.evidence.members[0].probabilities[np.arange(200), labels]).mean() < -0.5
    assert "The input alone predicts the labels no better" not in audit.headline
