"""``ifcomp demo``: its results, its text and its data."""

import io
import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from sklearn.datasets import load_digits

from ifcomp.cli import demo, demo_study

ALTERATIONS = {**demo_study.OOD_INPUTS, **demo_study.VALIDATION_SHIFTS, **demo_study.TEST_SHIFTS}


def test_demo() -> None:
    """One test, so that the demo runs once."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-m", "ifcomp", "demo", "--json"]
    process = subprocess.run(command, capture_output=True, encoding="utf-8", env=environment, timeout=300, check=False)
    assert (process.returncode, process.stderr) == (0, "")
    content = json.loads(process.stdout)
    check_networks(content["networks"])
    check_audit(content["audit"])
    check_ood(content["out_of_distribution"]["rows"])
    check_calibration(content["calibration"])
    check_text(content)


def check_networks(networks: dict[str, Any]) -> None:
    assert networks["accuracy"] >= 0.97
    assert networks["accuracy_cleaned"] >= 0.97
    assert networks["memorised"] < 0.9
    assert networks["covered"] == networks["parameters"]


def check_audit(audit: dict[str, Any]) -> None:
    assert (audit["examples"], audit["flipped"]) == (1000, 50)
    assert audit["chance"] == {"found": 2.5, "auroc": 0.5}
    for score in ("score", "loss"):
        assert 0.75 * audit["flipped"] < audit[score]["found"] <= audit["flipped"]
        assert 0.95 < audit[score]["auroc"] <= 1
    assert 0.75 * audit["suspected"] < audit["suspected_flipped"] <= audit["flipped"]
    assert audit["suspected_flipped"] > audit["flipped"] / 2
    suspects = audit["suspects"]
    assert len(suspects) == 5
    assert sum(suspect["flipped"] for suspect in suspects) >= 4
    scores = [suspect["score"] for suspect in suspects]
    assert scores == sorted(scores, reverse=True)
    assert f"{audit['suspected']} of 1,000 labels are suspects" in audit["headline"]
    assert all(suspect["given"] != suspect["suggested"] for suspect in suspects if suspect["flipped"])
    data = demo_study.load_data(0)
    for suspect in suspects:
        assert suspect["flipped"] == data.flipped[suspect["index"]]
        assert suspect["given"] == data.training.labels[suspect["index"]]


def check_ood(rows: list[dict[str, Any]]) -> None:
    assert [row["name"] for row in rows] == list(demo_study.OOD_INPUTS)
    for row in rows:
        assert 0.9 < row["complexity"] <= 1
        assert 0.8 < row["max_softmax"] <= 1


def check_calibration(calibration: dict[str, Any]) -> None:
    assert [row["name"] for row in calibration["rows"]] == list(demo_study.TEST_SHIFTS)
    assert calibration["alpha"] >= 0
    for row in calibration["rows"]:
        for form in ("softmax", "temperature", "ifcomp"):
            assert 0 <= row[form]["ece"] < 0.5
            assert 0 < row[form]["nll"] < 2.3  # uniform over ten classes: log 10
            assert row[form]["accuracy"] == row["softmax"]["accuracy"]


def check_text(content: dict[str, Any]) -> None:
    console = Console(width=80, file=io.StringIO())
    for part in demo._shown(content):
        console.print(part)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in text  # nothing is truncated
    for expected in ("larger = more suspicious", "nats", "validation digits", "█", "wrong label"):
        assert expected in text
    for row in (*content["out_of_distribution"]["rows"], *content["calibration"]["rows"]):
        assert row["name"] in text
    assert f"{content['audit']['score']['auroc']:.3f}" in text
    assert content["audit"]["headline"] in " ".join(text.split())


def test_data() -> None:
    data, digits = demo_study.load_data(0), load_digits()
    parts = [data.training, data.validation, data.test]
    assert [len(part.labels) for part in parts] == [1000, 300, 497]
    images = torch.cat([part.images for part in parts]).flatten(1)
    assert len(images.unique(dim=0)) == 1797
    true_labels = {image.tobytes(): label for image, label in zip(digits.images, digits.target, strict=True)}
    truth = [true_labels[image.numpy().tobytes()] for image in (16 * data.training.images[:, 0]).double()]
    np.testing.assert_array_equal(data.flipped, data.training.labels.numpy() != truth)
    assert int(data.flipped.sum()) == 50
    assert 0 <= data.training.labels.min() <= data.training.labels.max() < 10


@pytest.mark.parametrize("name", ALTERATIONS)
def test_alterations_are_images_and_reproducible(name: str) -> None:
    images = demo_study.load_data(0).validation.images[:20]
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
