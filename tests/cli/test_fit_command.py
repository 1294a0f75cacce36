"""`ifcomp fit`: what it writes is what the library fits, and bad input is refused before anything is written."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from workshop import Workshop, ifcomp

from ifcomp import IFComp, Relative
from ifcomp.cli.fit import choose_fisher
from ifcomp.cli.options import Fisher


def files() -> set[str]:
    return {path.name for path in Path().iterdir() if path.name != "__pycache__"}


def same_factors(found: IFComp, expected: IFComp) -> bool:
    assert found.factors is not None
    assert expected.factors is not None
    pairs = [
        (block.second_moments, expected.factors.blocks[name].second_moments)
        for name, block in found.factors.blocks.items()
    ]
    return all(torch.allclose(one, other, rtol=1e-4) for one, other in pairs)


def test_the_run_is_that_of_the_library(workshop: Workshop) -> None:
    found = ifcomp(*workshop.fit_arguments(), "--json", "--batch-size", "33")
    assert found.exit_code == 0, found.output
    facts = json.loads(found.stdout)
    assert (facts["command"], facts["examples"], facts["classes"]) == ("fit", 200, 10)
    assert (facts["fisher"], facts["damping"], facts["covered"]) == ("exact", "relative:0.1", 64 * 12 + 12 + 130)
    assert facts["class_names"][3] == "digit 3"
    assert facts["written"] == ["run.ifcomp", "run.ifcomp.json"]
    assert [row["treatment"] for row in facts["coverage"]] == ["EKFAC", "EKFAC"]
    assert "the user's own words" in found.stderr
    network = workshop.network()
    expected = IFComp(network, fisher="exact").fit([workshop.arrays("train")])
    assert same_factors(IFComp.load("run.ifcomp", network), expected)


def test_the_record_has_what_was_typed(run: Workshop) -> None:
    record = json.loads(Path("run.ifcomp.json").read_text())
    assert record["model"] == run.model
    assert (record["weights"], record["data"], record["options"]) == ("net.safetensors", "npz:train.npz", {})
    assert str(run.folder) not in Path("run.ifcomp.json").read_text()
    assert len(record["signature"]) == 64


def test_people_read_what_was_written_and_what_comes_next(workshop: Workshop) -> None:
    found = ifcomp(*workshop.fit_arguments(), "--out", "my.ifcomp")
    words = " ".join(found.stdout.split())
    assert "200 examples, 10 classes, exact Fisher at beta 1" in words
    assert "Covered: 910 of 910 parameters (100.0 %)" in words
    assert "Wrote my.ifcomp" in words
    assert "Next ifcomp audit my.ifcomp" in words


def test_settings_reach_the_fit(workshop: Workshop) -> None:
    given = ["--beta", "0.5", "--fisher", "sampled", "--label-samples", "3", "--seed", "7", "--damping", "1e-3"]
    found = ifcomp(*workshop.fit_arguments(), *given, "--layers", "3,nothing*", "--json")
    assert found.exit_code == 2
    assert "nothing*" in found.stderr
    found = ifcomp(*workshop.fit_arguments(), *given, "--layers", "3", "--sua", "no", "--json")
    facts = json.loads(found.stdout)
    assert (facts["beta"], facts["fisher"], facts["label_samples"], facts["seed"]) == (0.5, "sampled", 3, 7)
    assert (facts["damping"], facts["covered"], facts["parameters"]) == ("0.001", 130, 910)
    loaded = IFComp.load("run.ifcomp", workshop.network())
    assert (loaded.damping, loaded.settings.label_samples) == (0.001, 3)
    expected = IFComp(workshop.network(), 0.5, fisher="sampled", label_samples=3, seed=7, layers=["3"])
    assert same_factors(loaded, expected.fit([workshop.arrays("train")]))
    shown = ifcomp(*workshop.fit_arguments(), "--layers", "last").stdout
    assert "not covered" in shown


def test_relative_damping(workshop: Workshop) -> None:
    ifcomp(*workshop.fit_arguments(), "--damping", "relative:0.25")
    assert IFComp.load("run.ifcomp", workshop.network()).damping == Relative(0.25)


@pytest.mark.parametrize(
    ("wanted", "classes", "expected"),
    [("auto", 100, "exact"), ("auto", 101, "sampled"), ("sampled", 2, "sampled"), ("exact", 1000, "exact")],
)
def test_choice_of_the_fisher(wanted: str, classes: int, expected: str) -> None:
    assert choose_fisher(Fisher(wanted), classes) == expected


def test_warnings_are_one_line_on_standard_error(workshop: Workshop) -> None:
    found = ifcomp("fit", f"{workshop.module}:wide", "npz:valid.npz", "--json")
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["fisher"] == "sampled"
    found = ifcomp(*workshop.fit_arguments(), "--fisher", "sampled", "--json")
    json.loads(found.stdout)
    assert ".py:" not in found.stderr


BAD: list[tuple[list[str], str]] = [
    (["{m}:build", "npz:gone.npz"], "There is no file 'gone.npz'"),
    (["{m}:build", "digit"], "Data must be named as digits, npz:FILE"),
    (["{m}:build", "npz:train.npz", "--weights", "gone.safetensors"], "no weights file 'gone.safetensors'"),
    (["{m}:missing", "npz:train.npz"], "has no 'missing'"),
    (["{m}:nothing", "npz:train.npz"], "must return an nn.Module, but returned a str"),
    (["{m}:broken", "npz:train.npz"], "KeyError: 'weights of the layer' in {m}.py, line 21"),
    (["nowhere:build", "npz:train.npz"], "There is no module 'nowhere'"),
    (["build", "npz:train.npz"], "must be named as package.module:factory, but is 'build'"),
    (["{m}:wide", "npz:train.npz"], "has 10 classes (digit 0, digit 1"),
    (["{m}:build", "npz:train.npz", "--mean", "a,b"], "--mean takes numbers"),
    (["{m}:build", "npz:train.npz", "--mean", "0.1,0.2"], "one value, or one for each channel"),
    (["{m}:build", "npz:train.npz", "--image-size", "8"], "--image-size does not apply"),
    (["{m}:build", "npz:train.npz", "--damping", "lots"], "--damping must be a number such as 1e-12"),
    (["{m}:build", "npz:train.npz", "--damping", "-1"], "finite number of at least 0"),
    (["{m}:build", "npz:train.npz", "--damping", "times:1"], "or relative:0.1, but is 'times:1'"),
    (["{m}:build", "npz:train.npz", "--damping", ":1"], "or relative:0.1, but is ':1'"),
    (["{m}:build", "npz:train.npz", "--layers", "fc*"], "fc*"),
    (["{m}:build", "npz:train.npz", "--out", "."], "is a folder"),
    (["{m}:build", "npz:train.npz", "--out", "gone/run.ifcomp"], "there is no folder 'gone'"),
    (["{m}:build", "npz:train.npz", "--device", "nowhere"], "cannot run on --device 'nowhere'"),
    (["{m}:build", "npz:strange.npz"], "label 99"),
    (
        ["{m}:build", "npz:flat.npz"],
        "fails on the first examples of 'npz:flat.npz', inputs float32 [2, 3]: RuntimeError",
    ),
    (["{m}:build", "npz:empty.npz"], "has no examples"),
    (["{m}:build", "npz:nan.npz"], "NaN"),
    (["{m}:build", "npz:train.npz", "--beta", "-1"], "--beta"),
    (["{m}:build", "npz:train.npz", "--fisher", "best"], "--fisher"),
    (["{m}:build"], "DATA"),
]


@pytest.mark.parametrize(("arguments", "words"), BAD, ids=[words for _, words in BAD])
def test_bad_input_ends_with_2_and_writes_nothing(workshop: Workshop, arguments: list[str], words: str) -> None:
    import numpy as np

    np.savez("flat.npz", x=np.ones((5, 3)))
    np.savez("empty.npz", x=np.ones((0, 1, 8, 8)))
    np.savez("nan.npz", x=np.full((5, 1, 8, 8), np.nan))
    before = files()
    found = ifcomp("fit", *(argument.format(m=workshop.module) for argument in arguments))
    assert found.exit_code == 2, found.output
    assert words.format(m=workshop.module) in " ".join(found.stderr.replace("│", " ").split())
    assert found.stdout == ""
    assert "Traceback" not in found.stderr
    assert files() == before


def test_a_factory_of_batches_gives_the_same_run(run: Workshop) -> None:
    network = run.network()
    expected = IFComp.load("run.ifcomp", network)
    found = ifcomp("fit", run.model, f"{run.module}:batches", "--weights", "net.pt", "--out", "other.ifcomp")
    assert found.exit_code == 0, found.output
    assert same_factors(IFComp.load("other.ifcomp", network), expected)


def test_a_failed_fit_leaves_the_old_run(run: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Path("run.ifcomp").read_bytes()

    def fail(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ifcomp.predictor.fit_second_moments", fail)
    found = ifcomp(*run.fit_arguments(), "--beta", "0.3")
    assert found.exit_code == 130
    assert found.stderr.splitlines()[-1] == "Stopped. Files are either complete or as they were before."
    assert Path("run.ifcomp").read_bytes() == before


def test_unhealthy_layers_are_told(workshop: Workshop) -> None:
    facts = json.loads(ifcomp(*workshop.fit_arguments(), "--json").stdout)
    assert [layer["verdict"] for layer in facts["health"]] == ["fine", "fine"]
    assert facts["suggested_damping"] == facts["damping"] == "relative:0.1"
    words = " ".join(ifcomp(*workshop.fit_arguments(), "--damping", "1000").stdout.split())
    assert "ten times the damping divides its expected influence by 10.0: take less" in words
    assert "Suggested damping: --damping relative:0.1." in words
