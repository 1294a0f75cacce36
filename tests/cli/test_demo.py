"""``ifcomp demo`` as a real process, and its parts."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from ifcomp.cli import demo_data
from ifcomp.cli.demo_results import Alpha
from ifcomp.cli.demo_study import choose_alpha
from ifcomp.cli.demo_tables import drawing

ALTERATIONS = {
    **demo_data.VALIDATION_STRANGERS,
    **demo_data.TEST_STRANGERS,
    **demo_data.VALIDATION_SHIFTS,
    **demo_data.TEST_SHIFTS,
}


@pytest.fixture(scope="module")
def outputs() -> dict[str, subprocess.CompletedProcess[str]]:
    """The demo as JSON and as tables, side by side."""
    commands = {"json": ["demo", "--json"], "tables": ["demo"]}
    environment = os.environ | {"COLUMNS": "100", "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
    started = {
        name: subprocess.Popen(
            [sys.executable, "-m", "ifcomp", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            env=environment,
        )
        for name, command in commands.items()
    }
    found = {}
    for name, process in started.items():
        out, err = process.communicate(timeout=300)
        found[name] = subprocess.CompletedProcess(commands[name], process.returncode, out, err)
    return found


def test_demo(outputs: dict[str, subprocess.CompletedProcess[str]]) -> None:
    """All checks in one test, so that workers do not run the demo once each."""
    for process in outputs.values():
        assert (process.returncode, process.stderr) == (0, "")
    result = json.loads(outputs["json"].stdout)
    check_networks(result)
    check_audit(result["audit"])
    check_out_of_distribution(result["out_of_distribution"])
    check_calibration(result["calibration"])
    check_tables(outputs["tables"].stdout, result)


def check_networks(result: dict[str, Any]) -> None:
    networks = result["networks"]
    assert networks["accuracy"] >= 0.97
    assert networks["accuracy_cleaned"] >= 0.97
    assert networks["memorised"] < 0.9
    assert networks["covered"] == networks["parameters"]
    assert result["training_examples"] + result["validation_examples"] + result["test_examples"] == 1797


def check_audit(audit: dict[str, Any]) -> None:
    assert audit["flipped"] == 0.05 * audit["examples"]
    assert audit["chance"] == {"found": 2.5, "auroc": 0.5}
    for score in ("complexity", "loss"):
        assert 0.75 * audit["flipped"] < audit[score]["found"] <= audit["flipped"]
        assert 0.95 < audit[score]["auroc"] <= 1
    assert 0.75 * audit["suspected"] < audit["suspected_flipped"] <= audit["flipped"]
    assert audit["suspected_flipped"] > audit["flipped"] / 2
    suspects = audit["suspects"]
    assert len(suspects) == 5
    assert sum(suspect["flipped"] for suspect in suspects) >= 4
    complexities = [suspect["complexity"] for suspect in suspects]
    assert complexities == sorted(complexities, reverse=True)
    assert all(suspect["given"] != suspect["suggested"] for suspect in suspects if suspect["flipped"])


def check_out_of_distribution(found: dict[str, Any]) -> None:
    assert found["damping"] == max(found["candidates"], key=lambda candidate: candidate["validation_auroc"])
    assert not set(found["chosen_on"]) & {row["name"] for row in found["rows"]}
    assert len(found["rows"]) == 3
    for row in found["rows"]:
        assert 0.9 < row["complexity"] <= 1
        assert 0.8 < row["max_softmax"] <= 1


def check_calibration(found: dict[str, Any]) -> None:
    assert found["alpha"] in found["candidates"]
    assert found["alpha"]["validation_nll"] <= found["candidates"][0]["validation_nll"]
    tested = [row["name"] for row in found["rows"]]
    assert set(found["chosen_on"]) & set(tested) == {"clean"}
    for row in found["rows"]:
        for quality in (row["softmax"], row["temperature"], row["pnml"]):
            assert 0 <= quality["ece"] < 0.5
            assert 0 < quality["nll"] < 2.3  # guessing ten classes is log 10
        assert row["temperature"]["accuracy"] == row["softmax"]["accuracy"]
        assert row["pnml"]["accuracy"] > row["softmax"]["accuracy"] - 0.1


def check_tables(output: str, result: dict[str, Any]) -> None:
    assert "…" not in output  # nothing cut off
    assert max(map(len, output.splitlines())) <= 100
    for text in ("larger = more suspicious", "nats", "validation digits", "from ifcomp import IFComp", "█"):
        assert text in output
    for row in (*result["out_of_distribution"]["rows"], *result["calibration"]["rows"]):
        assert row["name"] in output
    assert f"{result['audit']['complexity']['auroc']:.3f}" in output


def test_flipped_labels_are_other_labels() -> None:
    labels = torch.arange(400) % demo_data.CLASSES
    noisy, flipped = demo_data.flip_labels(labels, torch.Generator().manual_seed(0))
    assert int(flipped.sum()) == 20
    assert torch.equal(noisy != labels, flipped)
    assert noisy.min() >= 0
    assert noisy.max() < demo_data.CLASSES


def test_parts_do_not_overlap() -> None:
    data = demo_data.load_data(0)
    parts = [data.training, data.validation, data.test]
    images = torch.cat([part.images for part in parts]).flatten(1)
    assert len(images) == 1797
    assert len(images.unique(dim=0)) == 1797


@pytest.mark.parametrize("name", ALTERATIONS)
def test_alterations_give_images_that_depend_on_the_generator_alone(name: str) -> None:
    images = demo_data.load_data(0).validation.images[:20]
    before = images.clone()
    first, again = (ALTERATIONS[name](images, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first, again)
    assert torch.equal(images, before)
    assert first.shape == images.shape
    assert first.dtype == images.dtype
    assert first.min() >= 0
    assert first.max() <= 1
    assert torch.equal(first, images) == (name == "clean")


def test_alpha_that_costs_accuracy_is_not_chosen() -> None:
    softmax, gentle, harsh = Alpha(0, 0.8, 0.90), Alpha(1e-4, 0.7, 0.895), Alpha(1e-3, 0.6, 0.7)
    assert choose_alpha([softmax, gentle, harsh]) == gentle
    assert choose_alpha([softmax, harsh]) == softmax


def test_drawing_shades_all_values() -> None:
    assert drawing([[0, 4, 8, 12, 16]], 1).plain == " ░▒▓█"
    assert drawing([[16], [0]], 2).plain == "██\n  "
