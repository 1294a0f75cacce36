"""Checks, text, geometry, JSON and thumbnails of a report."""

import base64
import io
import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from report_cases import AuditCase, CurveCase, make_audit, make_curve

from ifcomp.errors import DataError, LabelError, SettingError
from ifcomp.report import (
    LayerNeighbours,
    Neighbour,
    OODExample,
    OODScores,
    Preview,
    ReliabilityPair,
    TrainingExample,
    collect,
    render,
)
from ifcomp.report.charts import histogram, reliability, round_ticks
from ifcomp.report.images import thumbnail
from ifcomp.report.payload import table_payload
from ifcomp.report.summary import MAX_MATRIX, Answer, answers, confusions, hints, interval, matrix

# Checks ------------------------------------------------------------------------------------------------------------


def test_nothing_to_report_is_refused() -> None:
    with pytest.raises(SettingError, match="nothing to report"):
        collect(title="empty", class_names=["a"])


def test_missing_columns_are_listed() -> None:
    audit = make_audit()
    broken = replace(audit, frame=audit.frame.drop(columns=["score", "suggested"]))
    with pytest.raises(DataError, match="lacks the columns suggested, score"):
        collect(title="t", audit=broken)


def test_audit_without_rows_is_refused() -> None:
    audit = make_audit()
    with pytest.raises(DataError, match="no rows"):
        collect(title="t", audit=replace(audit, frame=audit.frame.head(0)))


def test_labels_must_be_integers() -> None:
    audit = make_audit()
    with pytest.raises(DataError, match=r"columns label of audit\.frame must be integers"):
        collect(title="t", audit=replace(audit, frame=audit.frame.assign(label=0.5)))


@pytest.mark.parametrize("column", ["label", "suggested"])
def test_labels_outside_the_class_names_are_refused(column: str) -> None:
    audit = make_audit(classes=3)
    frame = audit.frame.assign(**{column: 2})
    collect(title="t", audit=replace(audit, frame=frame), class_names=["a", "b", "c"])
    with pytest.raises(LabelError, match="2 class names, but label 2"):
        collect(title="t", audit=replace(audit, frame=frame), class_names=["a", "b"])
    with pytest.raises(LabelError, match="at least 0, but one is -1"):
        collect(title="t", audit=replace(audit, frame=audit.frame.assign(**{column: -1})))


def test_labels_of_explanations_and_neighbours_are_checked() -> None:
    with pytest.raises(LabelError, match="label 9"):
        collect(title="t", audit=make_audit(), class_names=list("abcd"), explanations={3: [(1, 0.5, 9)]})
    near = {3: [LayerNeighbours("conv", 1.0, (Neighbour(1, 8),))]}
    with pytest.raises(LabelError, match="label 8"):
        collect(title="t", audit=make_audit(), class_names=list("abcd"), neighbours=near)


def test_explanations_may_be_tuples() -> None:
    data = collect(title="t", audit=make_audit(), explanations={3: [(1, 0.5, 2), TrainingExample(4, -1.0, 0)]})
    assert data.explanations[3] == (TrainingExample(1, 0.5, 2, None), TrainingExample(4, -1.0, 0, None))
    with pytest.raises(DataError, match="example 3 has 2 entries"):
        collect(title="t", audit=make_audit(), explanations={3: [(1, 0.5)]})


def test_previews_must_be_of_a_known_kind_and_content() -> None:
    with pytest.raises(SettingError, match="'sound'"):
        Preview("sound", b"")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="must be a string, but is int"):
        Preview("text", 3)
    with pytest.raises(DataError, match="must be a mapping, but is list"):
        Preview("row", [1])


def test_curves_must_have_matching_shapes() -> None:
    curve = make_curve(0.1)
    with pytest.raises(DataError, match="'after'"):
        collect(title="t", calibration=ReliabilityPair(curve, replace(curve, count=[1, 2])))
    with pytest.raises(DataError, match="no examples"):
        collect(title="t", calibration=ReliabilityPair(replace(curve, count=[0, 0, 0, 0]), curve))


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [1.0, math.inf], [[1.0]]])
def test_ood_scores_must_be_finite_vectors(values: list[float]) -> None:
    with pytest.raises(DataError, match="'noise'"):
        collect(title="t", ood=OODScores([1.0], {"noise": values}, 1.0))


def test_negative_max_previews_is_refused() -> None:
    with pytest.raises(SettingError, match="max_previews"):
        collect(title="t", audit=make_audit(), max_previews=-1)


# Text --------------------------------------------------------------------------------------------------------------


def _answers(**parts: object) -> dict[str, Answer]:
    return {answer.name: answer for answer in answers(collect(title="t", **parts))}  # type: ignore[arg-type]


def test_answers_of_every_part() -> None:
    audit = replace(make_audit(200, suspects=10), noise_rate=0.04)
    predictions = audit.frame["label"].to_numpy().copy()
    predictions[:50] = (predictions[:50] + 1) % 4
    found = _answers(
        audit=audit,
        calibration=ReliabilityPair(make_curve(0.094), make_curve(0.068)),
        ood=OODScores([1.0, 2.0, 2.5, 3.5], {"a": [3.0, 4.0], "b": [0.5]}, 2.5),
        predictions=predictions,
    )
    assert {name: answer.text for name, answer in found.items()} == {
        "Wrong labels": "10 labels to check",
        "Unfamiliar inputs": "2 inputs the model does not know",  # 3 and 4 are above the threshold, 0.5 is not
        "Confidence": "Trust 0.76 when it says 0.85",  # 0.1, 0.2, 0.3, 0.4 of 0.5, 0.7, 0.9, 0.98
        "Model": "75% of these labels predicted",
    }
    sentences = {name: answer.sentence for name, answer in found.items()}
    assert "Suspects among 200 labels. The estimated noise rate is 4.0%." in sentences["Wrong labels"]
    unsure = _answers(audit=replace(audit, noise_rate=0.25))["Wrong labels"].sentence
    assert "The estimated noise rate is 25.0%, too high if the classes are hard to distinguish. Hard ex" in unsure
    assert "2 of 3 inputs are above the threshold. So are 25% of the held-out inputs" in sentences["Unfamiliar inputs"]
    assert "about 1 of 3 familiar inputs would be flagged too" in sentences["Unfamiliar inputs"]
    assert "mean confidence of 100 examples. Calibration: error falls from 0.094 to 0.068" in sentences["Confidence"]
    assert "predicts 150 of the 200 given labels" in sentences["Model"]
    assert "On the 100 examples of the calibration its accuracy is 75.8%." in sentences["Model"]


def test_answers_name_what_was_not_run() -> None:
    found = _answers(audit=make_audit())
    assert [name for name, answer in found.items() if not answer.text] == ["Unfamiliar inputs", "Confidence"]
    assert found["Confidence"].sentence.startswith("Add ifcomp calibrate RUN DATA")
    only_ood = _answers(ood=OODScores([1.0], {"a": [3.0]}, 1.0))
    assert only_ood["Wrong labels"].sentence == "Add audit=ifc.audit(loader)."
    assert only_ood["Unfamiliar inputs"].text == "1 input the model does not know"


def test_an_audit_without_suspects() -> None:
    found = _answers(audit=make_audit(60, suspects=0))["Wrong labels"]
    assert (found.text, found.sentence[:35]) == ("No suspects", "None of 60 labels is a suspect. The")


@pytest.mark.parametrize(("after", "expected"), [(0.12, "rises from 0.094 to 0.120"), (0.0941, "stays at 0.094")])
def test_calibration_that_does_not_improve_is_reported(after: float, expected: str) -> None:
    found = _answers(calibration=ReliabilityPair(make_curve(0.094), make_curve(after)))
    assert expected in found["Confidence"].sentence


def test_calibration_that_keeps_the_softmax_is_reported() -> None:
    curve = make_curve(0.094)
    found = _answers(calibration=ReliabilityPair(curve, curve, "softmax", "softmax"))
    assert "no gain, so the softmax is kept; its calibration error is 0.094" in found["Confidence"].sentence


@pytest.mark.parametrize(("correct", "count"), [(0, 5), (5, 5), (3, 8), (93, 100), (999, 1000)])
def test_interval_inverts_the_test_of_the_normal_approximation(correct: int, count: int) -> None:
    """Both ends p solve |share - p| = z sqrt(p (1 - p) / count)."""
    share, z = correct / count, 1.959964
    grid = np.linspace(0, 1, 400_001)
    accepted = grid[abs(share - grid) <= z * np.sqrt(grid * (1 - grid) / count) + 1e-12]
    assert interval(share, count) == pytest.approx((accepted.min(), accepted.max()), abs=1e-5)


def test_confusion_matrix_by_hand() -> None:
    found = matrix([0, 0, 0, 0, 0, 1, 2], [0, 1, 1, 1, 2, 0, 2], 3)
    assert found is not None
    assert found.counts.tolist() == [[1, 3, 1], [1, 0, 0], [0, 0, 1]]
    assert found.shades.tolist() == [[0, 5, 2], [2, 0, 0], [0, 0, 0]]
    assert matrix([], [], 2).shades.tolist() == [[0, 0], [0, 0]]  # type: ignore[union-attr]
    assert matrix([0], [1], MAX_MATRIX + 1) is None


@pytest.mark.parametrize("predictions", [[0, 1], [0.5] * 60, [[0] * 60]])
def test_predictions_must_be_one_class_per_example(predictions: list) -> None:
    with pytest.raises(DataError, match="one class per example of the audit, 60 integers"):
        collect(title="t", audit=make_audit(60), predictions=predictions)


def test_classes_of_predictions_and_flagged_inputs_are_checked() -> None:
    with pytest.raises(LabelError, match="label 9"):
        collect(title="t", audit=make_audit(60), predictions=[9] * 60, class_names=list("abcd"))
    for example in (OODExample("a", 0, 3.0, 7, 0.5), OODExample("a", 0, 3.0, 1, 0.5, None, (Neighbour(1, 7),))):
        ood = OODScores([1.0], {"a": [3.0]}, 1.0, examples=[example])
        with pytest.raises(LabelError, match="label 7"):
            collect(title="t", ood=ood, class_names=list("abcd"))


def test_confusions_count_suspects_only() -> None:
    is_suspect = [True] * 4 + [False] * 2
    frame = make_audit(6).frame.assign(label=[0, 1, 0, 0, 1, 1], suggested=[1, 0, 1, 2, 0, 0], is_suspect=is_suspect)
    result = confusions(AuditCase(frame))
    assert [(item.label, item.suggested, item.count) for item in result] == [(0, 1, 2), (1, 0, 1), (0, 2, 1)]


def test_hints_name_the_missing_parts() -> None:
    names = {name for name, _ in hints(collect(title="t", audit=make_audit(), class_names=list("abcd")))}
    assert names == {
        "OOD inputs",
        "calibration",
        "coverage of the fit",
        "provenance",
        "accuracy and confusion matrix of the model",
        "previews of the examples",
        "neighbours of the suspects",
        "influential training examples",
    }


def test_a_missing_gallery_is_named() -> None:
    def names(*near: Neighbour) -> set[str]:
        example = OODExample("a", 0, 3.0, 0, 0.5, None, near)
        data = collect(title="t", ood=OODScores([1.0], {"a": [3.0]}, 1.0, examples=[example]))
        return {name for name, _ in hints(data)}

    assert "nearest training examples of flagged inputs" in names()
    assert "nearest training examples of flagged inputs" not in names(Neighbour(1, 0))


# Geometry ----------------------------------------------------------------------------------------------------------


def test_reliability_diagram_is_square() -> None:
    before = CurveCase([0.9, 0.2, 0.5], [0.9, 0.6, math.nan], [40, 10, 0], 0.1)
    chart = reliability(ReliabilityPair(before, make_curve(0.0)))
    low_dot, high_dot = chart.lines[0].dots
    side = chart.right - chart.left
    assert side == pytest.approx(chart.bottom - chart.top)
    assert low_dot.x == pytest.approx(chart.left)  # 0.2 is the lowest value, so the axes start there
    assert low_dot.y == pytest.approx(chart.bottom - 0.4 / 0.8 * side)
    assert high_dot.x - chart.left == pytest.approx(chart.bottom - high_dot.y)  # on the diagonal
    assert high_dot.radius == pytest.approx(2 * low_dot.radius)  # four times the examples, four times the area
    assert [tick.text for tick in chart.ticks_x] == ["1", "0.8", "0.6", "0.4", "0.2"]
    assert chart.ticks_x[0].position == pytest.approx(chart.right)
    assert chart.ticks_y[0].position == pytest.approx(chart.top)
    assert low_dot.interval == interval(0.6, 10)
    assert low_dot.top == pytest.approx(chart.bottom - (interval(0.6, 10)[1] - 0.2) / 0.8 * side)
    assert low_dot.bottom == pytest.approx(chart.bottom - (interval(0.6, 10)[0] - 0.2) / 0.8 * side)


def test_equal_curves_are_drawn_once() -> None:
    curve = make_curve(0.1)
    assert [line.name for line in reliability(ReliabilityPair(curve, curve, "softmax", "softmax")).lines] == ["softmax"]
    assert [line.name for line in reliability(ReliabilityPair(curve, curve)).lines] == ["before", "after"]


@pytest.mark.parametrize("value", [0.0, 0.93, 1.0])
def test_reliability_of_a_single_bin_is_inside_the_square(value: float) -> None:
    curve = CurveCase([value], [value], [3], 0.0)
    chart = reliability(ReliabilityPair(curve, curve))
    dot = chart.lines[1].dots[0]
    assert chart.left <= dot.x <= chart.right
    assert chart.top <= dot.y <= chart.bottom
    assert chart.top <= dot.top <= dot.y + 1e-9
    assert dot.y - 1e-9 <= dot.bottom <= chart.bottom


def _bar_heights(area: str, top: float, baseline: float) -> list[float]:
    points = [tuple(map(float, point.split())) for point in re.findall(r"[ML]([-\d. ]+)", area)]
    return [(baseline - y) / (baseline - top) for _, y in points[1:-1:2]]


def test_histogram_has_common_bins() -> None:
    generator = np.random.default_rng(0)
    groups = {"reference": generator.normal(-3, 1, 500), "other": generator.normal(1, 0.3, 300)}
    chart = histogram(groups, threshold=0.5)
    low, high = groups["reference"].min(), groups["other"].max()
    for row, values in zip(chart.rows, groups.values(), strict=True):
        counts = np.zeros(40)
        for value in values:
            counts[min(39, int((value - low) / (high - low) * 40))] += 1
        heights = _bar_heights(row.area, row.top, row.baseline)
        assert heights == pytest.approx((counts / counts.max()).tolist(), abs=2e-3)
        assert row.median == pytest.approx(np.median(values))
        assert row.flagged == (values > 0.5).sum()
    assert chart.rows[0].reference == ""
    assert _bar_heights(chart.rows[1].reference, chart.rows[1].top, chart.rows[1].baseline) == pytest.approx(
        _bar_heights(chart.rows[0].area, chart.rows[0].top, chart.rows[0].baseline), abs=2e-3
    )
    assert chart.threshold_x == pytest.approx(chart.left + (0.5 - low) / (high - low) * (chart.right - chart.left))


@pytest.mark.parametrize("values", [[0.0, 0.0], [2.0], [0.0, 1e-300, 5.0], [1e6, 1e6], [-7.0, -7.0]])
def test_histogram_of_extreme_values_is_inside_the_axes(values: list[float]) -> None:
    chart = histogram({"extreme": np.array(values)}, values[0])
    heights = _bar_heights(chart.rows[0].area, chart.rows[0].top, chart.rows[0].baseline)
    assert max(heights) == 1.0
    assert min(heights) >= 0.0
    assert chart.left <= chart.threshold_x <= chart.right


def test_ticks_are_few_and_round() -> None:
    assert round_ticks(0.2, 5.1) == [1, 2, 3, 4, 5]
    assert round_ticks(-1.5, 0.4) == [-1.5, -1, -0.5, 0]
    assert round_ticks(-12, 33) == [-10, 0, 10, 20, 30]
    for high in (1e-9, 0.3, 7.7, 999.0, 1e12):
        assert 3 <= len(round_ticks(0, high)) <= 9


# Payload -----------------------------------------------------------------------------------------------------------


def _payload(audit: AuditCase, **parts: object) -> dict:
    return table_payload(audit, collect(title="t", audit=audit, **parts))  # type: ignore[arg-type]


def test_columns_are_ranked_and_keep_six_digits() -> None:
    audit = make_audit(50)
    columns = _payload(audit)["columns"]
    assert columns.pop("rank") == list(range(1, 51))
    assert set(columns) == set(audit.frame.columns)
    for name, values in columns.items():
        assert values == pytest.approx(audit.ranked[name].astype(float).tolist(), rel=1e-5), name
    assert columns["index"] == audit.ranked["index"].tolist()
    assert columns["score"] == sorted(columns["score"], reverse=True)


def test_label_complexity_is_optional() -> None:
    frame = make_audit(5).frame.drop(columns="label_complexity")
    assert "label_complexity" not in _payload(AuditCase(frame))["columns"]
    assert "Label complexity" not in render(collect(title="t", audit=AuditCase(frame)))
    assert "Label complexity" in render(collect(title="t", audit=make_audit(5)))


def test_values_that_are_not_finite() -> None:
    audit = make_audit(4)
    frame = audit.frame.assign(score=[math.inf, -math.inf, math.nan, 2.0])
    columns = _payload(AuditCase(frame))["columns"]
    assert columns["score"] == ["Infinity", 2, "-Infinity", None]  # a label that is not scored is last
    assert columns["index"] == [0, 3, 1, 2]
    assert json.loads(json.dumps(columns, allow_nan=False)) == columns


def test_classes_without_names_are_numbers() -> None:
    audit = make_audit(5, classes=3)
    frame = audit.frame.assign(label=0, suggested=[1, 2, 1, 2, 1])
    assert _payload(AuditCase(frame))["classes"] == ["0", "1", "2"]
    named = _payload(AuditCase(frame), class_names=["a", "b", "c", "d"])
    assert named["classes"] == ["a", "b", "c", "d"]


def test_only_the_most_suspicious_examples_have_previews() -> None:
    audit = make_audit(30)
    previews = {index: Preview("text", f"text {index}", f"name {index}") for index in range(30)}
    payload = _payload(audit, previews=previews, max_previews=7)
    assert list(payload["shown"]) == audit.ranked["index"].head(7).tolist()
    for index, position in payload["shown"].items():
        assert payload["previews"][position] == {"kind": "text", "content": f"text {index}", "name": f"name {index}"}


def test_equal_previews_are_stored_once() -> None:
    audit = make_audit(10)
    suspect, other = audit.ranked["index"].head(2).tolist()
    previews = {suspect: Preview("text", "same"), other: Preview("text", "same")}
    payload = _payload(
        audit,
        previews=previews,
        explanations={suspect: [(other, 0.123456789, 1), (77, -2.0, 0, Preview("text", "another")), (78, 1.0, 0)]},
    )
    assert [preview["content"] for preview in payload["previews"]] == ["same", "another"]
    assert payload["explanations"] == {suspect: [[other, 0.123457, 1, 0], [77, -2, 0, 1], [78, 1, 0, None]]}


def test_the_key_identifies_the_audit() -> None:
    audit = make_audit(10)
    key = _payload(audit)["key"]
    assert _payload(audit, previews={3: Preview("text", "t")}, provenance={"date": "now"})["key"] == key
    other = audit.frame.assign(label=audit.frame["label"].to_numpy()[::-1])
    assert _payload(AuditCase(other))["key"] != key
    assert _payload(audit, class_names=list("abcd"))["key"] != key


def test_neighbours_by_layer() -> None:
    near = LayerNeighbours("conv", 0.123456789, (Neighbour(7, 2, Preview("text", "same")), Neighbour(3, 0)))
    payload = _payload(make_audit(10), previews={3: Preview("text", "of the audited data")}, neighbours={4: [near]})
    assert payload["neighbours"] == {4: [["conv", 0.123457, [[7, 2, 1], [3, 0, None]], [2, 0]]]}
    more = _payload(make_audit(10), neighbours={4: [replace(near, labels=(2, 0, 1))]})
    assert more["neighbours"][4][0][3] == [2, 0, 1]
    assert payload["previews"][1]["content"] == "same"


def test_image_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[object] = []
    monkeypatch.setattr("ifcomp.report.payload.thumbnail", lambda source: f"{encoded.append(source)}")
    audit = make_audit(10)
    previews = {index: Preview("image", np.full((2, 2), index)) for index in range(10)}
    examples = [(index, 1.0, 0) for index in range(10)]
    _payload(audit, previews=previews, explanations=dict.fromkeys(range(10), examples))
    assert len(encoded) == 10


def test_long_texts_and_rows_are_truncated() -> None:
    audit = make_audit(10)
    first, second = audit.ranked["index"].head(2).tolist()
    wide = {f"column {number}": 1 / 3 for number in range(20)} | {"column 0": "y" * 100}
    shown = _payload(audit, previews={first: Preview("text", "x" * 5000), second: Preview("row", wide)})
    text, row = (preview["content"] for preview in shown["previews"])
    assert (len(text), text[-1]) == (600, "…")
    assert row[0] == ["column 0", "y" * 59 + "…"]
    assert row[1] == ["column 1", "0.333333"]
    assert row[16:] == [["…", "4 more"]]


# Thumbnails --------------------------------------------------------------------------------------------------------


def _decoded(uri: str) -> Image.Image:
    kind, content = re.fullmatch(r"data:image/(png|webp);base64,([A-Za-z0-9+/=]+)", uri).groups()  # type: ignore[union-attr]
    image = Image.open(io.BytesIO(base64.b64decode(content)))
    assert image.format == kind.upper()
    return image


PIXELS = np.array([[0, 51, 102, 153, 204, 255], [255, 0, 255, 0, 1, 2]], dtype=np.uint8)


@pytest.mark.parametrize(
    "source",
    [
        PIXELS,
        PIXELS.astype(np.int64),
        PIXELS / 255,
        torch.tensor(PIXELS / 255, dtype=torch.float32).unsqueeze(0),
        PIXELS[..., None],
        (PIXELS / 255 - 0.5) / 0.2,  # normalised: rescaled
        Image.fromarray(PIXELS),
        Image.fromarray(PIXELS.astype(np.int32)),
    ],
    ids=["bytes", "integers", "floats", "tensor with a channel", "channel last", "normalised", "Pillow", "Pillow I"],
)
def test_small_grey_images_keep_every_pixel(source: object) -> None:
    assert np.array_equal(np.asarray(_decoded(thumbnail(source))), PIXELS)


def test_colour_images_with_channels_first_or_last() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 6, 3), dtype=np.uint8)
    assert np.array_equal(np.asarray(_decoded(thumbnail(pixels))), pixels)
    assert np.array_equal(np.asarray(_decoded(thumbnail(np.moveaxis(pixels, -1, 0)))), pixels)


def test_booleans_and_constant_images() -> None:
    assert np.asarray(_decoded(thumbnail(np.eye(3, dtype=bool)))).tolist() == (255 * np.eye(3)).tolist()
    assert np.asarray(_decoded(thumbnail(np.full((2, 2), 7.0)))).tolist() == [[0, 0], [0, 0]]
    assert np.asarray(_decoded(thumbnail(np.array([[math.nan, 1.0]])))).tolist() == [[0, 255]]


def test_large_image_files_are_reduced(tmp_path: object) -> None:
    path = f"{tmp_path}/photo.jpg"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (900, 1800, 3), dtype=np.uint8)).save(path)
    uri = thumbnail(path)
    assert _decoded(uri).size == (128, 64)
    assert len(uri) < 12_000


def test_invalid_images_are_refused(tmp_path: object) -> None:
    path = f"{tmp_path}/notes.png"
    with open(path, "w") as stream:
        stream.write("not an image")
    with pytest.raises(DataError, match=r"notes\.png"):
        thumbnail(path)
    with pytest.raises(DataError, match=r"gone\.png"):
        thumbnail("gone.png")
    with pytest.raises(DataError, match=r"\[2, 2, 2\]"):
        thumbnail(np.zeros((2, 2, 2)))
    with pytest.raises(DataError, match="from 0 to 4095"):
        thumbnail(np.array([[0, 4095]]))
    with pytest.raises(DataError, match="must be numeric"):
        thumbnail(np.array([["a", "b"]]))
