"""``ifcomp demo``: its results, its text and its data."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from sklearn.datasets import load_digits

from ifcomp.cli import demo, demo_study

ALTERATIONS = {**demo_study.OOD_INPUTS, **demo_study.SHIFTS}


def test_demo(tmp_path: Path) -> None:
    """One test, so that the demo runs once."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-m", "ifcomp", "demo", "--json"]
    process = subprocess.run(
        command, capture_output=True, encoding="utf-8", env=environment, timeout=300, check=False, cwd=tmp_path
    )
    assert (process.returncode, process.stderr) == (0, "")
    content = json.loads(process.stdout)
    assert content["accuracy"]["training"] == 1
    assert content["accuracy"]["test"] > 0.95
    check_audit(content["audit"])
    check_ood(content["out_of_distribution"])
    check_predictions(content["predictions"])
    check_text(content)
    page = (tmp_path / "ifcomp-demo.html").read_text(encoding="utf-8")
    assert content["audit"]["headline"] in page
    assert "of 497 inputs are above the threshold" in page
    assert "data:image/png" in page.split('<script type="application/json"')[1]  # the cards
    gallery = page.split('<ul class="gallery">')[1].split("</section>")[0].split('<li class="panel">')[1:]
    assert [item.count("data:image/png") for item in gallery] == [5] * 12  # the input, four training examples


def check_audit(audit: dict[str, Any]) -> None:
    """The network has memorised the wrong labels: the loss misses most of them, the audit does not."""
    assert (audit["examples"], audit["flipped"], audit["memorised"]) == (1000, 50, 1)
    assert 40 <= audit["audit"]["found"] <= audit["suspected"] <= 55
    assert audit["audit"]["found"] > 0.9 * audit["suspected"]
    assert 2 < audit["loss"]["found"] < 25
    assert audit["audit"]["auroc"] > 0.99 > audit["loss"]["auroc"]
    suspects = audit["suspects"]
    assert len(suspects) == 5
    assert sum(suspect["flipped"] for suspect in suspects) >= 4
    scores = [suspect["score"] for suspect in suspects]
    assert scores == sorted(scores, reverse=True)
    assert f"{audit['suspected']} of 1,000 labels are suspects" in audit["headline"]
    data = demo_study.load_data(0)
    for suspect in suspects:
        assert suspect["flipped"] == data.flipped[suspect["index"]]
        assert suspect["given"] == data.training.labels[suspect["index"]]


def check_ood(found: dict[str, Any]) -> None:
    test, *outside = found["rows"]
    assert [row["name"] for row in outside] == list(demo_study.OOD_INPUTS)
    assert abs(test["gate"] - 0.05) < 0.04
    assert abs(test["max_softmax"] - 0.05) < 0.04
    for row in outside:
        assert row["gate"] > 0.9 > row["max_softmax"] > 0.2


def check_predictions(predictions: dict[str, Any]) -> None:
    """The softmax is too confident, and its sets contain the label too seldom; calibrated ones do not."""
    softmax, calibrated = predictions["softmax"], predictions["ifcomp"]
    assert calibrated["accuracy"] == softmax["accuracy"]
    assert softmax["confidence"] > softmax["accuracy"] + 0.05
    assert abs(calibrated["confidence"] - calibrated["accuracy"]) < softmax["confidence"] - softmax["accuracy"]
    assert softmax["covered"] < predictions["coverage"] - 0.02 < calibrated["covered"]
    assert 1 <= softmax["size"] < calibrated["size"] < 5
    assert calibrated["nll"] < softmax["nll"] - 0.05


def check_text(content: dict[str, Any]) -> None:
    console = Console(width=80, file=io.StringIO())
    for part in demo._shown(content):
        console.print(part)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in text  # nothing is truncated
    for expected in ("memorised 100% of the wrong ones", "nats", "wrong label", "mean confidence"):
        assert expected in text
    for row in content["out_of_distribution"]["rows"]:
        assert row["name"] in text
    bars = {line.split()[0]: line for line in text.splitlines() if "  finds " in line}
    flagged = content["audit"]["suspected"]
    assert set(bars) == {"audit", "loss"}
    for name, line in bars.items():
        found = content["audit"][name]["found"]
        assert (line.count("█"), line.count("░")) == (found, flagged - found)
        assert line.endswith(f"finds {found} of 50")


def test_long_bars_are_scaled() -> None:
    line = demo._bars({"loss": 50}, flagged=200, wrong=100).plain
    assert (line.count("█"), line.count("░")) == (demo.BAR // 4, demo.BAR - round(demo.BAR / 4))


def test_sets_of_the_softmax_are_the_smallest_that_sum_to_the_coverage() -> None:
    probabilities = torch.tensor([[0.2, 0.5, 0.3], [0.02, 0.96, 0.02], [0.3, 0.3, 0.4]])
    sets = demo_study.softmax_sets(probabilities, 0.75)
    assert sets.tolist() == [[False, True, True], [False, True, False], [True, True, True]]


def test_every_digit_gets_one_of_the_shifts() -> None:
    digits = demo_study.load_data(0).test
    shifted = digits.shifted(3)
    versions = [alter(digits.images, torch.Generator().manual_seed(3)) for alter in demo_study.SHIFTS.values()]
    equal = torch.stack([(shifted.images == version).flatten(1).all(1) for version in versions])
    assert equal.any(0).all()
    assert all(90 < count < 160 for count in equal.sum(1).tolist())
    assert torch.equal(shifted.labels, digits.labels)


def test_data() -> None:
    data, digits = demo_study.load_data(0), load_digits()
    parts = [data.training, data.held_out, data.test]
    assert [len(part.labels) for part in parts] == [1000, 300, 497]
    images = torch.cat([part.images for part in parts]).flatten(1)
    assert len(images.unique(dim=0)) == 1797
    true_labels = {image.tobytes(): label for image, label in zip(digits.images, digits.target, strict=True)}
    truth = [true_labels[image.numpy().tobytes()] for image in (16 * data.training.images[:, 0]).double()]
    np.testing.assert_array_equal(data.flipped, data.training.labels.numpy() != truth)
    assert int(data.flipped.sum()) == 50
    expected = [
        demo_study.CONFUSED[label] if flipped else label for label, flipped in zip(truth, data.flipped, strict=True)
    ]
    assert data.training.labels.tolist() == expected


@pytest.mark.parametrize("name", ALTERATIONS)
def test_alterations_are_images_and_reproducible(name: str) -> None:
    images = demo_study.load_data(0).held_out.images[:20]
    original = images.clone()
    first, second = (ALTERATIONS[name](images, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(images, original)
    assert first.shape == images.shape
    assert first.dtype == images.dtype
    assert first.min() >= 0
    assert first.max() <= 1
    assert torch.equal(first, images) == (name == "clean")


def test_draw() -> None:
    assert demo.draw([[0, 4, 8, 12, 16]]) == " ░▒▓█"
    assert demo.draw([[16], [0]]) == "█\n "
