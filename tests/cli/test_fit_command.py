"""`ifcomp fit` writes the fit of the library, and refuses invalid input before it writes anything."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from project import Project, check_refused, ifcomp, run_json, run_text, stored_record

from ifcomp import IFComp, Relative
from ifcomp.cli.options import Fisher


def have_same_factors(actual: IFComp, expected: IFComp) -> bool:
    assert actual.factors is not None
    assert expected.factors is not None
    pairs = [
        (block.second_moments, expected.factors.blocks[name].second_moments)
        for name, block in actual.factors.blocks.items()
    ]
    return all(torch.allclose(first, second, rtol=1e-4) for first, second in pairs)


def test_run_and_json(project: Project) -> None:
    result = ifcomp(*project.fit_arguments(), "--json", "--batch-size", "33")
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert (content["command"], content["examples"], content["classes"]) == ("fit", 200, 10)
    assert (content["fisher"], content["damping"], content["covered"]) == ("exact", "relative:0.1", 64 * 12 + 12 + 130)
    assert content["class_names"][3] == "digit 3"
    assert content["written"] == ["run.ifcomp"]
    assert [row["treatment"] for row in content["coverage"]] == ["EKFAC", "EKFAC"]
    assert "printed by the user's code" in result.stderr
    network = project.network()
    expected = IFComp(network, fisher="exact").fit([project.arrays("train")])
    assert have_same_factors(IFComp.load("run.ifcomp", network), expected)


def test_record(run: Project) -> None:
    record = stored_record()
    assert record["model"] == run.model
    assert (record["weights"], record["data"], record["options"]) == ("net.safetensors", "npz:train.npz", {})
    assert str(run.folder) not in json.dumps(record)
    assert len(record["signature"]) == 64


def test_text(project: Project) -> None:
    text = run_text(*project.fit_arguments(), "--out", "my.ifcomp")
    assert "200 examples, 10 classes, exact Fisher at beta 1" in text
    assert "Covered: 910 of 910 parameters (100.0 %)" in text
    assert "Wrote my.ifcomp" in text
    assert "Next ifcomp audit my.ifcomp" in text
    assert "not covered" in run_text(*project.fit_arguments(), "--layers", "last")


def test_training_accuracy(project: Project) -> None:
    x, y = project.arrays("train")
    accuracy = float((project.network()(x).argmax(1) == y).double().mean())
    assert accuracy > 0.5
    assert run_json(*project.fit_arguments())["training_accuracy"] == accuracy
    text = run_text(*project.fit_arguments())
    assert f"Training accuracy: {accuracy:.1%}" in text
    assert "in your training" not in text


def test_a_low_training_accuracy_is_questioned(project: Project) -> None:
    """Most labels are in another order: the accuracy is above twice chance, but below that of the training."""
    x, y = project.arrays("train")
    np.savez("third.npz", x=x.numpy(), y=torch.cat([y[:60], y[60:][torch.arange(140).flip(0)]]).numpy())
    content = run_json(*project.fit_arguments("npz:third.npz"))
    assert 0.2 < content["training_accuracy"] < 0.5
    assert content["exit_reason"] is None
    text = run_text(*project.fit_arguments("npz:third.npz"))
    assert "If it was larger in your training, preprocessing or weights differ." in text


@pytest.mark.filterwarnings("default:The training accuracy is")
def test_a_model_without_weights_is_noticed(project: Project) -> None:
    result = ifcomp("fit", project.model, "npz:train.npz", "--json")
    content = json.loads(result.stdout)
    assert content["training_accuracy"] < 0.2
    assert (content["exit_code"], result.exit_code) == (3, 3)
    assert content["exit_reason"].startswith(
        f"Exit code 3: the training accuracy is {content['training_accuracy']:.1%}"
    )
    assert "Wrong preprocessing, or no weights?" in result.stderr
    assert Path("run.ifcomp").exists()
    text = " ".join(ifcomp("fit", project.model, "npz:train.npz").stdout.split())
    assert "Wrote run.ifcomp" in text
    assert "Next" not in text


def test_settings(project: Project) -> None:
    options = ["--beta", "0.5", "--fisher", "sampled", "--label-samples", "3", "--seed", "7", "--damping", "1e-3"]
    content = run_json(*project.fit_arguments(), *options, "--layers", "3", "--sua", "no")
    assert (content["beta"], content["fisher"], content["label_samples"], content["seed"]) == (0.5, "sampled", 3, 7)
    assert (content["damping"], content["covered"], content["parameters"]) == ("0.001", 130, 910)
    loaded = IFComp.load("run.ifcomp", project.network())
    assert (loaded.damping, loaded.settings.label_samples) == (0.001, 3)
    expected = IFComp(project.network(), 0.5, fisher="sampled", label_samples=3, seed=7, layers=["3"])
    assert have_same_factors(loaded, expected.fit([project.arrays("train")]))


def test_relative_damping(project: Project) -> None:
    run_json(*project.fit_arguments(), "--damping", "relative:0.25")
    assert IFComp.load("run.ifcomp", project.network()).damping == Relative(0.25)


@pytest.mark.parametrize(
    ("option", "num_classes", "expected"),
    [("auto", 100, "exact"), ("auto", 101, "sampled"), ("sampled", 2, "sampled"), ("exact", 1000, "exact")],
)
def test_fisher_option(option: str, num_classes: int, expected: str) -> None:
    assert Fisher(option).setting(num_classes) == expected


def test_json_and_warnings_use_different_streams(project: Project) -> None:
    assert run_json("fit", f"{project.module}:wide", "npz:valid.npz", code=3)["fisher"] == "sampled"
    result = ifcomp(*project.fit_arguments(), "--fisher", "sampled", "--json")
    json.loads(result.stdout)
    assert ".py:" not in result.stderr


INVALID: list[tuple[list[str], str]] = [
    (["{m}:build", "npz:gone.npz"], "There is no file 'gone.npz'"),
    (["{m}:build", "digit"], "Data must be named as digits, npz:FILE"),
    (["{m}:build", "npz:train.npz", "--weights", "gone.safetensors"], "no weights file 'gone.safetensors'"),
    (["{m}:missing", "npz:train.npz"], "has no 'missing'"),
    (["{m}:not_a_model", "npz:train.npz"], "must return an nn.Module, but returned a str"),
    (["{m}:broken", "npz:train.npz"], "KeyError: 'weights of the layer' in {m}.py, line 23"),
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
    (["{m}:build", "npz:train.npz", "--layers", "3,nothing*"], "nothing*"),
    (["{m}:build", "npz:train.npz", "--out", "."], "is a folder"),
    (["{m}:build", "npz:train.npz", "--out", "gone/run.ifcomp"], "there is no folder 'gone'"),
    (["{m}:build", "npz:train.npz", "--device", "nowhere"], "cannot run on --device 'nowhere'"),
    (["{m}:build", "npz:inverted.npz"], "label 99"),
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


@pytest.mark.parametrize(("arguments", "message"), INVALID, ids=[message for _, message in INVALID])
def test_invalid_arguments(project: Project, arguments: list[str], message: str) -> None:
    np.savez("empty.npz", x=np.ones((0, 1, 8, 8)))
    np.savez("nan.npz", x=np.full((5, 1, 8, 8), np.nan))
    formatted = [argument.format(m=project.module) for argument in arguments]
    check_refused("fit", *formatted, message=message.format(m=project.module))


def test_factory_of_batches(run: Project) -> None:
    network = run.network()
    expected = IFComp.load("run.ifcomp", network)
    run_json("fit", run.model, f"{run.module}:batches", "--weights", "net.pt", "--out", "other.ifcomp")
    assert have_same_factors(IFComp.load("other.ifcomp", network), expected)


def test_interrupted_fit_keeps_the_old_run(run: Project) -> None:
    before = Path("run.ifcomp").read_bytes()
    Path("interrupt").touch()
    result = ifcomp(*run.fit_arguments(f"{run.module}:Interrupted"), "--beta", "0.3")
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1].startswith("Stopped. Files are either complete or unchanged.")
    assert Path("run.ifcomp").read_bytes() == before


def test_unhealthy_layers_are_reported(project: Project) -> None:
    content = run_json(*project.fit_arguments())
    assert [layer["verdict"] for layer in content["health"]] == ["fine", "fine"]
    assert content["suggested_damping"] == content["damping"] == "relative:0.1"
    text = run_text(*project.fit_arguments(), "--damping", "1000")
    assert "ten times the damping divides its expected influence by 10.0; use less damping" in text
    assert "Suggested damping: --damping relative:0.1." in text
